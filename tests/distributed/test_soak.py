"""`make soak`: as many kills at random moments as SOAK says, over runs of every kind."""

import os

import pytest
from distributed.faulty import Runs
from distributed.test_rank_faults import run_random_kills

KILLS = int(os.environ.get("SOAK", 0))
OF_A_RUN = 10
KINDS = [("images", "ddp", 2), ("images", "fsdp", 2), ("texts", "ddp", 2), ("images", "ddp", 4),
         ("texts", "fsdp", 4), ("images", "local", 2), ("texts", "local", 4)]  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not KILLS, reason="it is for `make soak`")]


def test_runs_survive_any_number_of_kills(tmp_path):
    runs, survived, seed = Runs(tmp_path), 0, int(os.environ.get("SOAK_SEED", 0))
    try:
        while survived < KILLS:
            kind, kills = KINDS[seed % len(KINDS)], min(OF_A_RUN, KILLS - survived)
            survived += run_random_kills(runs, *kind, seed=seed, kills=kills)
            seed += 1
            print(f"survived {survived} of {KILLS} kills", flush=True)
    finally:
        runs.close()
