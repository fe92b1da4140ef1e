"""The order of an epoch: drawn as torch draws it, the same on every rank, and drawn again on resuming.

A shuffling sampler takes its seed either from a generator or from torch's global one. What it draws depends only on
their states when the epoch begins, so these two states and a number of batches are a position in the data.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, RandomSampler

from shardwise.data.seedable import SeedableRandomSampler
from shardwise.data.split import BatchSamplerShard
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
    """Tell a (batch) sampler, and those inside it that listen, which epoch comes. Returns whether one listened."""
    listened = False
    while sampler is not None:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
            listened = True
        inner = getattr(sampler, "batch_sampler", None)
        sampler = inner if inner is not None else getattr(sampler, "sampler", None)
    return listened


def seeded_in(sampler: Any) -> SeedableRandomSampler | None:
    """The sampler inside a (batch) sampler whose order is that of a seed and an epoch."""
    while sampler is not None:
        if isinstance(sampler, SeedableRandomSampler):
            return sampler
        inner = getattr(sampler, "batch_sampler", None)
        sampler = inner if inner is not None else getattr(sampler, "sampler", None)
    return None


def lone(axis: Axis) -> Axis:
    """This rank alone."""
    return Axis(f"{axis.name} (alone)", (axis.ranks[axis.position],), 0, None, axis.timeout)


class Company:
    """The ranks that read one order together. It can be pickled, and then finds its ranks again by their numbers.

    Args:
        axis: the ranks.
        device: on which they talk.
    """

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self.device = device
        self._axis: Axis | None = axis
        self._was = (axis.name, axis.ranks, axis.position, axis.timeout)

    @property
    def axis(self) -> Axis:
        """The ranks.

        Raises:
            ConfigError: this was unpickled in a process that is not the one of these ranks that it was.
        """
        if self._axis is None:
            raise ConfigError(
                f"this loader was pickled by rank {self._was[1][self._was[2]]} of the ranks {list(self._was[1])}, and "
                "this process is not that rank. Pickle the loader that you gave to `prepare`, and prepare it here."
            )
        return self._axis

    def __getstate__(self) -> dict[str, Any]:
        return {"device": self.device, "was": self._was}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.device, self._was, self._axis = state["device"], state["was"], None
        name, ranks, position, timeout = self._was
        if len(ranks) == 1:
            self._axis = Axis(name, ranks, position, None, timeout)
        elif dist.is_initialized() and ranks == tuple(range(dist.get_world_size())) and dist.get_rank() == position:
            self._axis = Axis(name, ranks, position, dist.group.WORLD, timeout)


def start_epoch(sampler: Any, company: Company) -> EpochStart:
    """Note from where the order is drawn, after all ranks have taken over what the first one's depends on.

    All ranks must call this, with samplers of one kind.
    """
    axis, generator, seeded = company.axis, generator_of(sampler), seeded_in(sampler)
    if generator is not None and axis.size > 1:
        sent = generator.get_state().to(company.device)
        axis.broadcast(sent, 0, "state of the sampler's generator")
        generator.set_state(sent.cpu())
    if seeded is not None and axis.size > 1:
        seed = torch.tensor([seeded.initial_seed], dtype=torch.int64, device=company.device)
        axis.broadcast(seed, 0, "seed of the sampler")
        seeded.initial_seed = int(seed)
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
        company: the ranks.
    """

    def __init__(self, sampler: RandomSampler, company: Company) -> None:
        self.sampler = sampler
        self.company = company

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        seed = torch.empty((), dtype=torch.int64).random_().to(self.company.device)
        self.company.axis.broadcast(seed, 0, "seed of the sampler")
        given, generator = self.sampler, torch.Generator().manual_seed(int(seed))
        # `num_samples` is a property that falls back on the size of the data.
        yield from RandomSampler(given.data_source, given.replacement, given._num_samples, generator)


def one_order(batch_sampler: Iterable[list[Any]], company: Company) -> Iterator[list[Any]]:
    """The batches of a sampler in the first rank's order, or an error on all ranks. All ranks must iterate it."""
    sampler = getattr(batch_sampler, "sampler", None)
    if type(batch_sampler) is BatchSampler and type(sampler) is RandomSampler and sampler.generator is None:
        batch_sampler = BatchSampler(SharedSeed(sampler, company), batch_sampler.batch_size, batch_sampler.drop_last)
    batches, axis = iter(batch_sampler), company.axis
    first = next(batches, None)
    # 32 bits are exact in the float64 that travels.
    digest = float(zlib.crc32(repr(first).encode()))
    ends = torch.tensor([digest, -digest], dtype=torch.float64, device=company.device)
    axis.max_small(ends, "first batch of an epoch")
    highest, lowest = ends.tolist()
    if highest != -lowest:
        me = axis.ranks[axis.position]
        raise ConfigError(
            f"the ranks' samplers give different orders: the first batch of rank {me} is {str(first)[:60]}. Every "
            "rank takes its part of one order, so a sampler must draw the same on all: give it a torch.Generator "
            "called `generator` (it is taken over from the first rank), or the same seed."
        )
    if first is not None:
        yield first
        yield from batches


class WatchedBatches(BatchSamplerShard):
    """One rank's batches of a batch sampler, and whether the one handed out is the last.

    It asks for one batch of indices more than it has handed out. (To look one *batch* ahead would hold it in memory,
    and draw the random numbers of its samples before their time.)

    Args:
        batch_sampler: as for :class:`BatchSamplerShard`, like the arguments not named here.
        company: the ranks, which then read one order; None if each reads what it likes.

    Attributes:
        total: how many batches there were since the last ``iter``, once that is known.
        rows: how many indices the last batch has, once that is known.
        first: the indices of the epoch's first batch, once they were read.
    """

    def __init__(
        self,
        batch_sampler: Iterable[list[Any]],
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
        company: Company | None = None,
    ) -> None:
        super().__init__(batch_sampler, num_processes, process_index, split_batches, even_batches)
        self.company = company
        self.total: int | None = None
        self.rows: int | None = None
        self.first: Any = None
        self._drawn: list[Any] | None = None
        self._batches: Iterator[Any] = iter(())

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_batches": iter(()), "_drawn": None}

    def __iter__(self) -> Iterator[Any]:
        self.total = self.rows = self.first = self._drawn = None
        self._batches = self._unchanged() if self.num_processes == 1 else super().__iter__()
        return self._hand_out()

    def draw(self) -> None:
        """Ask for the first batch of indices now, with which a sampler draws its order."""
        if self._drawn is None:
            self._drawn = list(islice(self._batches, 1))

    def source(self) -> Iterable[Any]:
        """What all ranks read."""
        return self.batch_sampler if self.company is None else one_order(self.batch_sampler, self.company)

    def _unchanged(self) -> Iterator[Any]:
        batches = iter(self.source())
        for self.first in islice(batches, 1):
            yield from islice(chain([self.first], batches), self.skip, None)

    def _hand_out(self) -> Iterator[Any]:
        self.draw()
        count = 0
        for batch in self._drawn or ():
            for following in self._batches:
                count += 1
                yield batch
                batch = following
            count += 1
            self.total, self.rows = count, len(batch) if isinstance(batch, Sized) else None
            yield batch
        self.total = count


class Singles:
    """A sampler of single items from batches of one."""

    def __init__(self, batches: WatchedBatches) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            yield batch[0]
