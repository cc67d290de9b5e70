"""benchmarks/host_memory.py."""

from benchmarks import host_memory


def test_what_a_process_takes():
    for key in ("narrow", "transformer"):
        case = host_memory.CASES[key]._replace(batch=2)
        found = host_memory.train(case, "memory", steps=1, threads=1)
        assert len(found["seconds"]) == 1
        # Nothing, where this process had more before.
        assert 0 <= found["gb_after_two"] <= found["gb_after_all"] < 8
