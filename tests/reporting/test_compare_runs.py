"""Comparisons of runs: figures, pairs of seeds, settings, and a page that is safe and whole."""

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from html_pages import Page
from quick_runs import handlers_put_back, quick
from scipy.stats import ttest_rel

import transformer_test
from utils.measures.compute import wilson_interval
from utils.reporting import compare
from utils.reporting.page import COLOURS
from utils.reporting.recorded import read_runs

ROOT = Path(__file__).parents[2]


def write_run(
    folder: Path,
    accuracy: float = 90.0,
    *,
    status: str | None = "finished",
    measured: str = "test",
    further: dict | None = None,
    **settings,
) -> Path:
    """A run's folder, without what a comparison does not read. `settings` were given by the command
    line; `further` are entries of the summary; a status of None leaves the summary out."""
    folder.mkdir(parents=True)
    values = {"dataset": "shapes", "data_dir": "data", "val_fraction": 0.1, "lr": 0.1, "seed": 0}
    lines = ["# resnet50_test.py"]
    for name, value in (values | settings).items():
        origin = "command line" if name in settings else "default"
        lines.append(f"{name}: {'null' if value is None else str(value).lower()}  # {origin}")
    lines.append("# output: runs/x  # command line")
    (folder / "config.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    records = []
    for epoch in (1, 2):
        at = {"step": 10 * epoch, "epoch": float(epoch)}
        steps = {"split": "train", "average_over": "steps", "loss": 1.0 / epoch}
        records.append(at | steps | {"samples_per_second": 100.0 * epoch})
        val = {"split": "val", "loss": 2.0 / epoch, "accuracy": accuracy - 2 + epoch}
        records.append(at | val | {"samples": 200})
    text = "".join(f"{json.dumps(record)}\n" for record in records)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    if status is not None:
        summary = {"status": status, "train_samples": 600, "seconds_training": 9.0}
        if measured == "test":
            summary |= {"test_accuracy": accuracy, "test_loss": 0.5, "test_samples": 1000}
        summary |= further or {}
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """run(words) -> (exit code, lines of stdout, stderr), within an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def start(*words) -> tuple[int, list[str], str]:
        code = compare.main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return start


@pytest.fixture
def without_curves(monkeypatch):
    monkeypatch.setattr("utils.machine.packages.is_installed", lambda name: name != "matplotlib")


def row(lines: list[str], *begin: str) -> list[str]:
    """The cells of the only row that begins with these."""
    rows = [re.split(r" {2,}", line) for line in lines]
    (found,) = [cells for cells in rows if tuple(cells[: len(begin)]) == begin]
    return found


def two_groups(folder: Path) -> dict[str, list[float]]:
    accuracies = {"plain": [80.0, 82.5, 79.0], "better": [84.0, 85.0, 84.5]}
    for name, values in accuracies.items():
        for seed, accuracy in enumerate(values):
            lr = {"lr": 0.2} if name == "better" else {}
            write_run(folder / f"{name}-seed{seed}", accuracy, seed=seed, **lr)
    return accuracies


# ---- figures ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_curves")
def test_groups_are_compared_seed_by_seed(tmp_path, run):
    values = two_groups(tmp_path / "runs")
    code, lines, err = run(tmp_path / "runs")
    assert (code, err) == (0, "")
    expected = ttest_rel(values["better"], values["plain"]).confidence_interval()
    text = f"+4.00 points ({expected.low:+.2f} to {expected.high:+.2f})"
    assert row(lines, "better", "plain") == ["better", "plain", "accuracy", text, "3", "better"]
    assert row(lines, "better", "3")[2:] == ["84.50 %", "0.2 (command line)"]
    assert row(lines, "plain", "3")[2:] == ["80.50 %", "0.1 (default)"]
    # The best first; those with other seeds side by side.
    names = [line.split()[0] for line in lines if "test, 1,000" in line]
    assert names == [f"{name}-seed{seed}" for name in ("better", "plain") for seed in range(3)]


@pytest.mark.usefixtures("without_curves")
def test_a_difference_may_be_chance_and_needs_two_seeds(tmp_path, run):
    for seed, accuracies in enumerate([(80.0, 83.0), (82.0, 81.0)]):
        for name, accuracy in zip("ab", accuracies, strict=True):
            write_run(
                tmp_path / f"{name}{seed}", accuracy, seed=seed, lr=len(name + "b" * (name == "b"))
            )
    _, lines, _ = run(*sorted(tmp_path.glob("[ab]?")))
    assert row(lines, "b", "a")[-2:] == ["2", "may be chance"]
    _, lines, _ = run(tmp_path / "a0", tmp_path / "b0")
    assert not any("paired" in line for line in lines)


@pytest.mark.usefixtures("without_curves")
def test_of_errors_less_is_better(tmp_path, run):
    for seed in range(3):
        for name, error in (("a", 0.1), ("b", 0.2 + seed / 100)):
            further = {"test_calibration_error": error}
            write_run(tmp_path / f"{name}{seed}", seed=seed, further=further, decay=ord(name))
    _, lines, _ = run(*tmp_path.glob("[ab]?"))
    cells = row(lines, "a", "b", "calibration error")
    assert cells[3].startswith("-0.110 (") and cells[-1] == "better"


@pytest.mark.usefixtures("without_curves")
def test_intervals_are_the_runs_own_or_wilsons(tmp_path, run):
    further = {"test_f1_macro": 0.61, "model_test_intervals": {"f1_macro": [0.5, 0.7]}}
    write_run(tmp_path / "run", 90.0, further=further)
    _, lines, _ = run(tmp_path / "run")
    low, high = wilson_interval(900, 1000)
    cells = row(lines, "run", "0")
    assert cells[2:4] == [f"90.00 % ({low:.1f} to {high:.1f})", "0.610 (0.500 to 0.700)"]
    assert cells[4:] == ["test, 1,000", "2", "0:09", "finished"]


@pytest.mark.usefixtures("without_curves")
def test_the_figures_are_those_of_the_runs_model(tmp_path, run):
    further = {"model_weights": "best", "best_test_accuracy": 95.0, "best_test_loss": 0.1}
    write_run(tmp_path / "run", 90.0, further=further)
    _, lines, _ = run(tmp_path / "run")
    assert row(lines, "run", "0")[2].startswith("95.00 % ")


@pytest.mark.usefixtures("without_curves")
def test_unfinished_runs_are_shown_with_what_there_is(tmp_path, run):
    write_run(tmp_path / "killed", status=None)
    write_run(tmp_path / "stopped", status="interrupted", measured="nothing", lr=0.5)
    write_run(tmp_path / "new", status=None, lr=0.7)
    (tmp_path / "new" / "metrics.jsonl").unlink()
    with open(tmp_path / "killed" / "metrics.jsonl", "a") as file:
        file.write('{"step": 21, "epo')
    code, lines, _ = run(*(tmp_path / name for name in ("killed", "stopped", "new")))
    assert code == 0
    state = "no summary: running or killed"
    low, high = wilson_interval(180, 200)
    accuracy = f"90.00 % ({low:.1f} to {high:.1f})"
    rows = {words[0]: words[1:] for words in (re.split(r" {2,}", line) for line in lines[2:5])}
    assert rows == {
        "killed": ["0", accuracy, "val, 200", "2", "–", state],
        "stopped": ["0", accuracy, "val, 200", "2", "0:09", "interrupted"],
        "new": ["0", "–", "–", "–", "–", state],
    }


@pytest.mark.usefixtures("without_curves")
def test_results_on_other_data_or_splits_are_not_comparable(tmp_path, run):
    for seed in range(2):
        write_run(tmp_path / f"a{seed}", seed=seed)
        write_run(tmp_path / f"b{seed}", seed=seed, data_dir="/mnt/data", lr=0.3)
        write_run(tmp_path / f"c{seed}", seed=seed, data_dir="pictures", lr=0.4)
        write_run(tmp_path / f"d{seed}", seed=seed, measured="val", lr=0.5, test_file=None)
    _, lines, _ = run(*tmp_path.glob("[ab]?"))
    assert not any("comparable" in line for line in lines)
    assert row(lines, "a", "b")[4] == "2"
    code, lines, _ = run(*tmp_path.glob("[abcd]?"))
    assert code == 0
    note = "note: not all results are comparable, as these differ: "
    assert [line for line in lines if "comparable" in line] == [f"{note}data_dir, split, samples"]
    pairs = {tuple(sorted(line.split()[:2])) for line in lines if " points (" in line}
    assert pairs == {("a", "b")}
    assert note.split(", ")[1].strip() in Path("compare.html").read_text().replace("\n", " ")


@pytest.mark.usefixtures("without_curves")
def test_settings_without_consequence_are_no_difference(tmp_path, run):
    write_run(tmp_path / "a", log_every=5, cache_dir="x", seed=1)
    write_run(tmp_path / "b", log_every=50, cache_dir="y", seed=2)
    write_run(tmp_path / "c", seed=1, lr=None, own=7)  # of an entry that has a setting more
    _, lines, _ = run(*(tmp_path / name for name in "abc"))
    head = lines[next(i for i, line in enumerate(lines) if line.startswith("Settings")) + 1]
    assert re.split(r" {2,}", head) == ["runs", "seeds", "mean accuracy", "lr"]
    assert row(lines, "a and 1 other run", "2")[3] == "0.1 (default)"
    assert row(lines, "c", "1", "90.00 %")[3] == "not set (command line)"


@pytest.mark.usefixtures("without_curves")
def test_many_settings_of_few_runs_stand_below_each_other(tmp_path, run):
    write_run(tmp_path / "a", alpha=1, beta=2, gamma=True)
    write_run(tmp_path / "b", alpha=3, beta=4, gamma=False)
    _, lines, _ = run(tmp_path / "a", tmp_path / "b")
    assert row(lines, "runs") == ["runs", "a", "b"]
    assert row(lines, "beta") == ["beta", "2 (command line)", "4 (command line)"]
    assert row(lines, "gamma") == ["gamma", "on (command line)", "off (command line)"]


def test_minutes_are_those_of_the_log_lines(tmp_path):
    (run,) = read_runs([write_run(tmp_path / "run")])
    # 600 samples at 100 a second, then as many at 200.
    assert run.minutes([0.5, 1.0, 2.0]) == pytest.approx([0.05, 0.1, 0.15])
    (run,) = read_runs([write_run(tmp_path / "killed", status=None)])
    assert run.minutes([1.0]) == []


# ---- folders ----------------------------------------------------------------------------------


def test_folders_of_runs_and_searches_are_taken(tmp_path):
    study, runs = tmp_path / "study", tmp_path / "runs"
    for stage in ("trials/0000/rung0", "trials/0000/rung1", "trials/0001/rung0"):
        write_run(study / stage)
    write_run(study / "confirm" / "0000-seed1" / "run", seed=1)
    (study / "trials" / "0002").mkdir()
    (study / "trials" / "0002" / "failure.txt").write_text("out of memory")
    write_run(runs / "b")
    (runs / "b" / "wandb" / "files").mkdir(parents=True)
    (runs / "b" / "wandb" / "files" / "config.yaml").write_text("wandb_version: 1\n")
    found = read_runs([study, runs, runs / "b", study / "trials" / "0000" / "rung0"])
    assert [run.name for run in found] == [
        "study/confirm/0000-seed1/run", "study/trials/0000/rung1", "study/trials/0001/rung0",
        "runs/b", "study/trials/0000/rung0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, "there is no config.yaml in it; name runs, or folders of runs"),
        ("a: [", "these are not the settings of a run"),
        ("a: 1\n", "these are not the settings of a run"),
        ("- 1\n", "these are not the settings of a run"),
    ],
)
def test_a_folder_that_is_no_run_is_told_in_one_line(tmp_path, run, content, error):
    (tmp_path / "folder").mkdir()
    if content is not None:
        (tmp_path / "folder" / "config.yaml").write_text(content)
    code, lines, err = run(write_run(tmp_path / "run"), tmp_path / "folder")
    assert (code, lines, err.count("\n")) == (2, [], 1)
    assert err.startswith(f"error: {tmp_path / 'folder'}") and error in err
    assert not Path("compare.html").exists()


def test_a_missing_folder_is_told(tmp_path, run):
    code, _, err = run(tmp_path / "nothing")
    assert code == 2 and "nothing: no such folder; name runs" in err


# ---- the page ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    """Of two groups of runs, one with a name that is HTML."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(2):
        write_run(folder / f"<script>alert({seed})", 80.0 + seed, seed=seed)
        write_run(folder / f"b & c{seed}", 85.0, seed=seed, lr="<i>")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert compare.main([str(folder)]) == 0
        return (folder / "compare.html").read_text(encoding="utf-8")


def test_names_are_escaped(page):
    parsed = Page(page)
    assert parsed.of("script") == parsed.of("i") == []
    headings = [text for _, text in parsed.of("div")]
    assert {"<script>alert(0)", "b & c1"} <= {*headings}
    assert "<i> (command line)" in [text for _, text in parsed.of("td")]


def test_the_page_is_one_file_without_scripts_or_network(page):
    attributes = [attrs for _, attrs, _ in Page(page).elements]
    links = [v for a in attributes for k, v in a.items() if k in ("src", "href", "xlink:href")]
    assert links and all(link.startswith("#") for link in links)
    assert not [k for a in attributes for k in a if k.startswith("on")]
    assert not re.findall(r"@import|url\((?!#)", page)
    assert len(page) < 500_000


def test_the_page_has_what_a_screen_reader_needs(page):
    parsed = Page(page)
    assert parsed.of("html")[0][0]["lang"] == "en"
    assert len(parsed.of("main")) == len(parsed.of("h1")) == 1
    assert [text for _, text in parsed.of("title")] == ["Comparison of 4 runs"]
    assert len(parsed.of("caption")) == len(parsed.of("table")) == len(compare.CAPTIONS)
    assert all(attrs["scope"] in ("row", "col") for attrs, _ in parsed.of("th"))
    labels = [attrs["aria-label"] for attrs, _ in parsed.of("figure")]
    assert len(labels) == 6 and "Validation accuracy, % by minutes of training" in labels
    identifiers = [attrs["id"] for _, attrs, _ in parsed.elements if "id" in attrs]
    assert len(identifiers) == len(set(identifiers))


def test_every_plot_has_a_line_for_each_run(page):
    plots = re.findall(r"<figure.*?>(<svg.*?</svg>)\s*</figure>", page, re.S)
    assert len(plots) == 6
    for plot in plots:
        tree = ElementTree.fromstring(plot)
        lines = [e.get("style", "") for e in tree.iter("{http://www.w3.org/2000/svg}path")]
        for colour in COLOURS[:2]:
            assert (
                sum(f"stroke: {colour}" in style and "fill: none" in style for style in lines) == 2
            )
        assert "width" not in tree.attrib and "viewBox" in tree.attrib


def luminance(colour: str) -> float:
    """Relative luminance, https://www.w3.org/TR/WCAG21/#dfn-relative-luminance"""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    parts = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def test_lines_and_texts_stand_out_by_day_and_by_night():
    """3:1 for lines, 4.5:1 for texts, as WCAG 2.1 AA asks."""
    style = (ROOT / "utils/reporting/templates/base.html").read_text()
    found = re.findall(r"--paper: (#\w+); --ink: (#\w+); --faint: (#\w+)", style)
    assert len(found) == 2
    for paper, *inks in found:
        for colour, least in [*((c, 3) for c in COLOURS), *((ink, 4.5) for ink in inks)]:
            dark, light = sorted((luminance(paper), luminance(colour)))
            assert (light + 0.05) / (dark + 0.05) >= least, (paper, colour)


@pytest.mark.usefixtures("without_curves")
def test_only_a_page_of_this_command_is_overwritten(tmp_path, run):
    folder = write_run(tmp_path / "run")
    assert run(folder)[0] == run(folder)[0] == 0
    first = Path("compare.html").read_text()
    Path("mine.html").write_text("<p>mine")
    Path("report.html").write_text(first.replace("toolkit compare.html", "toolkit report.html"))
    for name in ("mine.html", "report.html"):
        before = Path(name).read_text()
        code, _, err = run(folder, "--output", name)
        assert code == 2 and err.startswith(f"error: {name} is no such page: ")
        assert Path(name).read_text() == before
    assert run(folder, "--output", ".")[0] == 2
    code, lines, _ = run(folder, "--output", "new/page.html")
    assert code == 0 and lines[-1].endswith("new/page.html")
    assert "left out, as matplotlib is not installed" in lines[-2]
    assert Page(Path("new/page.html").read_text()).of("figure") == []


def test_more_groups_than_colours_and_no_curves_at_all(tmp_path, run):
    for number in range(len(COLOURS) + 1):
        write_run(tmp_path / f"run{number}", 80 + number, lr=number)
    assert run(*tmp_path.glob("run?"))[0] == 0
    parsed = Page(Path("compare.html").read_text())
    assert len(parsed.of("li")) == 2 * (len(COLOURS) + 1)
    (tmp_path / "run0" / "metrics.jsonl").unlink()
    assert run(tmp_path / "run0")[0] == 0
    assert Page(Path("compare.html").read_text()).of("figure") == []


def test_the_command_starts_without_pytorch():
    code = "import sys, utils.reporting.compare; print({'torch', 'matplotlib'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.slow
def test_of_runs(tmp_path, monkeypatch, capsys):
    """What the console says at their end is in the table, and the clock agrees."""
    monkeypatch.chdir(tmp_path)
    quick(monkeypatch)
    small = "--dataset headlines --layers 1 --dim 16 --heads 2 --ffn 16 --epochs 2 --threads 1"
    with handlers_put_back():
        for lr in (0.001, 0.01):
            for seed in range(2):
                flags = f"{small} --lr {lr} --seed {seed} --output runs/{lr}-{seed}"
                assert transformer_test.main([*flags.split(), "--val_fraction", "0.2"]) == 0
    said = re.findall(r"test accuracy (\S+ % \(.*?\)) on", capsys.readouterr().out)
    assert len(said) == 4
    assert compare.main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [f"{lr}-{seed}" for lr in (0.001, 0.01) for seed in range(2)]
    assert [row(lines, name)[2] for name in names] == said
    assert any(" points (" in line for line in lines)
    for run in read_runs([Path("runs")]):
        minutes = run.summary["seconds_training"] / 60
        assert run.minutes([2.0]) == pytest.approx([minutes], rel=0.1, abs=0.001)
    assert len(Page(Path("compare.html").read_text()).of("figure")) == 6
