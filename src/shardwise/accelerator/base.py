"""What an `Accelerator` is made of: the parts that its methods share."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardwise import handed_on
from shardwise.accelerator.current import set_current_accelerator, set_current_processes
from shardwise.accelerator.deepspeed import DeepSpeedPlugin, precision_with
from shardwise.accelerator.loss_scale import LossScales
from shardwise.accelerator.once import Once
from shardwise.accelerator.plain import DTYPES
from shardwise.accelerator.process import Processes
from shardwise.accelerator.scheduler import check_kind
from shardwise.accelerator.settings import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    sort_handlers,
)
from shardwise.accelerator.state import State
from shardwise.accelerator.trackers.tracking import Tracking
from shardwise.accelerator.weighting import KINDS, Weighting
from shardwise.accelerator.windows import GradientState
from shardwise.dist import Axis, Mesh
from shardwise.errors import ConfigError, NotYetSupported
from shardwise.handed_on import PRECISIONS
from shardwise.messages import show_messages
from shardwise.sharding.turns import Turns

OPEN = (
    "a loop over a loader ended inside of an accumulation window, whose gradients are not stepped yet: its last batch "
    "was cut in fewer micro-batches than the one before. They count in the next window."
)
LATER = {
    "fsdp_plugin": "choose a ZeRO stage instead: deepspeed_plugin=DeepSpeedPlugin(zero_stage=3) shards as FSDP does",
    "torch_tp_plugin": "tensor parallelism has not landed",
    "megatron_lm_plugin": "tensor and pipeline parallelism have not landed",
    "parallelism_config": "parallelism other than ZeRO has not landed",
}


class Base:
    """Holds the parts; no behaviour of its own."""

    def __init__(
        self,
        *,
        device_placement: bool,
        split_batches: bool | None,
        mixed_precision: str | None,
        gradient_accumulation_steps: int | None,
        cpu: bool,
        dataloader_config: DataLoaderConfiguration | None,
        plugins: Mapping[str, DeepSpeedPlugin],
        rng_types: Sequence[Any] | None,
        log_with: Any,
        project_dir: str | Path | None,
        project_config: ProjectConfiguration | None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None,
        step_scheduler_with_optimizer: bool,
        kwargs_handlers: Sequence[Any] | None,
        dynamo_plugin: TorchDynamoPlugin,
        step_scheduler: str,
        gradient_normalization: str,
        outputs_in_fp32: bool,
    ) -> None:
        show_messages()
        self.handlers = sort_handlers(kwargs_handlers)
        group = self.handlers.get(InitProcessGroupKwargs, InitProcessGroupKwargs())
        precision = _precision(mixed_precision)
        if plugins:
            first = next(iter(plugins.values()))
            precision = precision_with(first.deepspeed_config, precision)
            for plugin in list(plugins.values())[1:]:
                precision_with(plugin.deepspeed_config, precision)
        accumulation = _accumulation(gradient_accumulation_steps, gradient_accumulation_plugin)
        loading = _loading(dataloader_config, split_batches)
        self._step_scheduler = check_kind(step_scheduler)
        if gradient_normalization not in KINDS:
            raise ConfigError(
                f"gradient_normalization: expected one of {', '.join(KINDS)}, got {gradient_normalization!r}."
            )
        # Nothing was changed so far; from here on this process is among the others.
        self.processes = Processes(cpu, backend=group.backend, timeout=group.timeout)
        self.device_placement = device_placement
        self.dataloader_config = loading
        self.project_configuration = project_config or ProjectConfiguration(project_dir=project_dir)
        if project_dir is not None and self.project_configuration.project_dir is None:
            self.project_configuration.set_directories(project_dir)
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = list(rng_types) if rng_types is not None else ["generator"]
        self.gradient_normalization = gradient_normalization
        self.gradient_state = GradientState(accumulation.num_steps or 1, accumulation.sync_with_dataloader)
        self._state = State(self.processes, precision or "no", plugins, dynamo_plugin)
        self._accumulation = accumulation
        self._outputs_in_fp32 = outputs_in_fp32
        self._once = Once(self.processes.is_main_process)
        self.gradient_state.on_open_window = functools.partial(self._once.warn, OPEN)
        self._scales: LossScales | None = None
        if not plugins and precision == "fp16":
            options = self.handlers.get(GradScalerKwargs, GradScalerKwargs())
            self._scales = LossScales(self.device.type, vars(options))
        self._weighting: Weighting | None = None
        if not plugins and gradient_normalization != "micro_steps":
            self._weighting = Weighting(gradient_normalization, self.processes.axis, self.processes.wire_device())
        self._tracking = Tracking(log_with, self.logging_dir, self.processes)
        self._models: list[Any] = []
        self._optimizers: list[Any] = []
        self._schedulers: list[Any] = []
        self._dataloaders: list[Any] = []
        self._custom_objects: list[Any] = []
        self._plain: dict[int, Any] = {}
        self._engines: list[Any] = []  # those that are trained
        self._evaluated: list[Any] = []
        self._next_tag = 0
        self._mesh: Mesh | None = None
        self._turns = Turns()
        self._trigger = False
        self._unchecked = True
        set_current_processes(self.processes)
        set_current_accelerator(self)

    @property
    def gradient_axis(self) -> Axis:
        """All processes, for the gradients of plain runs: a group of their own, so that two Accelerators, or what a
        script sends itself, cannot mix with them. All processes must ask for it alike."""
        if self._mesh is None:
            self._mesh = Mesh.build(timeout=self.processes.axis.timeout)
        return self._mesh.world

    @property
    def state(self) -> State:
        """The processes, the precision and the plugins, as scripts read them."""
        return self._state

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.processes.device

    @property
    def mixed_precision(self) -> str:
        """ "no", "bf16" or "fp16"."""
        return self._state.mixed_precision

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The plugin in use; None in a plain run."""
        return self._state.deepspeed_plugin

    @property
    def logging_dir(self) -> str | Path | None:
        """Folder of the trackers."""
        return self.project_configuration.logging_dir

    @property
    def low_dtype(self) -> torch.dtype | None:
        """Of autocast in a plain run; None without."""
        return DTYPES.get(self.mixed_precision)


