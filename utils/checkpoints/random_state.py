"""The random states of a process, as JSON.

The weights at the start, dropout and stochastic depth draw from PyTorch's generators; order and
augmentation follow from seed, epoch and step.
"""

import base64
import hashlib

import torch


def random_states() -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {
        name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()
    }


def restore_random_states(states: list[dict] | dict, rank: int = 0, step: int = 0) -> None:
    """Restores this rank's entry. A rank without one is seeded by a hash of the seed of the
    last torch.manual_seed, the step and its rank.

    Args:
        states: what `random_states` returned on each rank; a dict: of a single process (from older
            checkpoints).
        step: at which they were saved.
    """
    if isinstance(states, dict):
        states = [states]
    if rank >= len(states):
        name = f"{torch.initial_seed()}/{step}/{rank}"
        torch.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]))
        return
    restored = {
        name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        for name, text in states[rank].items()
    }
    torch.set_rng_state(restored["cpu"])
    if "cuda" in restored and torch.cuda.is_available():
        torch.cuda.set_rng_state(restored["cuda"])
