"""The optimizers that `prepare` returns: they act when a window is complete."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from shardwise.accelerator.loss_scale import LossScales
from shardwise.accelerator.once import Once
from shardwise.accelerator.weighting import Weighting
from shardwise.accelerator.windows import GradientState
from shardwise.errors import NotYetSupported

if TYPE_CHECKING:
    from shardwise.engine import Engine

EARLY_ZERO = (
    "optimizer.zero_grad() between the micro-batches of a window was passed over: it would drop what the window has "
    "so far. It drops gradients where a window begins, and after optimizer.step()."
)
NOTHING = (
    "optimizer.step() changed nothing: no accelerator.backward(loss) went before. Call it in the place of "
    "loss.backward(), which an engine is not told of."
)


class AcceleratedOptimizer(Optimizer):
    """An optimizer whose ``step`` and ``zero_grad`` do nothing while a window is not complete.

    Args:
        optimizer: the script's.
        state: of the windows.
        scales: of fp16 losses, or None.
        weighting: how micro-batches weigh, where that is settled late; or None.
        once: says things once.

    Attributes:
        optimizer: the script's own.
        step_was_skipped: the last step changed nothing, because a gradient was not finite.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        state: GradientState,
        *,
        scales: LossScales | None = None,
        weighting: Weighting | None = None,
        once: Once | None = None,
    ) -> None:
        # Optimizer.__init__ is not called: groups, state and defaults are the inner optimizer's.
        self.optimizer = optimizer
        self.gradient_state = state
        self._scales = scales
        self.step_was_skipped = False
        self._weighting = weighting
        self._once = once or Once(True)
        self._weighed: Any = None  # the weights that are in the gradients
        self._unscaled: Any = None  # the scale that was taken out of them
        self._took_step = False
        self._is_accelerate_prepared = True
        self._hook = None if scales is None else optimizer.register_step_post_hook(self._note_step)

    # -- what scripts read --

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The script's optimizer's groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The script's optimizer's state."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The script's optimizer's defaults."""
        return self.optimizer.defaults

    @property
    def _is_overflow(self) -> bool:
        return self.step_was_skipped

    def state_dict(self) -> dict[str, Any]:
        """The script's optimizer's."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load into the script's optimizer."""
        self.optimizer.load_state_dict(dict(state_dict))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add to the script's optimizer."""
        self.optimizer.add_param_group(param_group)

    def train(self) -> Any:
        """For optimizers that differ between training and evaluation (schedule-free ones)."""
        inner: Any = self.optimizer
        return inner.train() if callable(getattr(inner, "train", None)) else None

    def eval(self) -> Any:
        """As :meth:`train`."""
        inner: Any = self.optimizer
        return inner.eval() if callable(getattr(inner, "eval", None)) else None

    # -- what they call --

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, if the window is complete.

        Also where a window begins, for loops that call this before their forward.
        """
        state = self.gradient_state
        before_forward = state.inside and not state.backwards and state.concerns(self.params)
        if before_forward and state.step > 1:
            if state.sync_gradients:
                self._once.warn(EARLY_ZERO)
            return
        if not before_forward and not self._acts():
            return
        if self._weighting is not None:
            state.window_of(self.params).weights = None
        if set_to_none is None:
            self.optimizer.zero_grad()
        else:
            self._zero(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step, if the window is complete."""
        if not self._acts():
            return
        if self._weighting is not None:
            self.settle()
        if self._scales is None:
            if closure is None:
                self.optimizer.step()
            else:
                self.optimizer.step(closure)
            return
        self._took_step = False
        scale = self._scales.of(self.gradient_state.window_of(self.params))
        scale.step(self.optimizer, *([] if closure is None else [closure]))
        self.step_was_skipped = not self._took_step

    def settle(self) -> None:
        """Weigh the window's gradient, if that is still to be done. All ranks must call this."""
        if self._weighting is None:
            return
        window = self.gradient_state.window_of(self.params)
        if window.weights is not None and window.weights is self._weighed:
            return
        scale = self._weighting.scale(window)
        self._weighed = window.weights
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        for dtype in {g.dtype for g in grads}:
            torch._foreach_mul_([g for g in grads if g.dtype == dtype], scale.to(dtype))

    def unscale(self) -> None:
        """Take the loss scale out of the gradients; once a step, however often it is called."""
        if self._scales is None:
            return
        scale = self._scales.of(self.gradient_state.window_of(self.params))
        if self._unscaled != (scale, scale.generation):
            self._unscaled = (scale, scale.generation)
            scale.unscale(self.optimizer)

    @property
    def params(self) -> set[int]:
        """The ids of the parameters that it steps."""
        return {id(p) for group in self.optimizer.param_groups for p in group["params"]}

    def _acts(self) -> bool:
        state = self.gradient_state
        return state.sync_gradients or not (state.inside or state.concerns(self.params))

    def _zero(self, set_to_none: bool) -> None:
        if "set_to_none" in inspect.signature(self.optimizer.zero_grad).parameters:
            self.optimizer.zero_grad(set_to_none=set_to_none)
        else:
            self.optimizer.zero_grad()

    def _note_step(self, optimizer: Any, *_: Any) -> None:
        # Fused optimizers are called in any case, and told what was found.
        found_inf = getattr(optimizer, "found_inf", None)
        self._took_step = found_inf is None or not bool(found_inf)

    def __getattr__(self, name: str) -> Any:
        # Optimizers have methods of their own (a schedule-free one's, a paged one's).
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_hook"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._hook = None if self._scales is None else self.optimizer.register_step_post_hook(self._note_step)

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"


