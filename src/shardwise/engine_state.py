"""What an engine is and knows: sizes, counters, norms, memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from shardwise.dist import Mesh
from shardwise.engine_blocks import BlockMethods
from shardwise.engine_later import LaterMethods
from shardwise.errors import ConfigError
from shardwise.journal import Journal
from shardwise.messages import logger
from shardwise.monitor.comms import summary_of
from shardwise.optim.foreign import refuse_foreign_steps
from shardwise.optim.sharded import ShardedOptimizer
from shardwise.outcome import StepOutcome
from shardwise.precision import LossScaler
from shardwise.sharding import ShardedModel, model_state_bytes
from shardwise.sharding.agreement import Agreement
from shardwise.sharding.gradient import LOW_PRECISION

if TYPE_CHECKING:
    from shardwise.config import Config


class EngineState(BlockMethods, LaterMethods, nn.Module):
    """The part of :class:`~shardwise.Engine` beside the loop: counters, how the last step went, sizes, memory.

    Attributes:
        module: the user's model.
        config: the configuration.
        optimizer, lr_scheduler, training_dataloader: what ``initialize`` returned.
        global_steps: boundaries passed, skipped ones included.
        global_samples: samples seen over all ranks.
        micro_steps: micro-batches seen on this rank.
        monitor: takes values of the script's own for the trackers: ``write_events([(name, value, samples)])``.
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
        scaler: LossScaler,
        undo: contextlib.ExitStack,
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
        self._scaler = scaler
        self._gas = config.gradient_accumulation_steps
        self._managed = config.managed_gradient_accumulation
        self._micro_batch = config.train_micro_batch_size_per_gpu
        self._skipped = 0
        self._window_start = 0
        self._boundary: bool | None = None
        self._data: Iterator[Any] | None = None
        self._tokens = 0.0
        self._gradient_bytes = 0
        self._losses: list[torch.Tensor] = []
        self._agreement: Agreement | None = None
        self._clip_once: float | None = None
        self._outcome: StepOutcome | None = None
        self._unsettled = False
        self._when_settled: list[Callable[[bool], object]] = []
        self._journal = Journal(config, mesh, sharded, optimizer)
        self.monitor = self._journal.recorder
        if optimizer is not None:
            optimizer.scaler = scaler
        self._undo = undo  # puts back what was changed in the user's model
        self._foreign = refuse_foreign_steps(self, optimizer, sharded.managed)
        self._prepare_blocks()

    def _begin(self) -> None:
        """The end of ``initialize``: begin to record. All ranks must call this."""
        try:
            self._journal.start(self)
        except Exception:
            self.destroy()
            raise

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
            if self._sharded.gatherer is not None:
                # The cause may be a parameter that was read while it was released: it would be NaN every time.
                self._sharded.gatherer.look_for_strays()
            if self.global_rank == 0:
                where = ", ".join(self._outcome.bad_units[:3]) or "unknown, the step was decided on the device"
                logger.warning(
                    "step %d skipped on all ranks: the gradient is not finite (norm %g, loss scale %g; in %s); "
                    "%d skipped so far",
                    self.global_steps,
                    float(self._outcome.norm),
                    self._scaler.scale,
                    where,
                    self._skipped,
                )
        self._scaler.update(not applied)
        waiting, self._when_settled = self._when_settled, []
        for call in waiting:
            call(applied)
        self._journal.settled(self)

    def when_settled(self, call: Callable[[bool], object]) -> None:
        """Call this with whether the last step was applied, as soon as that is known: at once, except on a GPU."""
        if self._unsettled:
            self._when_settled.append(call)
        else:
            call(self._outcome is None or self._outcome.applied)

    @property
    def stepped(self) -> bool:
        """Whether there was a step since the engine was made (or its state was loaded)."""
        return self._outcome is not None

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
        """Bytes of model state on this rank, counted.

        Returns:
            ``parameters`` and ``optimizer`` at rest; ``gradients`` as held between backward and step (now, or in the
            last step); their ``total``; and ``formula``, what the ZeRO formula gives for Adam and one micro-step.
        """
        sharded = self._sharded
        params = sum(slot.numel for u in sharded.units for slot in u.slots)
        widest = max((u.dtype for u in sharded.units), key=lambda d: d.itemsize, default=torch.float32)
        counted = {
            "parameters": sum(u.nbytes for u in sharded.units),
            "gradients": sum(g.nbytes for g in sharded.grads) or self._gradient_bytes,
            "optimizer": 0 if self.optimizer is None else self.optimizer.state_bytes(),
        }
        formula = model_state_bytes(
            params,
            self.mesh.shard.size,
            sharded.policy.stage,
            param_bytes=widest.itemsize,
            mixed=widest in LOW_PRECISION and sharded.masters,
        )
        return {**counted, "total": sum(counted.values()), "formula": formula}

    def log_comm_summary(self) -> dict[str, dict[str, dict[str, float]]]:
        """What communication has cost this rank so far (``comms_logger``), printed on rank 0.

        Returns:
            By axis and collective: ``calls``, ``bytes_sent``, ``seconds_in_flight`` and ``seconds_waiting``.
        """
        return summary_of(self._journal.comms)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The model's whole state, copied. All ranks must call this."""
        frozen = {n for n, p in self.module.named_parameters() if not p.requires_grad}
        state = self.module.state_dict()
        return {k: v.clone() for k, v in state.items() if not (exclude_frozen_parameters and k in frozen)}

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        # Accelerate asks for the weights under these two private names of upstream's.
        return self.module_state_dict(exclude_frozen_parameters)

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """What the configuration says; weights are always gathered when they are asked for."""
        return self.config.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load a whole model's state. All ranks must call this with the same values."""
        self.module.load_state_dict(state_dict, strict=strict)

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
        return (
            self.device.index if self.device.index is not None else int(os.environ.get("LOCAL_RANK", self.global_rank))
        )

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
            raise ConfigError(
                f"train_batch_size: {train_batch_size} is not a positive multiple of {once} (micro x ranks)."
            )
        self._gas = train_batch_size // once
        if self._gas > 1:
            for grad in self._sharded.grads:
                grad.accumulate_wide()

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
        """Undo ``initialize``: the model is whole and ordinary again, groups are closed. All ranks must call this."""
        if self._sharded.closed:
            return
        self.settle()
        self._journal.close()
        self._foreign.remove()
        self._undo.close()
        if self.optimizer is not None:
            self.optimizer.close()
        self._sharded.close()
        self.mesh.close()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)
