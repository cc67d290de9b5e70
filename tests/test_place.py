"""What commands are called in a checkout and in the package."""

import pytest

from utils import place
from utils.errors import UserError


@pytest.mark.parametrize(
    ("in_checkout", "in_package"),
    [
        ("python resnet50_test.py --resume runs/a", "fewhours resnet50 --resume runs/a"),
        ("NPROC=2 bash run_distributed.sh vit_test.py -b 8", "NPROC=2 fewhours launch vit -b 8"),
        ("python train.py shapes, or python my_test.py", "fewhours shapes, or python my_test.py"),
        ("bash tuning/resnet50_tuning.sh --help", "fewhours tune resnet50 --help"),
        ("python -m utils.reporting.compare runs", "fewhours compare runs"),
    ],
)
def test_commands(in_checkout, in_package, monkeypatch):
    assert str(UserError(in_checkout)) == place.as_called(in_checkout) == in_checkout
    monkeypatch.setattr(place, "PACKAGE", "fewhours.")
    assert str(UserError(in_checkout)) == place.as_called(in_checkout) == in_package


def test_python_finds_the_code_where_it_lies(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert place.python_path() == {"PYTHONPATH": str(place.ROOT)}
    monkeypatch.setenv("PYTHONPATH", "/others")
    assert place.python_path() == {"PYTHONPATH": f"{place.ROOT}:/others"}
