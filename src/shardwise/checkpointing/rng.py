"""Named random generators, as Megatron's scripts use them for what each tensor-parallel rank draws on its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.errors import ShardwiseError

MODEL_PARALLEL = "model-parallel-rng"


class RngTracker:
    """States of torch's default generator on this rank's device (the CPU's without one), by name."""

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Forget all names."""
        self._states, self._seeds = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """The states by name."""
        return dict(self._states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replace all states."""
        self._states = states

    def add(self, name: str, seed: int) -> None:
        """Start a generator.

        Raises:
            ShardwiseError: the name or the seed is in use.
        """
        if seed in self._seeds or name in self._states:
            taken = f"the name {name!r}" if name in self._states else f"the seed {seed}"
            raise ShardwiseError(f"random generators: {taken} is in use; choose another, or call reset() first.")
        before = _state()
        seed_device(seed)
        self._states[name] = _state()
        self._seeds.add(seed)
        _set_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw from the named generator inside the context.

        Raises:
            ShardwiseError: there is no such name.
        """
        if name not in self._states:
            raise ShardwiseError(
                f"random generators: there is none named {name!r}; call model_parallel_cuda_manual_seed(seed) or "
                "add(name, seed) first."
            )
        before = _state()
        _set_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _state()
            _set_state(before)


def seed_device(seed: int) -> None:
    """Seed torch's default generator on this rank's device."""
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def _state() -> torch.Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _set_state(state: torch.Tensor) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)
