"""The baselines beside the result of a run."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from quick_runs import handlers_put_back, quick

import transformer_test
from utils.data.splits import stratified_order
from utils.errors import UserError
from utils.machine import packages
from utils.runs import baseline
from utils.runs.baseline import Baselines

ROOT = Path(__file__).parents[2]
TEXTS = (
    "--dataset csv --train_file train.csv --test_file test.csv --text_columns title,body "
    "--label_column topic --layers 1 --dim 16 --heads 2 --ffn 16 --max_len 24 --device cpu "
    "--threads 1 --bs 16 --tokenizer wordpiece --vocab_size 400 --cache_dir cache --max_steps 1"
)
PICTURES = "--dataset shapes --depth 18 --width 4 --device cpu --threads 1 --bs 20 --max_steps 1"


def summary(run: str) -> dict:
    return json.loads(Path(run, "summary.json").read_text())


@pytest.fixture
def has_time(monkeypatch):
    monkeypatch.setattr(baseline, "FRACTION", 1e6)


@pytest.fixture
def run_text(monkeypatch, tmp_path):
    quick(monkeypatch)
    monkeypatch.chdir(tmp_path)

    def run(text: str) -> int:
        with handlers_put_back():
            return transformer_test.main(text.split())

    return run


def write_tickets(path: str, counts: dict[str, int], seed: int) -> None:
    """Texts with words that cleaning would remove, of classes that share most of their words."""
    rng = np.random.default_rng(seed)
    common = ["printer", "the", "is", "not", "again", "please", "&lt;b&gt;", "http://a.b/c", "it"]
    rows = []
    for topic, count in counts.items():
        words = [*common, *(f"{topic}{number}" for number in range(4))]
        weights = np.array([1.0] * len(common) + [0.15] * 4)
        for _ in range(count):
            drawn = rng.choice(words, 12, p=weights / weights.sum())
            rows.append([topic, " ".join(drawn[:3]), " ".join(drawn[3:])])
    rng.shuffle(rows)
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["topic", "title", "body"], *rows])


@pytest.mark.slow  # scikit-learn is imported
def test_unequal_tickets_have_the_figures_of_the_script_in_the_docs(run_text, has_time, capsys):
    write_tickets("train.csv", {"bug": 140, "wish": 60, "thanks": 20}, 0)
    write_tickets("test.csv", {"bug": 70, "wish": 30, "thanks": 10}, 1)
    assert run_text(f"{TEXTS} --output run") == 0
    *lines, last = capsys.readouterr().out.splitlines()
    (before,) = [line for line in lines if line.startswith("baseline: ")]
    page = (ROOT / "docs/measures.md").read_text(encoding="utf-8")
    script = next(block for block in page.split("```python\n") if "TfidfVectorizer" in block)
    exec(script.split("```")[0], {"__name__": "__main__"})
    found, said = summary("run"), capsys.readouterr().out.strip()
    of_texts = found["baseline"]
    assert said == f"accuracy {of_texts['accuracy']:.2f} %, macro F1 {of_texts['f1_macro']:.3f}"
    assert 0.4 < of_texts["f1_macro"] < 0.95 and of_texts["train_samples"] == 220
    assert {*of_texts["intervals"]} == {"accuracy", "f1_macro"}
    assert found["majority"]["accuracy"] == pytest.approx(100 * 70 / 110)
    assert before.startswith("baseline: TF-IDF with logistic regression, accuracy ")
    assert before.endswith("; the largest class always, accuracy 63.64 %, macro F1 0.259")
    better = (
        f"; a baseline is better: TF-IDF with logistic regression, {said.split(', ')[1]}, after"
    )
    assert better in last and found["baseline_wins"] is True
    # Of the validation split, with fewer texts to train on; by the accuracy, if that is asked for.
    flags = "--val_fraction 0.2 --no_final_test --best_by accuracy --epochs 1 --max_steps 12"
    assert run_text(f"{TEXTS} {flags} --output val") == 0
    assert summary("val")["baseline"]["samples"] == 44
    assert summary("val")["baseline"]["train_samples"] == 176
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("validation accuracy ") and "better: TF" in last and "F1" in last[:60]


@pytest.mark.slow
def test_pictures_and_the_cache(run_resnet, has_time, capsys, monkeypatch):
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    from utils.data.images.shapes import load_shapes

    assert run_resnet(f"{PICTURES} --cache_dir cache --output run") == 0
    data = load_shapes("shapes", SimpleNamespace(image_size=None, test_fraction=None))

    def small(images):  # each pixel is the mean of 4x4
        sides = (8, 8), Image.Resampling.BOX
        return np.stack([np.ravel(Image.fromarray(pixels).resize(*sides)) for pixels in images])

    model = make_pipeline(StandardScaler(), LogisticRegression())
    model.fit(small(data.train.images), data.train.labels)
    right = model.predict(small(data.test.images)) == data.test.labels
    found = summary("run")
    assert found["baseline"]["accuracy"] == pytest.approx(100 * right.mean())
    assert found["baseline_wins"] and "logistic regression on 8x8" in capsys.readouterr().out
    monkeypatch.setattr(Baselines, "_fit", None)
    assert run_resnet(f"{PICTURES} --cache_dir cache --output again --seed 1") == 0
    assert summary("again")["baseline"] == found["baseline"]
    assert run_resnet(f"{PICTURES} --cache_dir cache --output part --no_baseline") == 0
    assert "baseline" not in capsys.readouterr().out.split("accuracy")[-1]
    assert not {"baseline", "majority", "baseline_wins"} & {*summary("part")}


def test_a_short_run_has_no_time_for_logistic_regression(run_resnet, capsys, monkeypatch):
    assert run_resnet(f"{PICTURES} --output run") == 0
    left_out = "logistic regression on 8x8 pixels is left out: it would take more than 2 % of"
    assert f"accuracy 10.00 % ({left_out} the run's time)" in capsys.readouterr().out
    assert summary("run")["baseline"] is None and summary("run")["majority"]["accuracy"] == 10
    monkeypatch.setattr(packages, "is_installed", lambda name: name != "scikit-learn")
    assert run_resnet(f"{PICTURES} --output without") == 0
    out = capsys.readouterr().out
    assert "note: baselines by logistic regression are left out, as scikit-learn is not" in out
    assert "baseline: the largest class always, accuracy 10.00 %\n" in out


class Fake(Baselines):
    """Its time passes on a clock of its own: 10 ms a sample to fit, 1 ms to predict, and 3 s to
    read."""

    def __init__(self, monkeypatch, budget: float):
        self.now, self.fits = 0.0, []
        monkeypatch.setattr(baseline.time, "monotonic", lambda: self.now)
        splits = {
            "train": SimpleNamespace(labels=np.arange(30_000) % 2),
            "test": SimpleNamespace(labels=np.arange(2_000) % 2),
        }
        features = "collections:Counter"
        model = SimpleNamespace(splits=splits, files=[], features=features, inputs=self.read)
        super().__init__(model, SimpleNamespace(classes=2), "test", budget)

    def read(self, split, index):
        self.now += 3

    def _fit(self, index):
        self.now += 0.01 * len(index)
        self.fits.append(index)
        return self.predict

    def predict(self, index):
        self.now += 0.001 * len(index)


@pytest.mark.parametrize(("budget", "samples"), [(10.6, 500), (40, 1966), (400, 20_000)])
def test_as_many_samples_as_the_time_allows(monkeypatch, budget, samples):
    fake = Fake(monkeypatch, budget)
    assert fake._fit_in_time() == (samples, fake.predict)
    order = stratified_order(np.arange(30_000) % 2, seed=0)
    assert fake.fits[-1].tolist() == order[:samples].tolist()
    fake.predict(np.arange(2000))
    assert fake.now <= budget


@pytest.mark.parametrize(("budget", "fits"), [(1.9, 0), (9, 1)])
def test_what_takes_too_long_is_left_out(monkeypatch, budget, fits):
    fake = Fake(monkeypatch, budget)  # nothing is begun; the test set alone would take too long
    with pytest.raises(UserError, match="it would take more than 2 % of the run's time"):
        fake._fit_in_time()
    assert len(fake.fits) == fits and (fake.now == 0) == (fits == 0)


def test_what_cannot_be_fitted_costs_the_baseline_alone(run_resnet, capsys, monkeypatch):
    def fail(*_):
        raise UserError("the file is gone")

    monkeypatch.setattr(Baselines, "_fitted", fail)
    assert run_resnet(f"{PICTURES} --output run") == 0
    assert "(logistic regression on 8x8 pixels is left out: the file is gone)" in (
        capsys.readouterr().out
    )
