"""What an `Accelerator` is told beside its arguments: small dataclasses under the names that scripts know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import ConfigError, NotYetSupported


@dataclass
class DataLoaderConfiguration:
    """How prepared loaders read.

    Attributes:
        split_batches: a loader's batch size is that of all processes together.
        dispatch_batches: the first process reads and sends; None: only for iterable datasets.
        even_batches: fill the last round from the start of the epoch.
        use_seedable_sampler: shuffle from ``data_seed`` (or torch's seed) plus the epoch.
        data_seed: of the seedable sampler.
        non_blocking: copy batches to the device without waiting (with ``pin_memory``).
        use_stateful_dataloader: torchdata's StatefulDataLoader, which keeps the state of workers.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass
class GradientAccumulationPlugin:
    """How gradients are accumulated.

    Attributes:
        num_steps: micro-batches of a window; None: ``Accelerator(gradient_accumulation_steps=)``.
        adjust_scheduler: advance a schedule once for every micro-batch of a window, for one that was made for all of
            them. (Upstream has this on by default, without any effect.)
        sync_with_dataloader: the last batch of a loader ends a window.
        sync_each_batch: average over the processes in every backward: slower, and less memory where gradients are cut.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = False
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass
class ProjectConfiguration:
    """Where a run keeps its files.

    Attributes:
        project_dir: folder of checkpoints and logs.
        logging_dir: folder of the trackers; default: ``project_dir``.
        automatic_checkpoint_naming: ``save_state()`` counts: ``project_dir/checkpoints/checkpoint_0``, ...
        total_limit: how many of those are kept.
        iteration: number of the next one.
        save_on_each_node: files that are written once are written once on each machine.
    """

    project_dir: str | Path | None = None
    logging_dir: str | Path | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise ConfigError(f"ProjectConfiguration.total_limit: expected 1 or more, got {self.total_limit}.")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | Path | None = None) -> None:
        """Set the project's folder, and that of the logs if it has none of its own."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


@dataclass
class TorchDynamoPlugin:
    """``torch.compile`` of prepared models: its arguments, or none for a backend "no".

    ``use_regional_compilation`` compiles each block of a model's block list, which takes much less time than the whole.
    Sharded models are always compiled so.
    """

    backend: str = "no"
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    options: dict[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool = False

    @property
    def active(self) -> bool:
        """Whether anything is compiled."""
        return self.backend.lower() != "no" and not self.disable

    def kwargs(self) -> dict[str, Any]:
        """What ``torch.compile`` takes beside the backend."""
        given = {"mode": self.mode, "dynamic": self.dynamic, "options": self.options}
        return {"fullgraph": self.fullgraph, **{k: v for k, v in given.items() if v is not None}}


class KwargsHandler:
    """Base of what ``kwargs_handlers`` takes: one of each class."""


@dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments of ``torch.autocast``."""

    enabled: bool = True
    cache_enabled: bool | None = None


class DDPCommunicationHookType(str, Enum):
    """In which dtype gradients travel; low-rank hooks have not landed."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """How the gradients of plain runs are averaged. Parameters that some process did not use need no option.

    Attributes:
        dim: no effect; batches are not cut inside of the model.
        broadcast_buffers: the first process's buffers are taken over before each forward that trains.
        bucket_cap_mb: megabytes that travel together.
        find_unused_parameters: no effect: always seen.
        check_reduction: no effect.
        gradient_as_bucket_view: no effect: they always are.
        static_graph: no effect: the order is learnt from the first backward.
        comm_hook: "fp16" or "bf16": the dtype in which gradients travel.
        comm_wrapper: only "no".
        comm_state_option: only empty.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        hook, wrapper = (_value(v) for v in (self.comm_hook, self.comm_wrapper))
        if hook not in ("no", "fp16", "bf16") or wrapper != "no" or self.comm_state_option:
            raise NotYetSupported(
                f"DistributedDataParallelKwargs: comm_hook={hook!r} with comm_wrapper={wrapper!r} has not landed; "
                "gradients may travel as 'fp16' or 'bf16'."
            )

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """In which gradients travel; None for their own."""
        return {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16}[_value(self.comm_hook)]


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments of ``torch.amp.GradScaler``."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments of ``torch.distributed.init_process_group``.

    Attributes:
        backend: None: NCCL where there is a GPU for each process, else gloo.
        init_method: only None; a launcher's environment says where the processes meet.
        timeout: how long a collective waits; None: ten minutes.
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.init_method is not None:
            raise ConfigError(
                "InitProcessGroupKwargs.init_method: call torch.distributed.init_process_group yourself before the "
                "Accelerator, or start the script with `shardwise launch`."
            )


@dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments of ``torch.profiler.profile``; ``output_trace_dir`` gets a ``profile_{rank}.json`` of each process."""

    activities: Sequence[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self) -> torch.profiler.profile:
        """The profiler.

        Raises:
            ConfigError: an activity that torch does not have.
        """
        known = {a.name.lower(): a for a in torch.profiler.ProfilerActivity.__members__.values()}
        unknown = [a for a in self.activities or () if a not in known]
        if unknown:
            raise ConfigError(f"ProfileKwargs.activities: {unknown[0]!r} is none of {', '.join(sorted(known))}.")
        return torch.profiler.profile(
            activities=None if self.activities is None else [known[a] for a in self.activities],
            schedule=None if self.schedule_option is None else torch.profiler.schedule(**self.schedule_option),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


def sort_handlers(handlers: Sequence[Any] | None) -> dict[type, Any]:
    """The handlers by class.

    Raises:
        ConfigError: something else, or two of one class.
    """
    found: dict[type, Any] = {}
    for handler in handlers or ():
        if not isinstance(handler, KwargsHandler):
            kinds = ", ".join(c.__name__ for c in KwargsHandler.__subclasses__())
            raise ConfigError(f"kwargs_handlers: got {type(handler).__name__}, expected one of {kinds}.")
        if type(handler) in found:
            raise ConfigError(f"kwargs_handlers: {type(handler).__name__} is given twice.")
        found[type(handler)] = handler
    return found


def _value(kind: DDPCommunicationHookType | str) -> str:
    return kind.value if isinstance(kind, DDPCommunicationHookType) else str(kind)
