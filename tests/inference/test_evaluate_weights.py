"""`--eval_only --pretrained`: weights are evaluated without a run; `--eval_data`: on other data."""

import csv
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from data.images.picture_trees import make_tree
from safetensors.torch import load_file

from utils.errors import UserError
from utils.settings import ImageSettings
from utils.tasks.pictures import load_image_task

FLAGS = "--dataset shapes --device cpu --depth 18 --width 4 -b 50 --threads 1"


@pytest.mark.slow
def test_weights_give_the_figures_of_their_run(run_resnet, capsys):
    assert run_resnet(f"{FLAGS} --max_steps 3 --lr 0.01 --output run") == 0
    capsys.readouterr()
    assert run_resnet("--resume run --eval_only") == 0
    of_run = capsys.readouterr().out.splitlines()[-1]
    (file,) = Path("run/checkpoints").glob("*/model.safetensors")
    for source in ("run", file):
        assert run_resnet(f"{FLAGS} --test-only --weights {source}") == 0
        of_weights = capsys.readouterr().out.splitlines()[-1]
        assert of_run.partition(": ")[2] == of_weights.partition(": ")[2]
        assert of_weights.startswith("--pretrained: test loss ")
    assert not Path("runs").exists()  # no run was made
    assert run_resnet(f"{FLAGS} --eval_only --pretrained {file} --report") == 0
    assert len(list(Path("runs").glob("*/report/per_class.csv"))) == 1

    tensors = load_file(file)
    tensors["fc.weight"], tensors["fc.bias"] = torch.zeros(3, 32), torch.zeros(3)
    torch.save(tensors, "three.pth")
    assert run_resnet(f"{FLAGS} --eval_only --pretrained three.pth") == 2
    assert "three.pth has 3 classes, and the data have 10" in capsys.readouterr().err
    torch.save({n: t for n, t in tensors.items() if not n.startswith("fc.")}, "none.pth")
    assert run_resnet(f"{FLAGS} --eval_only --pretrained none.pth") == 2
    assert "none.pth has no head" in capsys.readouterr().err


def test_a_file_within_a_checkpoint_stands_for_it(run_resnet, capsys):
    """With its normalisation, and with the averaged weights if there are any."""
    flags = f"{FLAGS} --max_steps 3 --lr 0.01 --ema_decay 0.5 --output run"
    assert run_resnet(flags) == 0
    (file,) = Path("run/checkpoints").glob("*/model.safetensors")
    figures = []
    for source in ("--resume run", f"{FLAGS} --pretrained {file}"):
        capsys.readouterr()
        assert run_resnet(f"{source} --eval_only") == 0
        figures.append(capsys.readouterr().out.splitlines()[-1].partition(": ")[2])
    assert figures[0] == figures[1]


def test_without_weights_a_run_or_weights_are_asked_for(run_resnet, capsys):
    assert run_resnet(f"{FLAGS} --eval_only") == 2
    assert "by --resume RUN, or its weights by --pretrained" in capsys.readouterr().err
    assert run_resnet(f"{FLAGS} --predict x --pretrained y") == 2
    assert "name its run by --resume RUN\n" in capsys.readouterr().err


def test_a_run_is_evaluated_on_all_of_other_data(run_resnet, capsys):
    """With the same answers as --predict gives, whatever the layout, and without the old data."""
    new, colours = make_tree(Path("new"), ("",), ("cat", "dog"), 6), "--cache_dir cache"
    make_tree(Path("old"), ("",), ("cat", "dog", "eel"), 10)
    flags = f"{FLAGS} {colours} --val_fraction 0.2 -b 8 --max_steps 3 --output run"
    assert run_resnet(f"{flags} --dataset imagefolder --data_dir old") == 0
    Path("old").rename("away")
    assert run_resnet("--resume run --predict new") == 0
    with open("run/predictions.csv", newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    right = sum(Path(row["file"]).parent.name == row["predicted"] for row in rows)
    listed = [f"{path.relative_to('.')},{path.parent.name}" for path in sorted(new.glob("*/*"))]
    Path("list.csv").write_text("\n".join(["file,label", *listed]))
    Path("both/test").mkdir(parents=True)
    make_tree(Path("both"), ("train",), ("cat", "dog"), 6)
    Path("both/train/dog").rename("both/test/dog")
    for place in ("new", "list.csv", "both"):
        capsys.readouterr()
        assert run_resnet(f"--resume run --eval_data {place} --report -b 5") == 0
        said = capsys.readouterr().out
        assert (
            f"accuracy {100 * right / 12:.2f} % (" in said and f") on 12 samples of {place}" in said
        )
        assert f"note: {place} has no samples of 1 of the 3 classes, such as 'eel'" in said
        assert "step 3, best on the validation split: loss " in said and " test loss" not in said
        assert Path(f"run/report/eval-{place}/per_class.csv").is_file()
        with open(f"run/report/eval-{place}/evaluated.csv", encoding="utf-8-sig") as file:
            evaluated = list(csv.DictReader(file))
        assert sum(row["true"] == row["predicted"] for row in evaluated) == right
        assert all(Path(row["file"]).parent.name == row["true"] for row in evaluated)
    assert "measured are 6 pictures of train/, 6 pictures of test/" in said
    assert run_resnet("--resume run --eval_data nowhere") == 2
    assert "nowhere: there is no such file or folder" in capsys.readouterr().err
    assert run_resnet("--resume run --eval_only --data_dir new") == 2
    assert "or evaluate on other data by --resume run --eval_data PATH" in capsys.readouterr().err


def test_a_model_of_gray_pictures_is_told():
    card = SimpleNamespace(channels=1)
    with pytest.raises(UserError, match="takes gray pictures; use --predict"):
        load_image_task(ImageSettings(eval_data="."), torch.device("cpu"), None, card)
