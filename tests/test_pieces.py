"""The rule for a lone last sample."""

from itertools import pairwise

from utils.pieces import has_lone_last, largest_piece, piece_borders, piece_count


def test_every_piece_is_whole_but_the_last_which_is_never_one_sample():
    for n in range(1, 40):
        for size in range(1, 12):
            borders = piece_borders(n, size)
            sizes = [end - start for start, end in pairwise(borders)]
            assert borders[0] == 0 and borders[-1] == n and len(sizes) == piece_count(n, size)
            assert all(length == size for length in sizes[:-1])
            assert 1 <= sizes[-1] <= size + has_lone_last(n, size) <= largest_piece(size)
            assert sizes[-1] > 1 or n == 1 or size == 1


def test_no_samples_give_no_pieces():
    assert piece_borders(0, 4) == [0] and piece_count(0, 4) == 0


def test_a_lone_last_sample_comes_after_larger_pieces():
    assert [n for n in range(12) if has_lone_last(n, 4)] == [5, 9]
    assert not any(has_lone_last(n, 1) for n in range(12))
