"""The order of an epoch: drawn as torch draws it, the same on every rank, and drawn again on resuming.

A shuffling sampler takes its seed either from a generator or from torch's global one. What it draws depends only on
their states when the epoch begins, so these two states and a number of batches are a position in the data.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import RandomSampler

from shardwise.dist import Axis
from shardwise.errors import ConfigError


@dataclass(frozen=True)
class EpochStart:
    """The random states from which an epoch's order is drawn.

    Attributes:
        generator: of the sampler's own generator, or None without one.
        torch: of torch's global generator of the CPU.
    """

    generator: torch.Tensor | None
    torch: torch.Tensor

    def as_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"generator": self.generator, "torch": self.torch}


def generator_of(sampler: Any) -> torch.Generator | None:
    """The generator from which a (batch) sampler, or one inside it, draws."""
    while sampler is not None:
        found = getattr(sampler, "generator", None)
        if isinstance(found, torch.Generator):
            return found
        inner = getattr(sampler, "batch_sampler", None)
        sampler = inner if inner is not None else getattr(sampler, "sampler", None)
    return None


def set_epoch(sampler: Any, epoch: int) -> bool:
    """Tell a (batch) sampler, or the one inside it that listens, which epoch comes. Returns whether one listened."""
    while sampler is not None:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
            return True
        inner = getattr(sampler, "batch_sampler", None)
        sampler = inner if inner is not None else getattr(sampler, "sampler", None)
    return False


def start_epoch(generator: torch.Generator | None, axis: Axis, device: torch.device) -> EpochStart:
    """Note from where the order is drawn, after all ranks have taken over the first one's generator.

    All ranks must call this, or none has a generator.
    """
    if generator is not None and axis.size > 1:
        sent = generator.get_state().to(device)
        axis.broadcast(sent, 0, "state of the sampler's generator")
        generator.set_state(sent.cpu())
    return EpochStart(None if generator is None else generator.get_state(), torch.get_rng_state())


@contextmanager
def drawn_again(start: EpochStart, generator: torch.Generator | None) -> Iterator[None]:
    """Draw the order of an epoch that began earlier: from its states then, leaving torch's global one as it is."""
    now = torch.get_rng_state()
    torch.set_rng_state(start.torch)
    if generator is not None and start.generator is not None:
        generator.set_state(start.generator)
    try:
        yield
    finally:
        torch.set_rng_state(now)


class SharedSeed:
    """Shuffles as a :class:`RandomSampler` without a generator does, in the order that the first rank draws.

    Such a sampler takes one number of torch's global generator as its seed whenever it is iterated. This takes the
    same number at the same moment; all ranks then use the first rank's. All ranks must iterate it.

    Args:
        sampler: one without a generator. It is not changed.
        axis: the ranks.
        device: on which they talk.
    """

    def __init__(self, sampler: RandomSampler, axis: Axis, device: torch.device) -> None:
        self.sampler = sampler
        self.axis = axis
        self.device = device

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        seed = torch.empty((), dtype=torch.int64).random_().to(self.device)
        self.axis.broadcast(seed, 0, "seed of the sampler")
        given, generator = self.sampler, torch.Generator().manual_seed(int(seed))
        # `num_samples` is a property that falls back on the size of the data.
        yield from RandomSampler(given.data_source, given.replacement, given._num_samples, generator)


class SameOrder:
    """Hands on the batches of a sampler, after the ranks have compared the first one. All ranks must iterate it.

    Args:
        batch_sampler: what each rank reads, and then takes its part of.
        axis: the ranks.
        device: on which they talk.
    """

    def __init__(self, batch_sampler: Iterable[list[Any]], axis: Axis, device: torch.device) -> None:
        self.batch_sampler = batch_sampler
        self.axis = axis
        self.device = device

    def __len__(self) -> int:
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[Any]]:
        batches = iter(self.batch_sampler)
        first = next(batches, None)
        # 32 bits are exact in the float64 that travels.
        digest = float(zlib.crc32(repr(first).encode()))
        ends = torch.tensor([digest, -digest], dtype=torch.float64, device=self.device)
        self.axis.max_small(ends, "first batch of an epoch")
        highest, lowest = ends.tolist()
        if highest != -lowest:
            me = self.axis.ranks[self.axis.position]
            raise ConfigError(
                f"the ranks' samplers give different orders: the first batch of rank {me} is {str(first)[:60]}. Every "
                "rank takes its part of one order, so a sampler must draw the same on all: give it a torch.Generator "
                "called `generator` (it is taken over from the first rank), or the same seed."
            )
        if first is not None:
            yield first
            yield from batches


class WatchedBatches:
    """A batch sampler that knows, when it hands a batch out, whether it was the last.

    It asks for one batch of indices more than it has handed out. (To look one *batch* ahead would hold it in memory,
    and draw the random numbers of its samples before their time.)

    Args:
        batch_sampler: whose batches are handed on.

    Attributes:
        total: how many batches there were since the last ``iter``, once that is known.
    """

    def __init__(self, batch_sampler: Iterable[Any]) -> None:
        self.batch_sampler = batch_sampler
        self.total: int | None = None
        self._batches: Iterator[Any] = iter(())
        self._ahead: list[Any] = []

    def __len__(self) -> int:
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        self.total, self._ahead = None, []
        self._batches = iter(self.batch_sampler)
        return self._hand_out()

    def draw(self) -> None:
        """Ask for the first batch of indices now, with which a sampler draws its order."""
        if self.total is None and not self._ahead:
            self._ahead = list(islice(self._batches, 1))

    def _hand_out(self) -> Iterator[Any]:
        self.draw()
        count = 0
        while self._ahead:
            batch = self._ahead[0]
            self._ahead = list(islice(self._batches, 1))
            count += 1
            if not self._ahead:
                self.total = count
            yield batch
        self.total = count
