"""`Accelerator`: write the loop once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.accelerator.base import dynamo, given_plugins, refuse_later
from shardwise.accelerator.checkpoints import Checkpoints
from shardwise.accelerator.loaders import skip_first_batches
from shardwise.accelerator.preparing import Preparing
from shardwise.accelerator.records import Records
from shardwise.accelerator.settings import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from shardwise.accelerator.training import Training
from shardwise.errors import ConfigError, NotYetSupported


class Accelerator(Preparing, Training, Checkpoints, Records):
    """Runs a plain training loop on one process or many, with or without a ds_config.

    ::

        accelerator = Accelerator()
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

    Without a ds_config each process holds the whole model (ZeRO stage 0), and ``param.grad`` is the script's to read
    and edit. With one (``deepspeed_plugin``) the model becomes an :class:`~shardwise.Engine` of that stage.

    Args:
        device_placement: move models and batches to the device.
        split_batches: as in :class:`DataLoaderConfiguration`.
        mixed_precision: "no", "fp16" or "bf16"; default: ``ACCELERATE_MIXED_PRECISION``, or the ds_config's.
        gradient_accumulation_steps: micro-batches of a window; default: ``ACCELERATE_GRADIENT_ACCUMULATION_STEPS``,
            or 1.
        cpu: compute on the CPU.
        dataloader_config: how loaders read.
        deepspeed_plugin: a ds_config, or several by name.
        fsdp_plugin: refused: a ZeRO stage does the same.
        torch_tp_plugin: has not landed.
        megatron_lm_plugin: has not landed.
        rng_types: whose states all processes take over from the first when a loader starts: "torch", "cuda",
            "generator".
        log_with: trackers by name or as objects, or "all".
        project_dir: folder of checkpoints and logs.
        project_config: more about it.
        gradient_accumulation_plugin: more about windows.
        step_scheduler_with_optimizer: False: schedules advance at each call.
        kwargs_handlers: arguments of torch's parts, one of each class.
        dynamo_backend: of ``torch.compile``.
        dynamo_plugin: more about it.
        deepspeed_plugins: another name of ``deepspeed_plugin``.
        parallelism_config: has not landed.
        step_scheduler: "accelerate": schedules advance once for each process with an update, as upstream's do;
            "update": once.
        gradient_normalization: "micro_steps": each loss is divided by the micro-batches that a window should have;
            "window": by those that it had, so that a short last one counts rightly; "tokens": by the target tokens of
            the window on all processes (``backward(loss, tokens=n)``).
        outputs_in_fp32: what a prepared model returns under mixed precision is converted, as upstream does.

    Raises:
        ConfigError: an argument, or a variable of the launcher, that is wrong.
        NotYetSupported: one whose capability has not landed.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: Any = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[Any] | None = None,
        log_with: Any = None,
        project_dir: str | Path | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        *,
        step_scheduler: str = "accelerate",
        gradient_normalization: str = "micro_steps",
        outputs_in_fp32: bool = True,
    ) -> None:
        refuse_later(
            fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            parallelism_config=parallelism_config,
        )
        super().__init__(
            device_placement=device_placement,
            split_batches=split_batches,
            mixed_precision=mixed_precision,
            gradient_accumulation_steps=gradient_accumulation_steps,
            cpu=cpu,
            dataloader_config=dataloader_config,
            plugins=given_plugins(deepspeed_plugin, deepspeed_plugins),
            rng_types=rng_types,
            log_with=log_with,
            project_dir=project_dir,
            project_config=project_config,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            kwargs_handlers=kwargs_handlers,
            dynamo_plugin=dynamo(dynamo_backend, dynamo_plugin),
            step_scheduler=step_scheduler,
            gradient_normalization=gradient_normalization,
            outputs_in_fp32=outputs_in_fp32,
        )

    # -- what scripts read --

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is that of all processes together."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the first process reads for all; None: only iterable datasets."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether the last round is filled."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether loaders shuffle from a seed and the epoch."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device without waiting."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders are torchdata's stateful ones."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def scaler(self) -> Any:
        """torch's scaler of fp16 losses in a plain run; None without."""
        return None if self._scales is None else self._scales.of(self.gradient_state.window).scaler

    @property
    def native_amp(self) -> bool:
        """Whether forwards run under autocast."""
        return self.low_dtype is not None and self.deepspeed_plugin is None

    @property
    def step(self) -> int:
        """Micro-batches of the present window."""
        return self.gradient_state.step

    @property
    def deepspeed_engine_wrapped(self) -> Any:
        """The engine that was made last; None without."""
        return self._engines[-1] if self._engines else None

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes what is written once."""
        return self._writes

    @property
    def is_fsdp2(self) -> bool:
        """False: a ZeRO stage does what FSDP does."""
        return False

    @property
    def fp8_backend(self) -> None:
        """None: fp8 has not landed."""
        return None

    @property
    def parallelism_config(self) -> None:
        """None: parallelism other than ZeRO has not landed."""
        return None

    @property
    def torch_device_mesh(self) -> None:
        """None: there is one axis."""
        return None

    @property
    def tensor_parallel_rank(self) -> int:
        """0: tensors are not split."""
        return 0

    @property
    def data_parallel_rank(self) -> int:
        """This process among all."""
        return self.process_index

    @property
    def data_parallel_shard_rank(self) -> int:
        """This process among those that share a model."""
        return self.process_index if self.deepspeed_plugin is not None else 0

    @property
    def pipeline_parallel_rank(self) -> int:
        """Has not landed."""
        raise NotYetSupported("Pipeline parallelism is currently not supported.")

    @property
    def context_parallel_rank(self) -> int:
        """Has not landed."""
        raise NotYetSupported("Context parallelism is currently not supported.")

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader of the rest of this epoch."""
        return skip_first_batches(dataloader, num_batches)

    def maybe_context_parallel(self, *_: Any, **__: Any) -> Any:
        """Has not landed."""
        raise NotYetSupported("maybe_context_parallel: context parallelism has not landed.")

    def lomo_backward(self, *_: Any, **__: Any) -> Any:
        """Refused."""
        raise ConfigError("lomo_backward: LOMO optimizers are not supported; ZeRO stage 3 saves what they save.")

    def __deepcopy__(self, memo: Any) -> Accelerator:
        """Itself: a process has one place among the others."""
        return self

    def __repr__(self) -> str:
        return f"Accelerator({self.distributed_type.value}, {self.num_processes} processes, {self.mixed_precision})"
