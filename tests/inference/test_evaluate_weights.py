"""`--eval_only --pretrained`: weights are evaluated without a run."""

from pathlib import Path

import torch
from safetensors.torch import load_file

FLAGS = "--dataset shapes --device cpu --depth 18 --width 4 -b 50 --threads 1"


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
