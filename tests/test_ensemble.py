"""Several runs as one classifier: the mean of their answers, against NumPy, and the command."""

import csv
import re

import numpy as np
import pytest

import fewhours
from fewhours.__main__ import main
from fewhours.ensemble import mean_answers
from fewhours.run import read_answers
from utils.errors import UserError

CLASSES = ("a", "=1", "c")
NAMES = ("a", "'=1", "c")  # as cells of a table


def write(path, p, true, columns=("file",), split="test"):
    """Writes evaluated.csv of the probabilities (n, 3); returns the path."""
    with open(path, "w", encoding="utf-8-sig", newline="") as file:
        table = csv.writer(file)
        own = ["predicted", "probability", *(f"p_{name}" for name in CLASSES), "loss"]
        table.writerow([*columns, "split", "true", *own])
        for number, (row, target) in enumerate(zip(p, true, strict=True)):
            cells = [f"{number}.jpg" if name == "file" else path.stem for name in columns]
            best = int(row.argmax())
            answer = [NAMES[best], row[best], *row, -np.log(row[target])]
            table.writerow([*cells, split, NAMES[target], *answer])
    return path


@pytest.fixture
def answers(tmp_path):
    """Three models' probabilities (3, n, 3), the classes (n,), and their tables."""
    random = np.random.default_rng(0)
    p, true = random.dirichlet(np.ones(3), (3, 200)), random.integers(0, 3, 200)
    return p, true, [write(tmp_path / f"{n}.csv", p[n], true, ("file", "text")) for n in range(3)]


def test_the_mean_of_probabilities(answers):
    """The text, which is put together from a model's own tokens, may differ."""
    p, true, tables = answers
    mean = p.mean(0)
    rows = [*mean_answers([read_answers(table) for table in tables])]
    assert [row["predicted"] for row in rows] == [NAMES[best] for best in mean.argmax(1)]
    found = [[row[f"p_{name}"] for name in CLASSES] for row in rows]
    np.testing.assert_allclose(found, mean, rtol=1e-12)
    losses = -np.log(mean[range(200), true])
    np.testing.assert_allclose([row["loss"] for row in rows], losses, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose([row["probability"] for row in rows], mean.max(1), rtol=1e-12)


@pytest.fixture
def runs(tmp_path, answers):
    """Folders of runs with these answers."""
    folders = [tmp_path / f"run{number}" for number in range(3)]
    for folder, table in zip(folders, answers[2], strict=True):
        folder.mkdir()
        (folder / "config.yaml").write_text("# resnet50_test.py\nseed: 0\n")
        table.rename(folder / "evaluated.csv")
    return folders


def test_the_figures_of_an_ensemble(answers, runs):
    p, true, _ = answers
    mean = p.mean(0)
    right, losses = mean.argmax(1) == true, -np.log(mean[range(200), true])
    ensemble = fewhours.Ensemble([runs[0], *map(fewhours.load, runs[1:])])
    assert ensemble.accuracy == pytest.approx(100 * right.mean())
    assert ensemble.metrics["loss"] == pytest.approx(losses.mean())
    assert (ensemble.metrics["samples"], ensemble.metrics["split"]) == (200, "test")
    sure = [row["probability"] for row in ensemble.mistakes(5)]
    assert sure == pytest.approx(sorted(mean.max(1)[~right])[:-6:-1])


def test_the_command(answers, runs, capsys):
    p, true, _ = answers
    assert main(["ensemble", *map(str, runs)]) == 0
    *alone, together = capsys.readouterr().out.splitlines()
    assert alone == [
        f"{run}: accuracy {100 * (own.argmax(1) == true).mean():.2f} %"
        for run, own in zip(runs, p, strict=True)
    ]
    accuracy = 100 * (p.mean(0).argmax(1) == true).mean()
    assert together.startswith(f"together: test accuracy {accuracy:.2f} % (")
    assert together.endswith(" on 200 samples")
    rows = (runs[2] / "evaluated.csv").read_text("utf-8").splitlines()
    (runs[2] / "evaluated.csv").write_text("\n".join(rows[:-1]), "utf-8")
    assert main(["ensemble", *map(str, runs)]) == 2
    assert "error: the answers in row 200 are to different samples" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["ensemble", str(runs[0]), "--predictions", "x.csv"])
    assert "the table of --predict, which is missing" in capsys.readouterr().err


def test_one_model_and_the_same_one_twice(answers):
    _, _, (table, *_) = answers
    alone = [*read_answers(table)]
    for several in ([alone], [alone, alone]):
        for row, own in zip(mean_answers(several), alone, strict=True):
            assert row == pytest.approx(own)


def test_a_loss_beyond_what_exp_can_take():
    row = {"true": "b", "predicted": "a", "probability": 1.0, "p_a": 1.0, "p_b": 0.0}
    (mean,) = mean_answers([[row | {"loss": 900.0}], [row | {"loss": 1000.0}]])
    assert mean["loss"] == pytest.approx(900 + np.log(2))


def test_samples_without_an_answer():
    left_out = {"file": "x", "predicted": "", "probability": "", "p_a": ""}
    assert [*mean_answers([[left_out], [left_out]])] == [left_out]


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"file": "other"}, "row 1 are to different samples"),
        ({"true": "b"}, "row 1 are to different samples"),
        ({"p_z": 0.5}, "row 1 are to different samples"),
        (None, "row 1 are to different samples"),
    ],
)
def test_what_has_no_mean(other, told):
    row = {"file": "x", "true": "a", "predicted": "a", "probability": 0.75, "p_a": 0.75}
    with pytest.raises(UserError, match=re.escape(told)):
        [*mean_answers([[row], [] if other is None else [row | other]])]


def test_many_classes():
    row = {"file": "x", "predicted": "a", "probability": 0.5, "predicted_2": "b"}
    with pytest.raises(UserError, match="above 100 classes"):
        [*mean_answers([[row], [row]])]
