"""Pages of HTML: each is one file, without scripts, with nothing that comes from the network."""

import io
import re
from collections.abc import Sequence
from pathlib import Path

from ..errors import UserError
from ..files import written_aside
from .plots import limit_loss

# Colours, seen on white and on black, and dashes of the lines of a plot: one of each for a series,
# the last ones for all after the seventh.
COLOURS = ["#3a7fc4", "#d2602c", "#2d8f5e", "#a266bb", "#a37a0e", "#1d8c96", "#cb5088", "#858585"]
DASHES = ["", "6 2", "2 2", "8 2 2 2", "", "6 2", "2 2", ""]


def write_page(path: Path, template: str, **context) -> None:
    """Renders a template of templates/ into a file. Raises OSError, or UserError if something else
    than such a page is there."""
    import jinja2

    mark = f'<meta name="generator" content="training-toolkit {template}">'
    if path.is_file() and mark.encode() not in path.read_bytes()[:1000]:
        raise UserError(f"{path} is no such page: move it away, or choose another name")
    loader = jinja2.FileSystemLoader(Path(__file__).with_name("templates"))
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True)
    page = environment.get_template(template).render(mark=mark, **context)
    with written_aside(path) as aside:  # names of files may have surrogates
        aside.write_bytes(page.encode("utf-8", "backslashreplace"))


def plot(lines: Sequence[tuple[int, list, list]], axis_name: str, title: str) -> str:
    """An <svg> of lines, each (number of its colour and dashes, x, y); of a loss, by the title,
    without the highest values."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 2.9))
    axis = figure.add_axes((0.13, 0.16, 0.82, 0.82))
    for number, x, y in lines:
        dashes = (0, [float(length) for length in DASHES[number].split()])
        style = {"color": COLOURS[number], "ls": dashes, "lw": 1.4}
        axis.plot(x, y, marker=".", ms=6, markevery=[-1], **style)
    if "loss" in title:
        limit_loss(axis, ([], []), dict(enumerate(line[1:] for line in lines)))
    axis.set(xlabel=axis_name, facecolor="none")
    axis.set_xlim(left=0)
    axis.spines[:].set_visible(False)
    axis.grid(axis="y", color="#85858566", lw=0.6)
    axis.tick_params(length=0)
    return to_svg(figure, title)


def to_svg(figure, salt: str) -> str:
    """The figure as an element <svg> with the font of its page. `salt` tells its clip paths from
    those of other plots."""
    import matplotlib

    content = io.StringIO()
    figure.patch.set_visible(False)
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(content, format="svg", metadata=nothing)
    text = content.getvalue()
    text = re.sub(r' id="[\w.]+_\d+"', "", text[text.index("<svg") :])  # the same in all plots
    return re.sub(r' (width|height)="[\d.]+pt"', "", text)
