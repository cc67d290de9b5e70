"""`--engine ort` with --eval_only and --predict: what is refused, and where it comes from."""

import sys

import pytest
from settings_of_pictures import noted, refused, settings_of

USED = [["--eval_only"], ["--predict", "x"]]


@pytest.mark.parametrize("action", USED, ids=lambda action: action[0])
def test_what_cannot_be_combined_is_refused_by_name(action, make_run):
    given = ["--resume", make_run(), *action, "--engine", "ort"]
    assert settings_of(*given).infers_by_ort
    assert settings_of(*given, "--precision", "fp32", "--device", "cpu").infers_by_ort
    assert not settings_of(*given[:-2]).infers_by_ort
    for flags, advice in (
        (["--device", "cuda"], "add --device cpu"),
        (["--precision", "bf16"], "add --precision fp32"),
        (["--precision", "fp16"], "add --precision fp32"),
    ):
        text = refused(*given, *flags)
        assert text.startswith(f"{' '.join(flags)} cannot be combined with --engine ort: ")
        assert advice in text
    text = refused(*given, "--distributed")
    assert "do not use run_distributed.sh" in text


def test_actions_that_do_not_compute_the_network(make_run):
    run = make_run()
    for argv in (["--resume", run, "--export", "onnx"], ["--check"]):
        settings, (line,) = noted(*argv, "--engine", "ort")
        assert settings.engine == "torch" and not settings.infers_by_ort
        assert line.startswith("note: --engine has no effect: --")


def test_a_run_trained_by_onnx_runtime_is_evaluated_by_pytorch(make_run):
    run = make_run("--engine", "ort")
    assert settings_of("--resume", run).engine == "ort"
    for action in [*USED, ["--export", "onnx"]]:
        settings, lines = noted("--resume", run, *action)
        assert (settings.engine, lines) == ("torch", [])
    for action in USED:
        assert settings_of("--resume", run, *action, "--engine", "ort").infers_by_ort


@pytest.mark.parametrize("name", ["onnx", "onnxruntime", "onnxscript"])
def test_a_missing_package_is_named(name, make_run, monkeypatch):
    run = make_run()
    monkeypatch.setitem(sys.modules, name, None)
    text = refused("--resume", run, "--eval_only", "--engine", "ort")
    assert text == f"--engine ort needs one more package: pip install {name}"
    assert settings_of("--resume", run, "--eval_only").engine == "torch"
