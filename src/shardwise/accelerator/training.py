"""The loop: windows, backwards, clipping."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from shardwise.accelerator.base import Base
from shardwise.accelerator.joining import Joining
from shardwise.accelerator.optimizer import AcceleratedOptimizer
from shardwise.accelerator.settings import AutocastKwargs
from shardwise.accelerator.weighting import weight_of
from shardwise.accelerator.windows import Accumulating
from shardwise.engine import Engine
from shardwise.errors import CommError, ConfigError, NotYetSupported

PARTIAL = (
    "clip_grad_norm_ between the micro-batches of a window clips what is only a part of its gradient, as upstream "
    "does. Call it `if accelerator.sync_gradients:`."
)
UNPREPARED = (
    "{name} trains parameters of no prepared model: each process trains a copy of its own, and these drift apart. Give "
    "the model to accelerator.prepare() as well."
)
CONFIGURED = (
    "clip_grad_norm_(max_norm={given}): the ds_config says gradient_clipping: {clipping}, which is what counts. Leave "
    "it out there to clip by the script."
)


class Training(Base):
    """The methods of a loop."""

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a window."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigError(f"gradient_accumulation_steps: expected a whole number of 1 or more, got {steps!r}.")
        for engine in self._engines:
            engine.set_train_batch_size(engine.train_micro_batch_size_per_gpu() * engine.world_size * steps)
        self.gradient_state.num_steps = steps

    @property
    def sync_gradients(self) -> bool:
        """Whether the present micro-batch ends its window; True outside of :meth:`accumulate`."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether a prepared optimizer's last step changed nothing, because a gradient was not finite."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    def accumulate(self, *models: Any) -> contextlib.AbstractContextManager[None]:
        """One micro-batch of these models.

        Optimizers and schedules act in the last one of a window only, and with the last batch of a loader; gradients
        are averaged over the processes only then. Models that are given separately have windows of their own.

        Args:
            models: prepared ones, one or more.
        """
        plain = self._plain
        if not plain or self.processes.num_processes == 1:
            return Accumulating(self.gradient_state, models, [], False)
        switches = [plain[id(m)].replicas for m in models if id(m) in plain]
        each = self._accumulation.sync_each_batch
        return Accumulating(self.gradient_state, models, [s for s in switches if s is not None], each)

    def backward(self, loss: torch.Tensor, *, tokens: float | None = None, **kwargs: Any) -> None:
        """Compute gradients. All processes must call this.

        Args:
            loss: a scalar: the mean over this process's micro-batch. It is divided by the number of micro-batches (or
                weighed, see ``gradient_normalization``), and scaled under fp16; the caller's tensor stays what it is.
            tokens: target tokens that it is the mean of, for ``gradient_normalization="tokens"``.
            kwargs: of ``torch.Tensor.backward``.
        """
        state = self.gradient_state
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad or (loss.numel() != 1 and not kwargs):
            raise ConfigError(f"backward: {_wrong(loss)}")
        if self._engines:
            self._engines_backward(loss, tokens, kwargs)
            return
        if self._unchecked:
            self._look_for_unprepared()
        again = state.backwards > 0 and state.inside
        state.backwards += 1
        if self._weighting is not None:
            loss = loss * self._weighting.weigh(state.window, tokens, again)
        elif state.num_steps > 1:
            loss = loss / state.num_steps
        if self._scales is not None:
            loss = self._scales.of(state.window).scale(loss)
        try:
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]
        except Exception:
            # What was averaged of this backward would be mixed with what was not.
            self._turns.forget()
            for record in self._plain.values():
                # The script's error is the one to see; that other processes are gone as well is a consequence.
                with contextlib.suppress(CommError):
                    if record.replicas is not None:
                        record.replicas.abort()
            raise

    def _look_for_unprepared(self) -> None:
        """Whether each optimizer trains something that is prepared; else the processes' copies drift apart."""
        self._unchecked = False
        if not self.processes.use_distributed:
            return
        held = {id(p) for model in self._models for p in model.parameters()}
        for optimizer in self._optimizers:
            if held.isdisjoint(optimizer.params):
                self._once.warn(UNPREPARED.format(name=type(optimizer.optimizer).__name__))

    def _engines_backward(self, loss: torch.Tensor, tokens: float | None, kwargs: Any) -> None:
        state = self.gradient_state
        unknown = set(kwargs) - {"retain_graph"}
        if unknown:
            raise NotYetSupported(f"backward: {', '.join(sorted(unknown))} with a sharded model has not landed.")
        again = state.backwards > 0 and state.inside
        state.backwards += 1
        if self.gradient_normalization != "micro_steps":
            if again:
                raise ConfigError(
                    f"gradient_normalization={self.gradient_normalization!r} with a sharded model: two losses in one "
                    "micro-batch. Add them up, and call backward once."
                )
            tokens = weight_of(self.gradient_normalization, tokens, again)
        for engine in self._engines:
            engine.set_gradient_accumulation_boundary(state.sync_gradients)
        if len(self._engines) == 1:
            self._engines[0].backward(loss, tokens=tokens, **kwargs)
        else:
            # Which of them the loss goes through only autograd knows, so each is told of it.
            scaled = loss
            for engine in self._engines:
                scaled = engine.scale(loss)
            scaled.backward(**kwargs)  # type: ignore[no-untyped-call]
        for optimizer in self._optimizers:
            optimizer.went_backward()

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Forwards in here are of backwards that do not average gradients over the processes.

        Raises:
            ShardingError: the model is sharded so that each backward must average (stages 2 and 3).
        """
        if isinstance(model, Engine):
            with model.no_sync():
                yield
            return
        record = self._plain.get(id(model))
        if record is None or record.replicas is None:
            yield
            return
        with record.replicas.averaging(False):
            yield

    @contextlib.contextmanager
    def trigger_sync_in_backward(self, model: Any) -> Iterator[None]:
        """The backward in here averages gradients, although its forward ran under :meth:`no_sync`."""
        record = self._plain.get(id(model))
        if record is None or record.replicas is None:
            yield
            return
        with record.replicas.averaging_in_backward():
            yield

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Iterable[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Loops that may end earlier on some processes; those that are through help the others to average.

        At the end all have the parameters of one that was active last. All processes must enter this.

        Args:
            joinables: prepared models (others are passed over).
            even_batches: for map-style loaders, while the block runs: False gives every sample once.

        Raises:
            NotYetSupported: a sharded model, whose forward and step need all processes.
        """
        given = list(joinables)
        if any(isinstance(model, Engine) for model in given):
            raise NotYetSupported(
                "join_uneven_inputs: every process must take every step of a sharded model. Keep even_batches=True, so "
                "that all have equally many batches."
            )
        before = []
        if even_batches is not None and self.processes.use_distributed:
            before = self._set_even_batches(even_batches)
        try:
            found = [self._plain[id(m)].replicas for m in given if id(m) in self._plain]
            active = [replicas for replicas in found if replicas is not None]
            if active and self._weighting is not None:
                raise NotYetSupported(
                    f"join_uneven_inputs with gradient_normalization={self.gradient_normalization!r} has not landed: "
                    "processes that are through have no part in the weights. Use even_batches=True."
                )
            if not active:
                yield
            else:
                with Joining(active, self.processes).joined():
                    yield
        finally:
            for loader, value in before:
                loader.even_batches = value

    def _set_even_batches(self, value: bool) -> list[tuple[Any, bool]]:
        before, others = [], 0
        for loader in self._dataloaders:
            if isinstance(loader.dataset, IterableDataset):
                others += 1
                continue
            before.append((loader, loader.even_batches))
            loader.even_batches = value
        if others:
            warnings.warn("Overriding even_batches is only supported for map-style datasets", stacklevel=4)
        return before

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> contextlib.AbstractContextManager[Any]:
        """Mixed precision for what is computed outside of a prepared model's forward, such as a loss of one's own."""
        options = autocast_handler or self.handlers.get(AutocastKwargs, AutocastKwargs())
        dtype = self.low_dtype
        if dtype is None or not options.enabled:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = torch.autocast(
            self.device.type, dtype=dtype, cache_enabled=options.cache_enabled
        )
        return context

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Take the fp16 loss scale (and the weights of a window) out of the gradients of one, some or all optimizers.

        Once a window, however often it is called.
        """
        given = self._optimizers if optimizer is None else optimizer
        for one in given if isinstance(given, list | tuple) else [given]:
            if isinstance(one, AcceleratedOptimizer):
                one.settle()
                one.unscale()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor | None:
        """Clip the gradient of the window, by its norm over all these parameters. All processes must call this.

        With an engine, its whole gradient is clipped, in the step that follows; a ``gradient_clipping`` in the
        ds_config is what counts if there is one.

        Returns:
            The norm before clipping; None with an engine while the window is not complete.
        """
        if self._engines:
            return self._clip_engines(parameters, max_norm, norm_type)
        found = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if self._partial(found):
            if self._scales is not None or self._weighting is not None:
                return None  # a part of a scaled gradient has no norm that means anything
            self._once.warn(PARTIAL)
        else:
            self.unscale_gradients(self._steppers(found))
        return torch.nn.utils.clip_grad_norm_(found, max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each element of the gradients.

        Raises:
            NotYetSupported: with an engine.
        """
        if self._engines:
            raise NotYetSupported("clip_grad_value_: sharded models have clip_grad_norm_ only.")
        found = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not self._partial(found):
            self.unscale_gradients(self._steppers(found))
        elif self._scales is not None or self._weighting is not None:
            return
        torch.nn.utils.clip_grad_value_(found, clip_value)

    def _partial(self, parameters: list[Any]) -> bool:
        """Whether these gradients are a part of a window that is not complete."""
        state = self.gradient_state
        return not state.sync_gradients and (state.inside or state.concerns({id(p) for p in parameters}))

    def _steppers(self, parameters: list[Any]) -> list[Any]:
        """The optimizers that step any of these parameters; all, if none does."""
        given = {id(p) for p in parameters}
        return [o for o in self._optimizers if not given.isdisjoint(o.params)] or self._optimizers

    def _clip_engines(self, parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor | None:
        if norm_type != 2:
            raise NotYetSupported(f"clip_grad_norm_: norm_type={norm_type} with a sharded model has not landed; 2 has.")
        if not self.sync_gradients:
            return None
        engine = self._owner(parameters if isinstance(parameters, torch.Tensor) else list(parameters))
        clipping = engine.gradient_clipping()
        if clipping > 0:
            if max_norm != clipping:
                self._once.warn(CONFIGURED.format(given=max_norm, clipping=clipping))
            max_norm = clipping
        return engine.clip_grad_norm_(0.0 if max_norm == float("inf") else max_norm)

    def _owner(self, parameters: Any) -> Engine:
        given = {id(p) for p in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)}
        found = [e for e in self._engines if any(id(p) in given for p in e.parameters())]
        if not found:
            raise ConfigError("clip_grad_norm_: these are parameters of no prepared model.")
        if len(found) > 1:
            raise NotYetSupported("clip_grad_norm_ over two sharded models has not landed; clip them one by one.")
        engine: Engine = found[0]
        return engine


def _wrong(loss: Any) -> str:
    """What is wrong with a loss."""
    if not isinstance(loss, torch.Tensor):
        return f"expected the loss, a scalar tensor, got {type(loss).__name__}."
    if not loss.requires_grad:
        return "the loss has no graph: was it computed under no_grad, or detached?"
    return f"the loss has the shape {tuple(loss.shape)}, expected a scalar: reduce it, for example by loss.mean()."
