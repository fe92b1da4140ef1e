"""Accumulation windows: which micro-batch ends one, and over which loader the script is looping."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False, slots=True)
class Window:
    """The windows of one model, or of several that accumulate together; one after the other.

    Attributes:
        models: whose; none where no models were named.
        step: micro-batches since the last one ended.
        weights: of its micro-batches (:mod:`shardwise.accelerator.weighting`).
        scale: of its fp16 losses (:mod:`shardwise.accelerator.loss_scale`).
    """

    models: tuple[Any, ...] = ()
    step: int = 0
    loader: int = 0
    position: int = -1
    calls: int = 0  # micro-batches that the present batch of the loader was cut in so far
    calls_before: int = 1  # and how many the batch before was cut in
    weights: Any = None
    scale: Any = None

    def trains(self, params: set[int]) -> bool:
        """Whether one of its models has one of the parameters (by id)."""
        return any(id(p) in params for model in self.models for p in model.parameters())


class GradientState:
    """Whether gradients are complete now, for the optimizers and schedules of one Accelerator.

    A window ends after ``num_steps`` micro-batches, and with the last batch of a loader. Where a script cuts each batch
    of a loader in several micro-batches, the last of these ends it, as the batch before has shown how many there are.
    Models that accumulate separately have windows of their own.

    The loader that counts is the one that handed out a batch last. A loop that was left early is therefore in nobody's
    way, and an evaluation inside an epoch neither.

    Attributes:
        num_steps: micro-batches of a window.
        sync_with_dataloader: whether the last batch of a loader ends a window.
        sync_gradients: whether the present micro-batch ends its window.
        inside: whether the script is inside of ``accumulate``.
        step: micro-batches of the present window.
        dataloader_references: the loaders that are looped over, the one that counts last.
    """

    def __init__(self, num_steps: int = 1, sync_with_dataloader: bool = True) -> None:
        self.num_steps = num_steps
        self.sync_with_dataloader = sync_with_dataloader
        self.sync_gradients = True
        self.inside = False
        self.step = 0
        self.backwards = 0  # of the present micro-batch
        self.dataloader_references: list[Any] = []
        self.on_open_window: Callable[[], None] | None = None
        self.window = Window()  # that of the present micro-batch
        self._windows: dict[Hashable, Window] = {None: self.window}

    def reset(self) -> None:
        """Forget all windows and loops."""
        self.dataloader_references.clear()
        self.window = Window()
        self._windows = {None: self.window}
        self.sync_gradients, self.inside, self.step, self.backwards = True, False, 0, 0

    # -- the loops --

    def begin(self, loader: Any) -> None:
        """A loop over a prepared loader begins, perhaps inside of another."""
        self.end(loader)
        self.dataloader_references.append(loader)

    def advanced(self, loader: Any) -> None:
        """The loader is about to hand out a batch."""
        loops = self.dataloader_references
        if loops and loops[-1] is loader:
            return
        self.begin(loader)

    def end(self, loader: Any) -> None:
        """The loop is over, or was left early."""
        last = loader.end_of_dataloader and self.sync_with_dataloader
        cut_short = last and any(w.step and w.loader == id(loader) and w.calls < w.calls_before for w in self.windows)
        if cut_short and self.on_open_window is not None:
            self.on_open_window()
        self.dataloader_references = [x for x in self.dataloader_references if x is not loader]

    @property
    def active_dataloader(self) -> Any:
        """The loader that handed out a batch last, of those whose loops are not over; or None."""
        return self.dataloader_references[-1] if self.dataloader_references else None

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being looped over."""
        return bool(self.dataloader_references)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch that was handed out last is the last one of its loader."""
        return bool(self.dataloader_references) and self.dataloader_references[-1].end_of_dataloader

    @property
    def remainder(self) -> int:
        """Samples of the last round that are no repetitions; 0 if none is one, -1 outside of loops or if not known."""
        loader = self.active_dataloader
        return -1 if loader is None else loader.remainder

    # -- the windows --

    def accumulate(self, models: tuple[Any, ...] = ()) -> bool:
        """A micro-batch of models that accumulate together begins. Returns whether it ends its window."""
        key = id(models[0]) if len(models) == 1 else tuple(map(id, models)) or None
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = Window(models)
        self.window = window
        self.inside = True
        window.step += 1
        sync = window.step % self.num_steps == 0
        loops = self.dataloader_references
        if loops and self._ends_with(loops[-1], window):
            sync = True
        self.step = window.step
        if sync:
            window.step = 0
        self.backwards = 0
        self.sync_gradients = sync
        return sync

    def _ends_with(self, loader: Any, window: Window) -> bool:
        if loader.position == window.position and id(loader) == window.loader:
            window.calls += 1
        else:
            window.calls_before = window.calls if id(loader) == window.loader and loader.position else 1
            window.loader, window.position, window.calls = id(loader), loader.position, 1
        return self.sync_with_dataloader and loader.end_of_dataloader and window.calls >= window.calls_before

    @property
    def windows(self) -> list[Window]:
        """All of them, in the order in which they were begun first."""
        return list(self._windows.values())

    def concerns(self, params: set[int]) -> bool:
        """Whether the window of the last micro-batch is of a model that has one of these parameters (by id).

        A step of any other is not held up after the block is over. Where no models were named, it is everyone's.
        """
        return not self.window.models or self.window.trains(params)

    def window_of(self, params: set[int]) -> Window:
        """The window in which the gradients of these parameters (by id) add up."""
        if len(self._windows) == 1 or self.window.trains(params):
            return self.window
        others = [w for w in reversed(self._windows.values()) if w.trains(params)]
        return others[0] if others else self.window

    def state_dict(self) -> dict[str, int]:
        """Micro-batches of the window that is open, for a checkpoint."""
        return {"step": 0 if self.sync_gradients else self.step}

    def __repr__(self) -> str:
        return (
            f"GradientState(sync_gradients={self.sync_gradients}, end_of_dataloader={self.end_of_dataloader}, "
            f"remainder={self.remainder}, num_steps={self.num_steps})"
        )


class Accumulating(contextlib.AbstractContextManager[None]):
    """One micro-batch. Made for each by ``Accelerator.accumulate``.

    Args:
        state: counts.
        models: prepared models; what averages their gradients.
        switches: of the models, those whose averaging is switched off while a window is not complete.
        each: average in every micro-batch.
    """

    __slots__ = ("_each", "_models", "_state", "_switches")

    def __init__(self, state: GradientState, models: tuple[Any, ...], switches: list[Any], each: bool) -> None:
        self._state = state
        self._switches = switches
        self._each = each
        self._models = models

    def __enter__(self) -> None:
        sync = self._state.accumulate(self._models)
        for switch in self._switches:
            switch.sync = sync or self._each

    def __exit__(self, kind: Any, *rest: Any) -> None:
        self._state.inside = False
        for switch in self._switches:
            switch.sync = True
        if kind is not None:
            # The micro-batch came to nothing: optimizers outside of the block are not held up by it.
            self._state.sync_gradients = True
