"""curves.png can be drawn from any metrics.jsonl."""

import pytest
from PIL import Image

from utils.reporting import plots
from utils.reporting.plots import draw_curves


def step(epoch, **figures):
    return {"split": "train", "average_over": "steps", "epoch": epoch, "lr": 0.1} | figures


def end(split, epoch, **figures):
    return {"split": split, "epoch": epoch} | figures


WHOLE_RUN = [
    step(0.5, loss=2.0, accuracy=20.0),
    end("train", 1.0, loss=1.8, accuracy=30.0, average_over="epoch"),
    end("val", 1.0, loss=1.7, accuracy=33.0),
    end("test", 1.0, loss=1.6, accuracy=35.0),
]
RECORDS = {
    "empty": [],
    "steps alone": [step(0.5, loss=2.0, accuracy=20.0)],
    "diverged": [step(0.5, loss=None, accuracy=10.0), end("test", 1.0, loss=None, accuracy=10.0)],
    "one step": [step(0.01, step=1, loss=2.3, accuracy=10.0)],
    "event": [*WHOLE_RUN, {"step": 9, "epoch": 0.5, "split": "event", "event": "unfrozen $"}],
    "zero rate": [step(0.1 * i, loss=0.0, accuracy=0.0, lr=0.0) for i in range(9)],
    "tiny rates": [step(i, loss=1.0, accuracy=0.0, lr=10.0**-i) for i in range(9)],
    "time shares": [
        end("train", float(i), loss=1.0, average_over="epoch", time_share={"data": 0.1, "f": None})
        for i in (1, 2)
    ],
    "one worker": [step(0.5, loss=2.0, accuracy=20.0, round_steps=4, worker_distance=0.0)],
    "keys missing": [{"split": "train", "epoch": 1.0}, {"split": "test", "epoch": 1.0}],
}


@pytest.mark.parametrize("records", RECORDS.values(), ids=RECORDS.keys())
@pytest.mark.filterwarnings("error")
def test_the_picture_has_a_sensible_size(tmp_path, records):
    path = tmp_path / "curves.png"
    draw_curves(records, path, "resnet18 on shapes, sgd")
    with Image.open(path) as picture:
        picture.load()
        assert picture.format == "PNG"
        assert 800 <= picture.width <= 4000 and 300 <= picture.height <= 2000
        assert picture.convert("L").getextrema() != (255, 255)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.filterwarnings("error")
def test_it_is_drawn_for_hundreds_of_epochs(tmp_path):
    records = [step(0.05 * i, loss=2.0, accuracy=50.0) for i in range(6000)]
    records += [end("val", float(i), loss=2.0, accuracy=i / 4) for i in range(1, 301)]
    draw_curves(records, tmp_path / "curves.png", "title")


# ---- content of the panels, read back from matplotlib -----------------------------------------


@pytest.fixture
def panels(tmp_path, monkeypatch):
    """Makes the figure of records; returns its axes by the first word of their titles."""
    figures = []

    def keep(figure, path):
        figures.append(figure)

    monkeypatch.setattr(plots, "save_figure", keep)

    def draw(records, best=None):
        draw_curves(records, tmp_path / "curves.png", "title", best=best)
        titled = [axis for axis in figures[-1].axes if axis.get_title()]  # not a second scale
        return {axis.get_title().split()[0]: axis for axis in titled}

    return draw


def legend(axis) -> list[str]:
    return [text.get_text() for text in axis.get_legend().get_texts()]


def validated(accuracies, losses=None):
    losses = losses or [1.0] * len(accuracies)
    return [
        end("val", float(i), loss=loss, accuracy=accuracy)
        for i, (accuracy, loss) in enumerate(zip(accuracies, losses, strict=True), 1)
    ]


def test_last_and_best_accuracy_are_named(panels):
    axes = panels(validated([50.0, 70.5, 70.5, 60.0], [2.0, 0.5, 0.7, 0.9]), best=2)
    assert legend(axes["accuracy"]) == ["val 60.00 %, best 70.50", "best epoch 2"]
    assert legend(axes["loss"]) == ["val 0.900, best 0.500", "best epoch 2"]


