"""What all tasks say alike of their data."""

from utils.tasks.task import counts_text


def test_splits_that_there_are_not_are_left_out():
    train, val, test = range(1200), range(30), range(100)
    said = counts_text("pictures", train, val, test)
    assert said == "1,200 training, 30 validation, 100 test pictures"
    assert counts_text("texts", train, None, test) == "1,200 training, 100 test texts"
    assert counts_text("texts", train, val, None) == "1,200 training, 30 validation texts"