def given_plugins(deepspeed_plugin: Any, deepspeed_plugins: Any) -> dict[str, DeepSpeedPlugin]:
    """The plugins by name, from the arguments or the launcher's variables.

    Raises:
        ConfigError: given twice, or something else.
    """
    if deepspeed_plugin is not None and deepspeed_plugins is not None:
        raise ConfigError("deepspeed_plugin and deepspeed_plugins are one argument; give one of them.")
    given = deepspeed_plugin if deepspeed_plugin is not None else deepspeed_plugins
    if given is None:
        return {"default": DeepSpeedPlugin()} if handed_on.read(os.environ).get("use_deepspeed") else {}
    found = dict(given) if isinstance(given, Mapping) else {"default": given}
    for name, plugin in found.items():
        if not isinstance(plugin, DeepSpeedPlugin):
            raise ConfigError(
                f"deepspeed_plugin: expected a DeepSpeedPlugin, or a dict of them, got {type(plugin).__name__} "
                f"({name!r}). A ds_config goes into it: DeepSpeedPlugin(hf_ds_config='ds_config.json')."
            )
    if not found:
        raise ConfigError("deepspeed_plugins: the dict is empty.")
    return found


def refuse_later(**given: Any) -> None:
    """Refuse arguments whose capability has not landed.

    Raises:
        NotYetSupported: one was given.
    """
    for name, value in given.items():
        if value is not None:
            raise NotYetSupported(f"Accelerator({name}=): {LATER[name]}.")


def dynamo(backend: Any, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """How models are compiled.

    Raises:
        ConfigError: given twice.
    """
    if backend is not None and plugin is not None:
        raise ConfigError("dynamo_backend and dynamo_plugin: give one of them.")
    if plugin is not None:
        return plugin
    name = str(getattr(backend, "value", backend) or handed_on.read(os.environ).get("dynamo_backend", "no"))
    return TorchDynamoPlugin(backend=name.lower())


def _precision(given: Any) -> str | None:
    value = getattr(given, "value", given)
    if value is None:
        value = handed_on.read(os.environ).get("mixed_precision")
    if value is None:
        return None
    value = str(value).lower()
    if value == "fp8":
        raise NotYetSupported("mixed_precision: 'fp8' has not landed; 'bf16' is the next best.")
    if value not in PRECISIONS:
        raise ConfigError(f"mixed_precision: expected one of {', '.join(PRECISIONS)}, got {value!r}.")
    return value


def _accumulation(steps: int | None, plugin: GradientAccumulationPlugin | None) -> GradientAccumulationPlugin:
    if plugin is not None and plugin.num_steps is not None:
        if steps is not None and steps != 1:
            raise ConfigError("gradient_accumulation_steps and gradient_accumulation_plugin.num_steps: give one.")
        steps = plugin.num_steps
    if steps is None:
        told = handed_on.read(os.environ).get("gradient_accumulation_steps")
        steps = told if isinstance(told, int) else 1
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"gradient_accumulation_steps: expected a whole number of 1 or more, got {steps!r}.")
    base = plugin or GradientAccumulationPlugin()
    return GradientAccumulationPlugin(steps, base.adjust_scheduler, base.sync_with_dataloader, base.sync_each_batch)


def _loading(given: DataLoaderConfiguration | None, split_batches: bool | None) -> DataLoaderConfiguration:
    if given is not None and not isinstance(given, DataLoaderConfiguration):
        raise ConfigError(f"dataloader_config: expected a DataLoaderConfiguration, got {type(given).__name__}.")
    if split_batches is not None and given is not None and given.split_batches != split_batches:
        raise ConfigError("split_batches contradicts dataloader_config.split_batches; give one of them.")
    found = DataLoaderConfiguration(**vars(given)) if given is not None else DataLoaderConfiguration()
    if split_batches is not None:
        found.split_batches = split_batches
    return found