def test_of_the_test_set_no_best_figure_is_named(panels):
    axes = panels([end("test", float(i), loss=3.0 - i, accuracy=10.0 * i) for i in (1, 2)])
    assert legend(axes["accuracy"]) == ["test 20.00 %"] and legend(axes["loss"]) == ["test 1.000"]


def test_evaluations_of_other_weights_are_left_out(panels):
    axes = panels([*WHOLE_RUN, end("val", 1.0, loss=9.0, accuracy=99.0, model="average")])
    assert not any("99" in text for text in legend(axes["accuracy"]))


def test_a_diverged_run_shows_when(panels):
    axes = panels(validated([50.0, 60.0, 10.0], [2.0, 1.0, None]))
    assert legend(axes["loss"])[0] == "val not finite after epoch 2, best 1.000"


def test_a_huge_loss_at_the_start_does_not_flatten_the_rest(panels):
    records = [step(0.01, loss=5e4, accuracy=10.0)]
    records += [step(i / 10, loss=2.0 - i / 60, accuracy=10.0) for i in range(1, 100)]
    axes = panels(records)
    assert axes["loss"].get_ylim()[1] < 10
    assert "1 higher value, up to 5e+04" in [text.get_text() for text in axes["loss"].texts]
    calm = panels([step(i / 10, loss=2.3 - i / 60, accuracy=10.0) for i in range(1, 100)])
    assert calm["loss"].get_ylim()[1] > 2.3 and not calm["loss"].texts


def test_the_scale_of_the_learning_rate_is_readable(panels):
    small = [step(i, loss=1.0, lr=0.1 if i < 2 else 1e-4) for i in range(10)]
    assert panels(small)["learning"].get_yscale() == "log"
    even = [step(i, loss=1.0, lr=0.1 - i / 100) for i in range(10)]
    assert panels(even)["learning"].get_yscale() == "linear"


def test_an_event_is_a_line_in_every_panel(panels):
    event = {"step": 9, "epoch": 0.5, "split": "event", "event": "unfrozen"}
    axes = panels([*WHOLE_RUN, event])
    for axis in axes.values():
        assert "unfrozen" in [text.get_text().strip() for text in axis.texts]


def test_the_labels_round_a_part_of_an_epoch(panels):
    records = [end("val", i / 13, loss=1.0, accuracy=2.0 - i) for i in (1, 2)]
    assert "best epoch 0.08" in legend(panels(records, best=1 / 13)["accuracy"])


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(OSError):
        draw_curves([], tmp_path / "missing" / "curves.png", "title")


def test_it_replaces_an_earlier_picture(tmp_path):
    path = tmp_path / "curves.png"
    draw_curves([], path, "title")
    empty = path.read_bytes()
    draw_curves(WHOLE_RUN, path, "title")
    assert path.read_bytes() != empty


def test_measurements_of_auto_mixing_have_a_panel_even_if_none_is_finite(panels):
    measured = {"split": "mixing", "strength": 0.0, "step": 3}
    records = [*WHOLE_RUN, {**measured, "epoch": 0.5, "gap": None}]
    assert "--mixup" in panels(records)
    axes = panels([*records, {**measured, "epoch": 1.0, "gap": -0.3}])
    assert axes["--mixup"].get_ylim()[0] == -0.3


def test_rounds_of_local_steps_are_shown_with_the_distance_of_the_workers(panels):
    records = [
        step(0.1 * i, loss=1.0, accuracy=9.0, round_steps=2**i, worker_distance=0.01 * (10 - i))
        for i in range(10)
    ]
    axis = panels(records)["rounds"]
    assert axis.get_yscale() == "log" and list(axis.lines[0].get_ydata()) == [
        2**i for i in range(10)
    ]
    [other] = [each for each in axis.figure.axes if each is not axis and not each.get_title()]
    assert other.lines[0].get_ydata()[0] == pytest.approx(10.0)
    assert axis.get_ylabel().endswith("now 512") and other.get_ylabel().endswith("now 1")
    assert "rounds" not in panels(WHOLE_RUN)
