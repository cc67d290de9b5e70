"""Pages of HTML, parsed."""

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """The elements of a page, with their text; asserts that each is closed."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.elements = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append([tag, dict(attrs), ""])
        if tag not in VOID:
            self.open.append(self.elements[-1])

    def handle_startendtag(self, tag, attrs):
        self.elements.append([tag, dict(attrs), ""])

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open:
            self.open[-1][2] += data

    def of(self, tag: str) -> list[tuple[dict, str]]:
        return [(attrs, text.strip()) for name, attrs, text in self.elements if name == tag]
