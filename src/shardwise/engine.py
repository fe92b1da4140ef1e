"""The engine: forward, backward and step of a sharded model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from shardwise import _torch
from shardwise.data.batches import call, cast, loss_of, repeat, to_device
from shardwise.engine_state import EngineState
from shardwise.errors import CommError, ConfigError, ShardingError
from shardwise.optim import supports_found_inf
from shardwise.optim.sharded import ShardedOptimizer
from shardwise.outcome import StepOutcome, clip_factor
from shardwise.precision import NoScaler, autocast_context
from shardwise.sharding.access import pinned
from shardwise.sharding.agreement import Agreement, agree, not_finite_units
from shardwise.sharding.gradient import LOW_PRECISION
from shardwise.sharding.reducer import warn_discarded

RELEASED_TOO_EARLY = (
    "the backward pass needs a parameter that is not gathered: the output of its module reached the loss by a way that "
    "shardwise does not see (kept in an attribute, a cache or an object of a class of its own). Return it from the "
    "module's forward as a tensor, in a list, dict, tuple or dataclass."
)


class Engine(EngineState):
    """Trains a model by the loop ``loss = engine(batch); engine.backward(loss); engine.step()``.

    Made by :func:`shardwise.initialize`. Call the three on every micro-batch; ``step`` acts on the last one of an
    accumulation window (the boundary). Unknown attributes are looked up on the wrapped model.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; under ``torch_autocast`` if the configuration says so."""
        if self.config.fp16.enabled and self.config.fp16.auto_cast:
            args, kwargs = cast(args, torch.float16), cast(kwargs, torch.float16)
        # A forward without gradients is no part of a step.
        part = "forward" if torch.is_grad_enabled() else "evaluation"
        with self._journal.part(part), autocast_context(self.config, self.device.type):
            return self.module(*args, **kwargs)

    def backward(
        self,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        tokens: float | None = None,
    ) -> torch.Tensor:
        """Compute gradients, and reduce them when the stage and the window want it.

        Args:
            loss: a scalar: the mean over this rank's micro-batch.
            retain_graph: keep the graph for another backward.
            scale_wrt_gas: divide by the number of micro-steps of the window.
            tokens: target tokens that ``loss`` is the mean of; required with ``"gradient_normalization": "tokens"``,
                else only used for the throughput that is logged.

        Returns:
            The loss as it enters the window's mean: divided by the number of micro-steps.

        Raises:
            ShardingError: ``loss`` is not a scalar with a graph.
            ConfigError: tokens are needed and not given.
        """
        self._check_loss(loss)
        self._agreement = None
        by_tokens = self.config.gradient_normalization == "tokens"
        if by_tokens and tokens is None:
            raise ConfigError(
                'gradient_normalization: "tokens" needs the number of target tokens of each micro-batch: '
                "engine.backward(loss, tokens=n), where loss is the mean over these n tokens."
            )
        weight = float(tokens or 0) if by_tokens else (1.0 / self._gas if scale_wrt_gas else 1.0)
        self._tokens += float(tokens or 0)
        self._losses.append(loss.detach())
        reducer = self._sharded.reducer
        reducer.boundary = self._ends_window()
        with self._journal.part("backward"):
            reducer.begin(ends_itself=False)
            try:
                self._scaled(loss, weight).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            except Exception as error:
                # The user's error is the one to see; that other ranks are gone as well is a consequence.
                with contextlib.suppress(CommError):
                    self._sharded.abort()
                self._restart_window()
                warn_discarded()
                if isinstance(error, RuntimeError) and _torch.is_missing_storage(error):
                    raise ShardingError(RELEASED_TOO_EARLY) from error
                raise
            reducer.end()
        return loss.detach() / self._gas if scale_wrt_gas and not by_tokens else loss.detach()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as :meth:`backward` would differentiate it, for a script that calls ``.backward()`` itself."""
        if self.config.gradient_normalization == "tokens":
            raise ConfigError('gradient_normalization: "tokens" needs engine.backward(loss, tokens=n).')
        self._agreement = None
        self._sharded.reducer.boundary = self._ends_window()
        self._losses.append(loss.detach())
        return self._scaled(loss, 1.0 / self._gas)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """On a boundary: clip, step the optimizer and the schedule. Else only count the micro-step.

        A gradient that is not finite on any rank skips the step on all of them.

        Raises:
            ConfigError: the engine has no optimizer.
            LossScaleError: fp16 overflowed at the smallest loss scale.
        """
        if not self.is_gradient_accumulation_boundary():
            self.micro_steps += 1
            return
        if self.optimizer is None:
            raise ConfigError(
                "optimizer: absent, and none was given to shardwise.initialize; there is nothing to step."
            )
        with self._journal.part("step"):
            self.settle()
            self._outcome = self._take_step(self.optimizer)
            self._unsettled = True
            self._lr_kwargs = dict(lr_kwargs or {})
            self.micro_steps += 1
            self._window_start = self.micro_steps
            self.global_steps += 1
            self.global_samples += self.train_batch_size()
            self._journal.took_step(self, self._outcome, self._tokens * self.mesh.world.size)
            if not self._outcome.deferred:
                self.settle()
        self._forget()
        self._journal.end_step(self)

    def train_batch(
        self, data_iter: Iterator[Any] | None = None, *, tokens: Callable[[Any], float] | None = None
    ) -> torch.Tensor:
        """Take a whole window from ``data_iter``: forward, backward and step on each of its micro-batches.

        Args:
            data_iter: gives micro-batches: dicts become keyword arguments of the model, tuples and lists positional
                ones. Default: the loader made from ``training_data``, started anew when it ends.
            tokens: target tokens of a micro-batch, needed with ``"gradient_normalization": "tokens"``.

        Returns:
            The mean loss of the window over all ranks (0-d, float32).

        Raises:
            ConfigError: there is no loader, or ``tokens`` is needed and not given.
            StopIteration: ``data_iter`` ended.
        """
        if not self._managed:
            raise ConfigError("managed_gradient_accumulation: false leaves windows to the script, so use step().")
        iterator = data_iter if data_iter is not None else self._endless()
        losses = []
        for _ in range(self._gas):
            batch = to_device(next(iterator), self.device)
            loss = loss_of(call(self, batch))
            losses.append(loss.detach())
            self.backward(loss, tokens=None if tokens is None else tokens(batch))
            self.step()
        mean = torch.stack(losses).float().mean().reshape(1)
        self.mesh.world.sum_small(mean, "mean loss")
        return mean[0] / self.mesh.world.size

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the gradient of the complete window in the step that follows, for a script that decides by itself.

        Between the window's last backward and ``step``. All ranks must call this.

        Args:
            max_norm: the largest norm; it takes the place of ``gradient_clipping`` in this step. 0: do not clip.

        Returns:
            The norm before clipping (0-d, on the device).

        Raises:
            ShardingError: the window is not complete.
        """
        if not self.is_gradient_accumulation_boundary():
            raise ShardingError(
                "engine.clip_grad_norm_: the window is not complete, so its norm is not known. Call it between the "
                "backward of the last micro-batch and engine.step()."
            )
        self._clip_once = max_norm
        return self._norm(self._agreed())

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduce what was collected and not reduced yet; ``step`` does so by itself. All ranks must call this."""
        self._sharded.reducer.finish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that the window has so far; its micro-steps go on being counted."""
        self._sharded.reducer.discard()
        self._forget()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Collect gradients without reducing them.

        Raises:
            ShardingError: the stage reduces in every backward (2 and 3).
        """
        if self._sharded.policy.reduce_each_micro_step:
            raise ShardingError(
                f"no_sync: ZeRO stage {self._sharded.policy.stage} keeps only a slice of the gradients and must reduce "
                "them in every backward. Use gradient_accumulation_steps, or stage 0 or 1."
            )
        before, self._boundary = self._boundary, False
        try:
            yield
        finally:
            self._boundary = before

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the present micro-batch is the last of its window."""
        if self._boundary is not None:
            return self._boundary
        return not self._managed or self.micro_steps + 1 - self._window_start >= self._gas

    def _ends_window(self) -> bool:
        """Whether this backward is known to be the window's last; the script may decide that later, with ``step``."""
        return self.is_gradient_accumulation_boundary() and (self._managed or self._boundary is not None)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Let the script decide where windows end, from now on."""
        self._boundary = is_boundary

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's ``generate`` with all parameters whole, so that each rank may stop at a length of its own.

        All ranks must call this. At stage 3 it needs memory for the whole model.
        """
        with pinned(self._sharded.units):
            return self.module.generate(*args, **kwargs)  # type: ignore[operator]

    def _restart_window(self) -> None:
        self.micro_steps = self._window_start
        self._forget()

    def _forget(self) -> None:
        self._tokens = 0.0
        self._losses.clear()
        self._agreement = self._clip_once = None

    def _agreed(self) -> Agreement:
        """What the ranks agree on for the window that is complete, asked for once."""
        if self._agreement is None:
            self.settle()
            self._sharded.reducer.finish()
            self._agreement = agree(self._sharded, self._tokens, self._losses)
        return self._agreement

    def _inverse(self, agreement: Agreement) -> torch.Tensor:
        """What takes the loss scale and the weights of the window out of its gradient."""
        inverse = torch.full_like(agreement.squares, self._sharded.averaging.after / self._scaler.scale)
        if self.config.gradient_normalization == "tokens":
            # Collected as sums over tokens, averaged over the ranks: this makes it the mean over all tokens.
            inverse = inverse * self.mesh.world.size / agreement.tokens.clamp(min=1)
        return inverse

    def _norm(self, agreement: Agreement) -> torch.Tensor:
        return agreement.squares.sqrt() * self._inverse(agreement)

    def _scaled(self, loss: torch.Tensor, weight: float) -> torch.Tensor:
        factor = weight * self._scaler.scale
        if loss.dtype in LOW_PRECISION:
            loss = loss.float()  # a scaled fp16 loss would overflow itself
        return loss if factor == 1.0 else loss * factor

    def _take_step(self, optimizer: ShardedOptimizer) -> StepOutcome:
        agreement = self._agreed()
        inverse = self._inverse(agreement)
        norm = agreement.squares.sqrt() * inverse
        factor = clip_factor(norm, self.config.gradient_clipping if self._clip_once is None else self._clip_once)
        scale = inverse * factor
        self._gradient_bytes = sum(g.nbytes for g in self._sharded.grads)
        outcome = StepOutcome(norm, norm * factor, torch.isfinite(agreement.squares), loss=agreement.loss)
        checks = self.config.bf16.check_grad_overflow or not self.config.bf16.enabled
        if not checks:
            outcome.finite = torch.ones_like(outcome.finite)
        defer = self._may_defer(optimizer)
        if defer:
            outcome.deferred = True
            outcome.start_copy()
            found_inf = (~outcome.finite).float() if checks else None
            optimizer.step(agreement=agreement, scale=scale, found_inf=found_inf)
        elif outcome.applied:
            # Worth a look where it costs nothing; on a GPU it would wait for the device.
            plain = self.device.type == "cpu" and not _torch.is_fake(scale) and float(scale) == 1.0
            optimizer.step(agreement=agreement, scale=None if plain else scale)
        else:
            outcome.bad_units = not_finite_units(self._sharded)
        optimizer.zero_grad()
        return outcome

    def _may_defer(self, optimizer: ShardedOptimizer) -> bool:
        """Whether the step can be decided on the device. On a CPU there is nothing to wait for; a dynamic loss scale
        must be known before the next backward."""
        if self.device.type == "cpu" or not isinstance(self._scaler, NoScaler):
            return False
        # Not SGD: whether it can skip depends on momenta that only this rank may have, and all ranks must choose alike.
        return supports_found_inf(optimizer.optimizer) and not isinstance(optimizer.optimizer, torch.optim.SGD)

    def _endless(self) -> Iterator[Any]:
        if self.training_dataloader is None:
            raise ConfigError("train_batch() without data_iter needs `training_data` in shardwise.initialize.")
        if self._data is None:
            self._data = repeat(self.training_dataloader)
        return self._data

    def _check_loss(self, loss: torch.Tensor) -> None:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ShardingError(f"engine.backward expects a scalar loss, got {shape}; reduce it, e.g. loss.mean().")
        if not loss.requires_grad:
            raise ShardingError(
                "engine.backward got a loss without a graph: was it computed under no_grad, or detached?"
            )
