"""report.html and compare.html in a real browser, Debian's Chromium: `make test-browser`."""

import csv
import random
import shutil
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from PIL import Image
from quick_runs import handlers_put_back, quick

import resnet50_test
import transformer_test
from utils.reporting import compare
from utils.reporting.run_page import write_run_page

sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright
Axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium"),
]

CLASSES = ["<script>alert(1)</script>", 'a & "b"', "Straße", "a_name_of_one_word" * 5]
COMMON = "--device cpu --threads 1 --bs 8 --epochs 2 --workers 0"


def write_pictures(folder: Path) -> None:
    """A folder for each class; a slash in a name would make two."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 8), ("test", 5)):
        for name in CLASSES:
            (folder / split / name.replace("/", "∕")).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (24, 60, 3), np.uint8)
                file = f"{number} of 100%, #1 {'long' * 9}.png"
                Image.fromarray(pixels).save(folder / split / name.replace("/", "∕") / file)


def write_texts(folder: Path) -> None:
    rng = random.Random(0)
    words = ["<b>bold</b>", "x" * 300, "a", "few", "ordinary", "words", "שלום", "&amp;"]
    for split, count in (("train", 40), ("test", 20)):
        with open(folder / f"{split}.csv", "w", newline="", encoding="utf-8") as file:
            rows = ([CLASSES[i % 4], " ".join(rng.choices(words, k=60))] for i in range(count))
            csv.writer(file).writerows([["topic", "text"], *rows])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of the runs `pictures` and `texts`, and of compare.html."""
    folder = tmp_path_factory.mktemp("pages")
    write_pictures(folder / "files")
    write_texts(folder)
    with pytest.MonkeyPatch.context() as patch, handlers_put_back():
        quick(patch)
        patch.setattr("utils.runs.report.write_run_page", write_run_page)
        patch.chdir(folder)
        network = f"--depth 18 --width 4 --image_size 24 {COMMON} --output pictures"
        flags = f"--dataset imagefolder --data_dir files --cache_dir cache {network}".split()
        assert resnet50_test.main(flags) == 0
        network = f"--layers 1 --dim 16 --heads 2 --ffn 16 --max_len 80 {COMMON} --output texts"
        files = "--dataset csv --train_file train.csv --test_file test.csv --label_column topic"
        flags = f"{files} --cache_dir cache --tokenizer wordpiece --vocab_size 300 {network}"
        assert transformer_test.main(flags.split()) == 0
        assert compare.main(["pictures", "texts", "--output", "compare.html"]) == 0
    return folder


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


WIDE = """() => [...document.querySelectorAll("body *")].filter(element =>
    !element.closest("[tabindex]") && element.getBoundingClientRect().right > innerWidth + 1
).map(element => element.outerHTML.slice(0, 200))"""  # what scrolls by itself may be wide
BROKEN = "() => [...document.images].filter(image => !image.naturalWidth).map(image => image.alt)"


@pytest.mark.parametrize("name", ["pictures/report.html", "texts/report.html", "compare.html"])
@pytest.mark.parametrize("width, scheme", [(360, "light"), (360, "dark"), (1200, "light")])
def test_it_can_be_read(folder, browser, name, width, scheme):
    path, said, asked = folder / name, [], []
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    assert said == [] and [url for url in asked if not url.startswith("data:")] == [path.as_uri()]
    assert path.stat().st_size < 5e6
    assert page.evaluate(WIDE) == [] and page.evaluate(BROKEN) == []
    for link in page.eval_on_selector_all("a[href]", "links => links.map(link => link.href)"):
        assert Path(unquote(urlsplit(link).path)).is_file(), link
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    page.emulate_media(media="print", color_scheme=scheme)
    page.set_viewport_size({"width": 700, "height": 1000})  # of a sheet of A4
    assert page.evaluate(WIDE) == []
    page.close()


def test_pictures_are_there(folder, browser):
    page = browser.new_page()
    page.goto((folder / "pictures/report.html").as_uri())
    assert page.evaluate("() => document.images.length") > 4
    assert page.evaluate("() => document.scripts.length") == 0
    page.close()
