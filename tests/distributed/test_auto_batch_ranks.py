"""The probe of --auto_batch on ranks with different amounts of memory: the least counts."""

from unittest import mock

import pytest
import toy

from utils.optim.factory import build_optimizer
from utils.training.batch_probe import CPUProbe, largest_that_fits
from utils.training.objective import Classification, Precision


def probed(exchange, rooms: list[int]):
    """(cut that was agreed on, sizes of this rank's micro-batches) where rank r has room for
    rooms[r] samples."""
    model = toy.network()
    data = toy.loader(8, n=46, rank=exchange.rank, ranks=exchange.size)
    objective = Classification(model, Precision("fp32", toy.CPU))

    def passes(batch):
        objective(batch.inputs, batch.targets)[0].backward()
        yield

    with mock.patch.object(CPUProbe, "needed", lambda self, n: n / rooms[exchange.rank]):
        found = largest_that_fits(
            model,
            data,
            passes=passes,
            build_optimizer=lambda: build_optimizer("sgd", model, lr=0.1, weight_decay=0.0),
            averaged=False,
            available=1.0,
            exchange=exchange,
        )
    return found, [len(batch.targets) for batch in data.epoch(0)], data.accumulation


@pytest.mark.parametrize(("rooms", "size"), [([8, 8], 8), ([8, 4], 4), ([3, 100], 2)])
def test_all_ranks_take_what_fits_on_each(worlds, rooms, size):
    results = worlds(2).run(probed, rooms)
    for found, sizes, accumulation in results:
        assert found.size == size and accumulation == 8 // size
        assert max(sizes) <= min(rooms)
    assert len({found.needed for found, _, _ in results}) == 1  # that of the worst rank
    assert len({len(sizes) for _, sizes, _ in results}) == 1


def test_all_are_told_that_nothing_fits_on_one(worlds):
    assert [found.size for found, _, _ in worlds(2).run(probed, [8, 1])] == [None, None]
