"""How fast each rank computes, to find a slow one."""

import time

import torch

SECONDS = 0.5  # of measuring
SIZE = {"cuda": 4096, "cpu": 512}  # rows and columns of the matrices


def matrix_speed(device: torch.device) -> float:
    """Operations per second of matrix products: on a GPU in bfloat16, on a CPU in float32."""
    size = SIZE[device.type]
    cuda = device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    a = torch.ones(size, size, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
    for _ in range(3):
        a @ a
    wait()
    calls, start, elapsed = 0, time.perf_counter(), 0.0
    while elapsed < SECONDS:
        for _ in range(10):
            a @ a
        wait()
        calls, elapsed = calls + 10, time.perf_counter() - start
    return calls * 2 * size**3 / elapsed


def slowest(speeds: list[float]) -> tuple[int, float]:
    """(rank, its speed relative to the median of all)."""
    rank = min(range(len(speeds)), key=speeds.__getitem__)
    return rank, speeds[rank] / sorted(speeds)[len(speeds) // 2]
