"""The engine: forward, backward and step of a sharded model."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from . import _torch
from .config import Config
from .dist import Mesh
from .errors import CommError, ConfigError, ShardingError
from .meter import Meter, logger
from .optim import supports_found_inf
from .optim.sharded import ShardedOptimizer
from .outcome import StepOutcome, clip_factor
from .precision import NoScaler, autocast_context, build_scaler
from .sharding import ShardedModel, model_state_bytes
from .sharding.access import pinned
from .sharding.agreement import agree
from .sharding.gradient import LOW_PRECISION


class Engine(nn.Module):
    """Trains a model by the loop ``loss = engine(batch); engine.backward(loss); engine.step()``.

    Made by :func:`shardwise.initialize`. Call the three on every micro-batch; ``step`` acts on the last one of an
    accumulation window (the boundary). Unknown attributes are looked up on the wrapped model.

    Attributes:
        module: the user's model.
        config: the configuration.
        optimizer, lr_scheduler, training_dataloader: what ``initialize`` returned.
        global_steps: boundaries passed, skipped ones included.
        global_samples: samples seen over all ranks.
        micro_steps: micro-batches seen on this rank.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        mesh: Mesh,
        sharded: ShardedModel,
        optimizer: ShardedOptimizer | None,
        lr_scheduler: LRScheduler | None,
        dataloader: DataLoader[Any] | None,
    ) -> None:
        super().__init__()
        self.module = model
        self.config = config
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.training_dataloader = dataloader
        self.mesh = mesh
        self.global_steps = 0
        self.global_samples = 0
        self.micro_steps = 0
        self._sharded = sharded
        self._scaler = build_scaler(config.fp16)
        self._gas = config.gradient_accumulation_steps
        self._micro_batch = config.train_micro_batch_size_per_gpu
        self._skipped = 0
        self._boundary: bool | None = None
        self._tokens = 0.0
        self._losses: list[torch.Tensor] = []
        self._outcome: StepOutcome | None = None
        self._unsettled = False
        total = config.scheduler.params.get("total_num_steps") if config.scheduler is not None else None
        self._meter = Meter(sharded.device, config.wall_clock_breakdown, total)
        self._foreign = self._watch_foreign_optimizers()

    # ------------------------------------------------------------------ the loop

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; under ``torch_autocast`` if the configuration says so."""
        if self.config.fp16.auto_cast:
            args, kwargs = _cast(args, torch.float16), _cast(kwargs, torch.float16)
        with self._meter.part("forward"), autocast_context(self.config, self.device.type):
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
        reducer.boundary = self.is_gradient_accumulation_boundary()
        with self._meter.part("backward"):
            reducer.begin(ends_itself=False)
            try:
                self._scaled(loss, weight).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            except Exception:
                # The user's error is the one to see; that other ranks are gone as well is a consequence.
                with contextlib.suppress(CommError):
                    self._sharded.abort()
                raise
            reducer.end()
        return loss.detach() / self._gas if scale_wrt_gas and not by_tokens else loss.detach()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as :meth:`backward` would differentiate it, for a script that calls ``.backward()`` itself."""
        self._sharded.reducer.boundary = self.is_gradient_accumulation_boundary()
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
            raise ConfigError("optimizer: absent, and none was given to shardwise.initialize; there is nothing to step.")
        with self._meter.part("step"):
            self.settle()
            self._sharded.reducer.finish()
            self._outcome = self._take_step(self.optimizer)
            self._unsettled = True
            self._lr_kwargs = dict(lr_kwargs or {})
            self.micro_steps += 1
            self.global_steps += 1
            self.global_samples += self.train_batch_size()
            if not self._outcome.deferred:
                self.settle()
        self._meter.count(self.train_batch_size(), self._tokens * self.mesh.world.size)
        self._tokens = 0.0
        self._log()
        self._losses.clear()

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Take a whole window from ``data_iter``: forward, backward and step on each of its micro-batches.

        Args:
            data_iter: gives micro-batches: dicts become keyword arguments of the model, tuples and lists positional
                ones. Default: the loader made from ``training_data``, started anew when it ends.

        Returns:
            The mean loss of the window over all ranks (0-d, float32).

        Raises:
            ConfigError: with ``"gradient_normalization": "tokens"``; call :meth:`backward` with ``tokens`` yourself.
        """
        iterator = data_iter if data_iter is not None else self._endless()
        losses = []
        for _ in range(self._gas):
            loss = _loss_of(_call(self, next(iterator)))
            losses.append(loss.detach())
            self.backward(loss)
            self.step()
        mean = torch.stack(losses).float().mean().reshape(1)
        self.mesh.world.sum_small(mean, "mean loss")
        return mean[0] / self.mesh.world.size

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the window."""
        self._sharded.reducer.discard()

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
        return (self.micro_steps + 1) % self._gas == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Let the script decide where windows end, from now on."""
        self._boundary = is_boundary

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's ``generate`` with all parameters whole, so that each rank may stop at a length of its own.

        All ranks must call this. At stage 3 it needs memory for the whole model.
        """
        with pinned(self._sharded.units):
            return self.module.generate(*args, **kwargs)  # type: ignore[operator]

    # ------------------------------------------------------------------ what happened

    def settle(self) -> None:
        """Learn how the last step went, if that was left open so as not to wait for the device."""
        if not self._unsettled or self._outcome is None:
            return
        self._unsettled = False
        applied = self._outcome.applied
        if self.optimizer is not None:
            self.optimizer.overflow = not applied
        if applied:
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**self._lr_kwargs)
        else:
            self._skipped += 1
            if self.global_rank == 0:
                logger.warning(
                    "step %d skipped: the gradient is not finite (norm %s, loss scale %g); %d skipped so far",
                    self.global_steps,
                    f"{float(self._outcome.norm):g}",
                    self._scaler.scale,
                    self._skipped,
                )
        self._scaler.update(not applied)

    @property
    def skipped_steps(self) -> int:
        """Boundaries at which the gradient was not finite."""
        self.settle()
        return self._skipped

    @property
    def loss_scale(self) -> float:
        """What fp16 losses are multiplied with now; 1 without fp16."""
        self.settle()
        return self._scaler.scale

    @property
    def grad_norm_before_clip(self) -> float | None:
        """Norm of the last window's gradient (mean over the global batch) before clipping; None before any step."""
        return None if self._outcome is None else float(self._outcome.norm)

    @property
    def grad_norm_after_clip(self) -> float | None:
        """The same after clipping: what the optimizer saw."""
        return None if self._outcome is None else float(self._outcome.clipped_norm)

    def get_global_grad_norm(self) -> float | None:
        """The norm before clipping, as upstream reports it."""
        return self.grad_norm_before_clip

    def was_step_applied(self) -> bool:
        """Whether the last boundary changed the parameters."""
        self.settle()
        return self._outcome is not None and self._outcome.applied

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        self.settle()
        return [] if self.optimizer is None else [float(g["lr"]) for g in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Momentum, or the betas, of each parameter group."""
        if self.optimizer is None:
            return []
        return [g.get("betas", g.get("momentum")) for g in self.optimizer.param_groups]

    def get_type(self) -> list[str]:
        """Class name of the optimizer, for each parameter group."""
        if self.optimizer is None:
            return []
        return [type(self.optimizer.optimizer).__name__ for _ in self.optimizer.param_groups]

    def memory_report(self) -> dict[str, int]:
        """Bytes of model state on this rank, counted, by kind; ``formula`` is what ZeRO's formula gives."""
        sharded = self._sharded
        params = sum(slot.numel for u in sharded.units for slot in u.slots)
        widest = max((u.dtype for u in sharded.units), key=lambda d: d.itemsize, default=torch.float32)
        counted = {
            "parameters": sum(u.nbytes for u in sharded.units),
            "gradients": sum(g.nbytes for g in sharded.grads),
            "optimizer": 0 if self.optimizer is None else self.optimizer.state_bytes(),
        }
        formula = model_state_bytes(
            params,
            self.mesh.shard.size,
            sharded.policy.stage,
            param_bytes=widest.itemsize,
            mixed=widest in LOW_PRECISION,
        )
        return {**counted, "total": sum(counted.values()), "formula": formula}

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The model's whole state, copied. All ranks must call this."""
        frozen = {n for n, p in self.module.named_parameters() if not p.requires_grad}
        state = self.module.state_dict()
        return {k: v.clone() for k, v in state.items() if not (exclude_frozen_parameters and k in frozen)}

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load a whole model's state. All ranks must call this with the same values."""
        self.module.load_state_dict(state_dict, strict=strict)

    # ------------------------------------------------------------------ what it is

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._sharded.device

    @property
    def global_rank(self) -> int:
        """This process among all."""
        return self.mesh.world.position

    @property
    def local_rank(self) -> int:
        """This process on its machine."""
        return self.device.index if self.device.index is not None else _local_rank(self.global_rank)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.mesh.world.size

    @property
    def dp_world_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.mesh.world.size

    @property
    def mp_world_size(self) -> int:
        """Number of model-parallel ranks: 1."""
        return 1

    def train_batch_size(self) -> int:
        """Samples per step over all ranks."""
        return self._micro_batch * self._gas * self.mesh.world.size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per micro-step of one rank."""
        return self._micro_batch

    def gradient_accumulation_steps(self) -> int:
        """Micro-steps of a window."""
        return self._gas

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples per step, samples per micro-step, micro-steps per step."""
        return self.train_batch_size(), self._micro_batch, self._gas

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-steps so that a step takes this many samples.

        Raises:
            ConfigError: it is not a multiple of the samples that all ranks take in one micro-step.
        """
        once = self._micro_batch * self.mesh.world.size
        if train_batch_size <= 0 or train_batch_size % once:
            raise ConfigError(f"train_batch_size: {train_batch_size} is not a positive multiple of {once} (micro x ranks).")
        self._gas = train_batch_size // once

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Tell the engine that the script's micro-batches now have this many samples."""
        if micro_batch_size <= 0:
            raise ConfigError(f"train_micro_batch_size_per_gpu: {micro_batch_size} is not positive.")
        self._micro_batch = micro_batch_size

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self._sharded.policy.stage

    def gradient_clipping(self) -> float:
        """The largest norm; 0 when gradients are not clipped."""
        return self.config.gradient_clipping

    def empty_partition_cache(self) -> None:
        """Release gathered parameters and free communication buffers."""
        if self._sharded.gatherer is not None:
            self._sharded.gatherer.release_all()
        for axis in self.mesh.axes():
            axis.pool.clear()

    def destroy(self) -> None:
        """Undo ``initialize``: the model is an ordinary whole one again, groups are closed. All ranks must call this."""
        if self._sharded.closed:
            return
        self.settle()
        self._foreign.remove()
        self._sharded.close()
        self.mesh.close()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    # ------------------------------------------------------------------ inside

    def _scaled(self, loss: torch.Tensor, weight: float) -> torch.Tensor:
        factor = weight * self._scaler.scale
        if loss.dtype in LOW_PRECISION:
            loss = loss.float()  # a scaled fp16 loss would overflow itself
        return loss if factor == 1.0 else loss * factor

    def _take_step(self, optimizer: ShardedOptimizer) -> StepOutcome:
        agreement = agree(self._sharded, self._tokens)
        inverse = torch.full_like(agreement.squares, 1.0 / self._scaler.scale)
        if self.config.gradient_normalization == "tokens":
            # Collected as sums over tokens, averaged over the ranks: this makes it the mean over all tokens.
            inverse = inverse * self.mesh.world.size / agreement.tokens.clamp(min=1)
        norm = agreement.squares.sqrt() * inverse
        factor = clip_factor(norm, self.config.gradient_clipping)
        scale = inverse * factor
        outcome = StepOutcome(norm, norm * factor, torch.isfinite(agreement.squares))
        checks = self.config.bf16.check_grad_overflow or not self.config.bf16.enabled
        if not checks:
            outcome.finite = torch.ones_like(outcome.finite)
        defer = self._may_defer(optimizer)
        if defer:
            outcome.deferred = True
            found_inf = (~outcome.finite).float().reshape(1) if checks else None
            optimizer.step(agreement=agreement, scale=scale, found_inf=found_inf)
        elif outcome.applied:
            plain = not _torch.is_fake(scale) and float(scale) == 1.0
            optimizer.step(agreement=agreement, scale=None if plain else scale)
        optimizer.zero_grad()
        return outcome

    def _may_defer(self, optimizer: ShardedOptimizer) -> bool:
        """Whether the step can be decided on the device. On a CPU there is nothing to wait for; a dynamic loss scale
        must be known before the next backward."""
        if self.device.type == "cpu" or not isinstance(self._scaler, NoScaler):
            return False
        return supports_found_inf(optimizer.optimizer)

    def _log(self) -> None:
        every = self.config.steps_per_print
        if every is None or self.global_steps % every:
            return
        self.settle()
        mean = torch.stack([loss.float() for loss in self._losses]).mean().reshape(1) if self._losses else None
        if mean is not None:
            self.mesh.world.sum_small(mean, "mean loss")
        if self.global_rank or self._outcome is None or _torch.is_fake(self._outcome.norm):
            return
        values = {"loss": f"{float(mean) / self.world_size:.4f}"} if mean is not None else {}
        values["norm"] = f"{float(self._outcome.norm):.3f}"
        values["lr"] = ", ".join(f"{lr:.3g}" for lr in dict.fromkeys(self.get_lr()))
        if self.config.fp16.enabled:
            values["loss scale"] = f"{self._scaler.scale:g}"
        if self._skipped:
            values["skipped"] = str(self._skipped)
        logger.info(self._meter.line(self.global_steps, values))

    def _endless(self) -> Iterator[Any]:
        if self.training_dataloader is None:
            raise ConfigError("train_batch() without data_iter needs `training_data` in shardwise.initialize.")
        if not hasattr(self, "_data"):
            self._data = _repeat(self.training_dataloader)
        return self._data

    def _check_loss(self, loss: torch.Tensor) -> None:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ShardingError(f"engine.backward expects a scalar loss, got {shape}; reduce it, e.g. loss.mean().")
        if not loss.requires_grad:
            raise ShardingError("engine.backward got a loss without a graph: was it computed under no_grad, or detached?")

    def _watch_foreign_optimizers(self) -> Any:
        """A second optimizer over the same parameters would step nothing, silently: their gradients are ours."""
        engine = weakref.ref(self)

        def check(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            alive = engine()
            if alive is None or (alive.optimizer is not None and optimizer is alive.optimizer.optimizer):
                return
            names = alive._sharded.managed
            held = [names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in names]
            if held:
                raise ShardingError(
                    f"{type(optimizer).__name__} holds {held[0]} (and {len(held) - 1} more), which a shardwise engine "
                    "manages: it would see no gradients. Step through the engine, or destroy() it first."
                )

        handle = register_optimizer_step_pre_hook(check)
        weakref.finalize(self, handle.remove)
        return handle


def _call(engine: Engine, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return engine(**batch)
    return engine(*batch) if isinstance(batch, tuple | list) else engine(batch)


def _loss_of(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None and isinstance(output, tuple | list) and output:
        found = output[0]
    if not isinstance(found, torch.Tensor):
        raise ShardingError(
            f"train_batch needs a model that returns its loss (a tensor, `.loss`, or first in a tuple); got "
            f"{type(output).__name__}."
        )
    return found


def _repeat(loader: DataLoader[Any]) -> Iterator[Any]:
    epoch = 0
    while True:
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {k: _cast(v, dtype) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_cast(v, dtype) for v in value)
    return value


def _local_rank(default: int) -> int:
    import os

    return int(os.environ.get("LOCAL_RANK", default))
