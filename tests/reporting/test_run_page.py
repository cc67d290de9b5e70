"""report.html: what is told of a run, safely and whole."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from html_pages import Page
from PIL import Image

from utils.exchange import Exchange
from utils.measures.findings import Doubt, find
from utils.measures.outcomes import Outcomes
from utils.reporting.answers import SampleNames
from utils.reporting.run_page import DOUBTS, Seen, write_run_page

CLASSES = ["cat", "<script>alert(1)</script>", "a & b"]
TARGETS = torch.tensor([0, 0, 1, 2, 2, 1])
LOGITS = torch.tensor(
    [[4, 0, 0], [0, 5, 0], [0, 3, 0], [1, 0, 0], [0, 0, 2], [0, 0, 6]], dtype=torch.float32
)


def recorded(logits=LOGITS, targets=TARGETS) -> Outcomes:
    found = Outcomes(logits.shape[1], [np.arange(len(targets))], Exchange())
    found.add(logits, targets)
    found.finish()
    return found


def write_run(folder: Path, **further) -> Path:
    """What a page is made of, of a run with two epochs."""
    folder.mkdir()
    lines = ["# resnet50_test.py", "seed: 0  # default", "lr: '<b>'  # command line"]
    (folder / "config.yaml").write_text("\n".join(lines))
    records = [
        {"split": "train", "average_over": "steps", "step": 1, "epoch": 0.5, "lr": 0.1},
        *(
            {"step": 2 * n, "epoch": n, "split": split, "loss": 1.0 / n, "accuracy": 40.0 * n}
            | ({"average_over": "epoch", "lr": 0.1} if split == "train" else {})
            | ({"time_share": {"data": 0.25, "forward_backward": 0.75}} if split == "train" else {})
            for n in (1, 2)
            for split in ("train", "val")
        ),
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in records))
    (folder / "log.txt").write_text(
        "2026-01-01 00:00:00 note: <i>look</i>\n2026-01-01 00:00:01 epoch 1: train loss 1\n"
        "2026-01-01 00:00:02 data took 25% of the time: more --workers\n"
    )
    summary = {
        "status": "finished", "model_weights": "last", "test_accuracy": 50.0, "test_loss": 1.5,
        "test_samples": 6, "model_step": 4, "steps": 4, "epochs": 2.0, "train_samples": 8,
        "classes": 3, "global_batch_size": 4, "seconds_training": 9.0, "seconds_total": 10.0,
        "samples_per_second": 3.0, "device": "cpu", "precision": "fp32", "world_size": 1,
        "model_test_intervals": {"accuracy": [18.8, 81.2]}, "baseline_wins": True,
        "baseline": {"name": "a <line>", "accuracy": 66.0, "intervals": {}}, "majority": None,
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary | further))
    return folder


def pictures(folder: Path) -> SampleNames:
    """In files, one of which is not there any longer."""
    paths = [folder / f"'{i} ä.png" for i in range(6)]
    for path in paths[:-1]:
        path.write_bytes(b"")

    def picture(sample: int) -> np.ndarray:
        return np.full((300, 150, 3), 40 * sample, np.uint8)

    return SampleNames(["file"], lambda: ([str(path)] for path in paths), picture=picture)


def seen(names: SampleNames, targets=TARGETS, copies=(), batch=()) -> Seen:
    """The test samples, from which the training samples differ in the class of the last one."""
    of_training = targets.numpy().copy()
    of_training[-1] = 0
    labels = {"train": of_training, "test": targets.numpy()}
    notes = ["<i>look</i>", "what loading found"]
    return Seen(dict.fromkeys(labels, names), labels, "test", notes, copies, lambda: batch)


@pytest.fixture
def page(tmp_path) -> Page:
    folder = write_run(tmp_path / "run")
    batch = [np.zeros((8, 8, 3), np.uint8)] * 2
    of_data = seen(pictures(tmp_path), copies=[(0, 0), (5, 5), (2, 1)], batch=batch)
    write_run_page(folder, "a <model> on data", CLASSES, recorded(), of_data)
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "http:" not in text.replace("http://www.w3.org", "") and "https:" not in text
    return Page(text)


def texts_of(page: Page, tag: str) -> list[str]:
    return [" ".join(text.split()) for _, text in page.of(tag)]


def test_the_result_and_what_the_run_said(page):
    assert texts_of(page, "h1") == ["50.00 % of 6 test pictures right"]
    rows = texts_of(page, "td")
    assert rows[:2] == ["50.00 %", "18.8 to 81.2"] and "75.0 %" in rows and "<b>" in rows
    told = texts_of(page, "li")
    assert told.count("<i>look</i>") == told.count("what loading found") == 1
    assert "data took 25% of the time: more --workers" in told
    assert "python resnet50_test.py --config" in texts_of(page, "code")[0]
    assert texts_of(page, "strong") == ["A baseline is better: see below."]
    assert rows[4:6] == ["50.00 %", "66.00 %"]
    assert texts_of(page, "caption")[0] == "The run's model on 6 test pictures"


def test_nothing_of_the_user_s_becomes_html(page):
    assert page.of("script") == page.of("i") == []
    headings = [text for attrs, text in page.of("th") if attrs.get("scope") == "row"]
    assert CLASSES[1] in headings and CLASSES[2] in headings


def test_mistakes_are_shown_the_surest_first(page):
    images = [attrs for attrs, _ in page.of("img")][:3]
    assert [one["alt"][-8:-4] for one in images] == ["'5 ä", "'1 ä", "'3 ä"]
    assert all(one["src"].startswith("data:image/jpeg;base64,") for one in images)
    picture = Image.open(io.BytesIO(base64.b64decode(images[0]["src"].partition(",")[2])))
    assert picture.size == (64, 128) and abs(np.asarray(picture)[0, 0, 0].astype(int) - 200) < 3
    links = [attrs["href"] for attrs, _ in page.of("a") if attrs["href"] != "evaluated.csv"]
    assert links[:2] == ["../%271%20%C3%A4.png", "../%273%20%C3%A4.png"]  # that of 5 is gone
    cat, script, both = CLASSES
    assert texts_of(page, "b")[:6] == [script, both, cat, script, both, cat]  # true, predicted


def test_the_data_and_what_is_nearly_the_same_as_in_training(page):
    *pairs, first, second = [attrs for attrs, _ in page.of("img")][3:]
    assert [one["alt"][-8:-4] for one in pairs] == [f"'{i} ä" for i in (5, 5, 2, 1, 0, 0)]
    cat, script, _ = CLASSES
    assert texts_of(page, "b")[6:8] == [script, cat]  # those of two classes come first
    assert any(text.startswith("3 of 6 test pictures are") for text in texts_of(page, "p"))
    assert first == second and first["src"].startswith("data:image/png;base64,")
    assert f"6 training samples, from 1 of {script} to 3 of {cat}" in texts_of(page, "li")


def test_the_most_doubtful_labels_are_shown(tmp_path):
    folder = write_run(tmp_path / "run")
    doubts = [Doubt(sample, 0, 1, 0.75, 0.1) for sample in (1, 2)] * 10
    write_run_page(folder, "t", CLASSES, recorded(), seen(pictures(tmp_path)), doubts)
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    captions = texts_of(page, "figcaption")
    assert sum(text.startswith("labelled") for text in captions) == DOUBTS
    assert texts_of(page, "b")[-2:] == CLASSES[:2] and page.of("script") == []
    assert "labels_to_check.csv" in [attrs["href"] for attrs, _ in page.of("a")]
    commands = texts_of(page, "code")
    assert any(one.endswith(f"-again --labels {folder}/corrected.csv") for one in commands)
    assert any(text.startswith("20 labels of this split may be") for text in texts_of(page, "p"))


def test_the_matrix_and_the_classes(page):
    cells = [(attrs, text) for attrs, text in page.of("td") if "rgb" in attrs.get("style", "")]
    assert [text for _, text in cells] == ["1", "1", "", "", "1", "1", "1", "", "1"]
    assert len(page.of("svg")) >= 4 and all(
        "aria-label" in a or not a for a, _ in page.of("figure")
    )


def test_texts_and_many_classes(tmp_path):
    """Without plots, as without matplotlib, and of an evaluation with nothing wrong."""
    classes = [f"c{i}" for i in range(150)]
    targets = torch.arange(150)
    logits = torch.eye(150) * 9
    logits[7] = logits[8]
    names = SampleNames(
        ["file", "line"], lambda: (["t.csv", str(i)] for i in range(150)),
        lambda: (f"<u>{i}</u> " * 300 for i in range(150)),
    )  # fmt: skip
    folder = write_run(tmp_path / "run", baseline=None, baseline_wins=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("utils.reporting.run_page.is_installed", lambda name: False)
        of_data = seen(names, targets, [(3, 3)], ["[CLS] <u>9</u>"])
        write_run_page(folder, "t", classes, recorded(logits, targets), of_data)
        page = Page((folder / "report.html").read_text())
        of_data = seen(names, targets)
        write_run_page(folder, "t", classes, recorded(9 * torch.eye(150), targets), of_data)
    text, *pair, of_batch = texts_of(page, "blockquote")
    assert pair[0] == pair[1] and pair[0].startswith("<u>3</u>") and of_batch == "[CLS] <u>9</u>"
    assert text.startswith("<u>7</u>") and text.endswith("…") and len(text) < 700
    assert page.of("svg") == page.of("u") == page.of("img") == []
    assert "c8" in texts_of(page, "td") and any(
        text.endswith("t.csv, line 7") for text in texts_of(page, "figcaption")
    )
    text = (folder / "report.html").read_text()
    assert "surest" not in text and "Nearly the same" not in text


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_what_is_found_does_not_depend_on_the_chunks(chunk, monkeypatch):
    monkeypatch.setattr("utils.measures.outcomes.CHUNK", chunk)
    found = find(recorded(), 2)
    assert found.matrix.tolist() == [[1, 1, 0], [0, 1, 1], [1, 0, 1]]
    assert [(m.sample, m.true, m.predicted) for m in found.mistakes] == [(5, 1, 2), (1, 0, 1)]
    p = LOGITS.softmax(1).numpy()
    assert found.mistakes[0].probability == pytest.approx(p[5, 2], rel=1e-5)
    assert found.bins.sum(1).tolist() == pytest.approx([6, 3, p.max(1).sum()], rel=1e-5)


def test_answers_that_are_no_numbers_come_first():
    logits = LOGITS.clone()
    logits[3] = float("nan")
    found = find(recorded(logits), 3)
    assert found.mistakes[0].sample == 3
