"""A shuffle that depends on nothing but a seed and the number of the epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import RandomSampler


class SeedableRandomSampler(RandomSampler):
    """A :class:`RandomSampler` whose order in epoch ``e`` is drawn from the seed ``initial_seed + e``.

    Ranks that give it one seed read one order, and epoch ``e`` can be read again at any time. What else draws random
    numbers in between changes nothing.

    Args:
        data_source: what is sampled from; only its length is used.
        replacement: draw with replacement.
        num_samples: how many to draw, by default as many as there are.
        generator: kept for whoever asks for it. It is neither drawn from nor seeded.
        data_seed: the seed of epoch 0, by default that of torch's global generator.

    Attributes:
        initial_seed: the seed of epoch 0.
        epoch: the epoch that comes next. It advances when one has been read to its end.
    """

    def __init__(
        self,
        data_source: Sized,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: Any = None,
        data_seed: int | None = None,
    ) -> None:
        super().__init__(data_source, replacement, num_samples, generator)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        epoch = self.epoch
        generator = torch.Generator().manual_seed(self.initial_seed + epoch)
        # `num_samples` is a property that falls back on the size of the data.
        yield from RandomSampler(self.data_source, self.replacement, self._num_samples, generator)
        if self.epoch == epoch:
            self.epoch = epoch + 1
