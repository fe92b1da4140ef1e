"""`DeepSpeedPlugin`: a ds_config for an Accelerator, and what its "auto" values become."""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from shardwise import handed_on
from shardwise.errors import ConfigError, NotYetSupported
from shardwise.messages import logger


class DummyOptim:
    """Stands for the optimizer of a ds_config in a script.

    Args:
        params: parameters or groups.
        lr: what ``optimizer.params.lr`` becomes where it is "auto".
        weight_decay: likewise.
        kwargs: values for other "auto" keys of ``optimizer.params``.
    """

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler:
    """Stands for the schedule of a ds_config in a script.

    Args:
        optimizer: a :class:`DummyOptim`.
        total_num_steps: batches of the run as one process would count them.
        warmup_num_steps: likewise, of the warm-up.
        lr_scheduler_callable: makes a schedule from the engine's optimizer, where the ds_config has none.
        kwargs: values for other "auto" keys of ``scheduler.params``.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs


@dataclass
class DeepSpeedPlugin:
    """Trains prepared models with an engine, by a ds_config or by a few of its values.

    Attributes:
        hf_ds_config: path, dict, base64 text, or an object with ``config`` (an ``HfDeepSpeedConfig``). Also by the
            variable ``ACCELERATE_DEEPSPEED_CONFIG_FILE``.
        gradient_accumulation_steps: where the ds_config has none or "auto"; default: the Accelerator's.
        gradient_clipping: where the ds_config has none or "auto"; without either nothing is clipped; also by
            ``ACCELERATE_GRADIENT_CLIPPING``.
        zero_stage: where there is no ds_config; also by ``ACCELERATE_DEEPSPEED_ZERO_STAGE``; default: 2.
        is_train_batch_min: of several loaders, the smallest batch size fills ``train_micro_batch_size_per_gpu``.
        offload_optimizer_device: "none"; others have not landed.
        offload_param_device: "none"; others have not landed.
        offload_optimizer_nvme_path: has not landed.
        offload_param_nvme_path: has not landed.
        zero3_init_flag: no effect: build a model that is never whole under ``shardwise.zero.Init``.
        zero3_save_16bit_model: ``zero_optimization.stage3_gather_16bit_weights_on_model_save``; weights are always
            gathered when they are asked for.
        transformer_moe_cls_names: names, separated by commas, of modules whose parameters are gathered at once.
        enable_msamp: refused.
        msamp_opt_level: refused.

    Raises:
        ConfigError: a ds_config that cannot be read or has no ``zero_optimization``.
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | str | None = None
    gradient_clipping: float | str | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None
    deepspeed_config: dict[str, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.enable_msamp or self.msamp_opt_level is not None:
            raise ConfigError("DeepSpeedPlugin: MS-AMP is not supported; mixed_precision='bf16' is.")
        for name, device in self._offloads():
            if device not in (None, "none"):
                raise NotYetSupported(f"DeepSpeedPlugin.{name}: {device!r} has not landed; leave it out.")
        told: dict[str, Any] = {**handed_on.read(os.environ)}
        source = self.hf_ds_config if self.hf_ds_config is not None else told.get("deepspeed_config_file")
        if self.gradient_clipping is None:
            self.gradient_clipping = told.get("gradient_clipping")
        if self.zero_stage is None:
            self.zero_stage = told.get("zero_stage")
        if self.zero3_save_16bit_model is None:
            self.zero3_save_16bit_model = told.get("zero3_save_16bit_model")
        if self.zero3_init_flag if self.zero3_init_flag is not None else told.get("zero3_init_flag"):
            logger.info(
                "zero3_init_flag has no effect: build a model that never is whole under `with shardwise.zero.Init():`"
            )
        self.deepspeed_config = self._built() if source is None else _read(source)
        if source is not None:
            self._warn_of_contradictions()
        if self.transformer_moe_cls_names:
            zero = self.deepspeed_config["zero_optimization"]
            names = [n.strip() for n in self.transformer_moe_cls_names.split(",")]
            zero.setdefault("leaf_module", {}).setdefault("classes", names)

    def _warn_of_contradictions(self) -> None:
        """What the ds_config says counts, and upstream takes it so without a word."""
        paths = {
            "gradient_clipping": "gradient_clipping",
            "gradient_accumulation_steps": "gradient_accumulation_steps",
            "zero_stage": "zero_optimization.stage",
        }
        for name, path in paths.items():
            mine, has = getattr(self, name), self.get_value(path)
            if mine not in (None, "auto") and has not in (None, "auto") and float(has) != float(mine):
                warnings.warn(
                    f"DeepSpeedPlugin({name}={mine}): the ds_config says {path}: {has}, which is what counts. Leave "
                    'one of them out, or write "auto" there.',
                    stacklevel=4,
                )

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        stage = self.deepspeed_config["zero_optimization"].get("stage", 0)
        if stage == "auto":
            return 2 if self.zero_stage is None else self.zero_stage
        return int(stage)

    def is_zero3_init_enabled(self) -> bool:
        """Whether models are built in parts by transformers: they are not; ``shardwise.zero.Init`` does."""
        return False

    def zero3_init_context_manager(self, enable: bool = False) -> contextlib.AbstractContextManager[None]:
        """Nothing: see :meth:`is_zero3_init_enabled`. Scripts switch it off around models that are loaded whole."""
        return contextlib.nullcontext()

    def get_value(self, path: str, default: Any = None) -> Any:
        """The value of the ds_config at a path with dots."""
        found: Any = self.deepspeed_config
        for part in path.split("."):
            if not isinstance(found, Mapping) or part not in found:
                return default
            found = found[part]
        return found

    def is_auto(self, path: str) -> bool:
        """Whether the value there is "auto"."""
        return bool(self.get_value(path) == "auto")

    def _offloads(self) -> list[tuple[str, str | None]]:
        names = ("offload_optimizer_device", "offload_param_device")
        paths = ("offload_optimizer_nvme_path", "offload_param_nvme_path")
        return [(n, getattr(self, n)) for n in names + paths]

    def _built(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": 2 if self.zero_stage is None else self.zero_stage}
        if self.zero3_save_16bit_model is not None:
            zero["stage3_gather_16bit_weights_on_model_save"] = self.zero3_save_16bit_model
        built: dict[str, Any] = {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "zero_optimization": zero,
        }
        # Upstream clips at 1.0 here without a word. Nothing is clipped that nobody asked for.
        if self.gradient_clipping not in (None, "auto"):
            built["gradient_clipping"] = self.gradient_clipping
        return built


def _read(source: Any) -> dict[str, Any]:
    from shardwise.config.loading import read

    if not isinstance(source, str | Path | Mapping):
        source = getattr(source, "config", source)
    found, name = read(source)
    config = copy.deepcopy(dict(found)) if isinstance(found, Mapping) else {}
    if not isinstance(config.get("zero_optimization"), Mapping):
        raise ConfigError(f'{name}: zero_optimization: missing; write "zero_optimization": {{"stage": 0}} or more.')
    return config


def precision_of(config: Mapping[str, Any]) -> str | None:
    """The mixed precision that a ds_config asks for, or None if it leaves that open ("auto" or absent)."""
    for name, key in (("fp16", "fp16"), ("bf16", "bf16"), ("bfloat16", "bf16")):
        section = config.get(name)
        if isinstance(section, Mapping) and section.get("enabled") is True:
            return key
    sections = [config.get(n) for n in ("fp16", "bf16", "bfloat16")]
    if any(isinstance(s, Mapping) and s.get("enabled") == "auto" for s in sections):
        return None
    return None if not any(isinstance(s, Mapping) for s in sections) else "no"


def precision_with(config: Mapping[str, Any], wanted: str | None) -> str:
    """The mixed precision of a run with this ds_config.

    Args:
        config: the ds_config.
        wanted: what the script or the launcher says, or None.

    Raises:
        ConfigError: the ds_config says another.
    """
    has = precision_of(config)
    if wanted is None:
        return has or "no"
    names = ("bf16", "bfloat16") if wanted == "bf16" else (wanted,)
    off = wanted != "no" and any(_section(config, name).get("enabled") is False for name in names)
    if off or (has is not None and has not in ("no", wanted)):
        says = f"{wanted}.enabled: false" if off else f"{has}.enabled: true"
        raise ConfigError(f"mixed_precision={wanted!r}, but the ds_config has {says}. Leave one of them out.")
    return wanted


def write_precision(config: dict[str, Any], precision: str) -> None:
    """Write a mixed precision into a ds_config, in the place of "auto" or of nothing.

    Args:
        config: changed in place.
        precision: from :func:`precision_with`.
    """
    has = precision_of(config)
    if precision == "fp16" and has != "fp16":
        config["fp16"] = {**_section(config, "fp16"), "enabled": True, "auto_cast": True}
    elif precision == "bf16" and has != "bf16":
        config["bf16"] = {**_section(config, "bf16"), "enabled": True}
    for name in ("fp16", "bf16"):
        if _section(config, name).get("enabled") == "auto":
            config[name] = {**_section(config, name), "enabled": False}


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return dict(found) if isinstance(found, Mapping) else {}


def micro_batch(sizes: Sequence[int | None], smallest: bool, per_split: int) -> int:
    """What ``train_micro_batch_size_per_gpu`` becomes.

    Args:
        sizes: batch sizes of the loaders of this ``prepare``.
        smallest: the smallest of them, or the largest.
        per_split: processes that share a batch (``split_batches``), or 1.

    Raises:
        ConfigError: no loader, or one without a batch size.
    """
    if not sizes or any(size is None for size in sizes):
        raise ConfigError(
            'train_micro_batch_size_per_gpu: "auto" takes the batch size of the loaders that are prepared together '
            f"with the model, but {'one has none' if sizes else 'there is none'}. Write a number in the ds_config, or "
            "give prepare() a loader with a batch size."
        )
    known = [size for size in sizes if size is not None]
    return max(1, (min(known) if smallest else max(known)) // per_split)


def auto_values(
    optimizer: DummyOptim | None, scheduler: DummyScheduler | None, config: Mapping[str, Any], shares: int
) -> dict[str, object]:
    """What "auto" values of ``optimizer.params`` and ``scheduler.params`` become, by JSON path.

    Args:
        optimizer: the script's stand-in.
        scheduler: likewise.
        config: the ds_config.
        shares: processes among which the batches of the script's count are dealt out.
    """
    found: dict[str, object] = {}
    if optimizer is not None:
        # The last two as torch and DeepSpeed have them where nothing is written.
        values = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, "betas": [0.9, 0.999], "eps": 1e-8}
        values.update(optimizer.kwargs)
        found.update({f"optimizer.params.{k}": v for k, v in values.items()})
    if scheduler is not None:
        params = _section(_section(config, "optimizer"), "params")
        lr = params.get("lr")
        rate = optimizer.lr if lr in (None, "auto") and optimizer is not None else lr
        values = {"warmup_min_lr": 0.0, "warmup_max_lr": rate, "warmup_num_steps": scheduler.warmup_num_steps}
        if scheduler.total_num_steps is not None:
            values["total_num_steps"] = ceil(scheduler.total_num_steps / shares)
        values.update(scheduler.kwargs)
        found.update({f"scheduler.params.{k}": v for k, v in values.items() if v is not None})
    return found
