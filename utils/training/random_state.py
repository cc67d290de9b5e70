"""The random states of a process, as JSON.

Order and augmentation need none (they follow from seed, epoch and step); dropout draws from
PyTorch's own generators.
"""

import base64

import torch


def random_states() -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {
        name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()
    }


def restore_random_states(states: dict[str, str]) -> None:
    restored = {
        name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        for name, text in states.items()
    }
    torch.set_rng_state(restored["cpu"])
    if "cuda" in restored and torch.cuda.is_available():
        torch.cuda.set_rng_state(restored["cuda"])