class EngineOptimizer(Optimizer):
    """The optimizer of an engine: ``step`` clips, unscales and steps all of it when the window is complete.

    Args:
        engine: whose.
        state: of the windows.
        steps_itself: no script holds this: a backward that ends a window steps.

    Attributes:
        optimizer: the engine's.
    """

    def __init__(self, engine: Engine, state: GradientState, *, steps_itself: bool = False) -> None:
        # As above.
        self.engine = engine
        self._steps_itself = steps_itself
        self.gradient_state = state
        self._is_accelerate_prepared = True
        self._open = False

    @property
    def optimizer(self) -> Any:
        """The engine's optimizer."""
        return self.engine.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Groups of this rank's pieces."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """By piece."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The script's optimizer's defaults."""
        defaults: dict[str, Any] = self.optimizer.defaults
        return defaults

    @property
    def step_was_skipped(self) -> bool:
        """The last step changed nothing, because a gradient was not finite."""
        return self.engine.stepped and not self.engine.was_step_applied()

    _is_overflow = step_was_skipped

    def state_dict(self) -> dict[str, Any]:
        """This rank's part."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's part. All ranks must call this."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the model is cut already."""
        self.optimizer.add_param_group(param_group)

    def train(self) -> None:
        """Nothing."""

    def eval(self) -> None:
        """Nothing."""

    def went_backward(self) -> None:
        """A micro-batch's gradients are there. What is not stepped is counted."""
        self._open = self.gradient_state.sync_gradients
        if not self._open or self._steps_itself:
            self._open = False
            self.engine.step()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step the engine, if the window is complete. All ranks must call this."""
        if closure is not None:
            raise NotYetSupported("optimizer.step(closure) has no meaning for a sharded model.")
        if self._open:
            self._open = False
            self.engine.step()
        elif self.gradient_state.sync_gradients:
            warnings.warn(NOTHING, stacklevel=2)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, if the window is complete and was not stepped."""
        state = self.gradient_state
        if not state.sync_gradients or (state.inside and state.step > 1 and not state.backwards):
            return
        self._open = False
        self.engine.zero_grad()

    def __repr__(self) -> str:
        return f"EngineOptimizer({self.optimizer!r})"
