"""What --dry_run says of local steps."""

from utils.training.local.rounds import lengths_text


def test_a_last_round_that_the_end_of_the_run_cuts_is_told():
    assert lengths_text([4, 6, 30, 2]) == "H 4 to 30, the last round cut to 2"
    assert lengths_text([4, 4, 4, 3]) == "H 4, the last round cut to 3"
    assert lengths_text([4, 6, 30, 5]) == "H 4 to 30"
    assert lengths_text([4, 4]) == "H 4" and lengths_text([1200]) == "H 1,200"
