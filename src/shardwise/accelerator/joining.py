"""Loops that end earlier on some processes: those that are through take part in the averaging of the others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from shardwise.accelerator.process import Processes
from shardwise.sharding.replicas import Replicas


class Joining:
    """What processes tell each other while their loops may be of different lengths.

    Each process says what it is about to do before it averages a model's gradients (or takes over its buffers). One
    whose loop is over says "nothing", hears what another one does, and does it with zeros, until nobody does anything.
    Then all take over the parameters of one that was active last. Gradients are divided by all processes, also by
    those that are through, as ``torch.distributed.algorithms.Join`` does.

    Args:
        models: what is averaged.
        processes: who.
    """

    def __init__(self, models: Sequence[Replicas], processes: Processes) -> None:
        self._models = list(models)
        self._processes = processes

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """The loop runs in here."""
        for number, model in enumerate(self._models):
            model.announce = self._announcer(number)
        try:
            yield
        finally:
            for model in self._models:
                model.announce = None
        # Not after an exception: the others end by theirs.
        self._follow()

    def _announcer(self, number: int) -> Callable[[int], None]:
        def announce(what: int) -> None:
            self._say(1 + 2 * number + what)

        return announce

    def _say(self, event: int) -> int:
        heard = torch.tensor([float(event)], dtype=torch.float64, device=self._processes.wire_device())
        self._processes.axis.max_small(heard, "join_uneven_inputs")
        return int(heard.item())

    def _follow(self) -> None:
        last = True
        while heard := self._say(0):
            last = False
            number, what = divmod(heard - 1, 2)
            if what:
                self._models[number].reduce_nothing()
            else:
                self._models[number].share_buffers()
        # The highest of those that nobody had to be heard by after their own loop.
        giver = self._say(1 + self._processes.process_index if last else 0) - 1
        for model in self._models:
            model.copy_from(giver)
