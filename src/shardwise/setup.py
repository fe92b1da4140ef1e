"""`shardwise.initialize`: a model and a configuration in, an engine out."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from . import _torch
from .data import build_loader
from .dist import Mesh, init_distributed
from .dist.mesh import default_device
from .engine import Engine
from .errors import ConfigError, NotYetSupported, ShardingError
from .meter import show_messages
from .optim import build_optimizer, build_scheduler
from .optim.sharded import ShardedOptimizer
from .precision import model_dtype, torch_dtype
from .sharding import ShardedModel

if TYPE_CHECKING:
    from .config import Config


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[list[Any]], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Engine, ShardedOptimizer | None, DataLoader[Any] | None, LRScheduler | None]:
    """Shard a model as a ds_config says, and wrap it in an engine. All ranks must call this.

    Args:
        args: an object whose ``deepspeed_config`` names the configuration, if ``config`` is not given.
        model: the model, on any device; it is moved to this rank's.
        optimizer: an optimizer over the model's parameters, or a callable that makes one from a list of them.
            Beats ``optimizer`` in the configuration.
        model_parameters: parameters or groups for the configuration's optimizer; default: all that want gradients.
        training_data: a dataset, of which a loader is made.
        lr_scheduler: a schedule of the optimizer, or a callable that makes one from the optimizer. Beats
            ``scheduler`` in the configuration.
        distributed_port: no effect; the port comes from the launcher.
        mpu: model-parallel groups; has not landed.
        dist_init_required: False refuses to start a process group.
        collate_fn: for the loader.
        config: path, dict, base64 text, or a :class:`Config`.
        mesh_param: model-parallel mesh; has not landed.
        config_params: another name of ``config``.

    Returns:
        The engine, its optimizer, its loader, its schedule; the last three None where there is none.

    Raises:
        ConfigError: a wrong configuration, with every problem and its JSON path.
        NotYetSupported: an argument or key whose capability has not landed.
        ShardingError: a model that cannot be sharded.
    """
    if model is None:
        raise ConfigError("model: shardwise.initialize needs the model to train.")
    if mpu is not None or mesh_param is not None:
        raise NotYetSupported("mpu / mesh_param: model-parallel axes have not landed yet.")
    show_messages()
    source = _config_source(args, config, config_params)
    if dist_init_required is not False:
        init_distributed()
    device = _device_of(model)
    settings = _load(source, model)
    _seed(settings)
    zero = settings.zero_optimization
    mesh = Mesh.build(
        shard_size=max(zero.mics_shard_size, 0),
        secondary_size=zero.zero_hpz_partition_size,
        timeout=timedelta(seconds=settings.communication_timeout),
    )
    sharded = None
    try:
        wire = settings.communication_data_type
        sharded = ShardedModel(
            model,
            zero,
            mesh,
            device=device,
            low_dtype=model_dtype(settings),
            accumulates=settings.gradient_accumulation_steps > 1,
            wire_dtype=None if wire is None else torch_dtype(wire),
        )
        inner = _optimizer(optimizer, settings, model, model_parameters)
        wrapped = None
        if inner is not None:
            wrapped = ShardedOptimizer(
                inner,
                sharded,
                sub_group_size=zero.sub_group_size,
                allow_untested=settings.zero_allow_untested_optimizer,
            )
        schedule = _scheduler(lr_scheduler, settings, wrapped)
        loader = None
        if training_data is not None:
            loader = build_loader(
                training_data,
                batch_size=settings.train_micro_batch_size_per_gpu,
                axis=mesh.world,
                drop_last=settings.dataloader_drop_last,
                seed=settings.seed or 0,
                collate_fn=collate_fn,
            )
        engine = Engine(model, settings, mesh, sharded, wrapped, schedule, loader)
    except Exception:
        if sharded is not None:
            sharded.close()
        mesh.close()
        raise
    return engine, wrapped, loader, schedule


def _config_source(args: Any, config: Any, config_params: Any) -> Any:
    named = getattr(args, "deepspeed_config", None)
    given = [(n, v) for n, v in (("config", config), ("config_params", config_params)) if v is not None]
    if named is not None:
        given.append(("args.deepspeed_config", named))
    if not given:
        raise ConfigError("config: none given; pass a path or a dict as `config`.")
    if len(given) > 1:
        raise ConfigError(f"config: given as {' and as '.join(n for n, _ in given)}; give it once.")
    return given[0][1]


def _load(source: Any, model: nn.Module) -> Config:
    from .config import Config  # not at import time: pydantic costs more than all the rest of this library

    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if isinstance(source, Config):
        source = source.as_dict()
    dtypes = {p.dtype for p in model.parameters()}
    auto: Mapping[str, object] = {
        "bf16.enabled": torch.bfloat16 in dtypes,
        "fp16.enabled": torch.float16 in dtypes,
    }
    return Config.load(source, world_size=world_size, auto=auto)


def _device_of(model: nn.Module) -> torch.device:
    if any(_torch.is_fake(p) for p in model.parameters()):
        return next(model.parameters()).device  # a dry run stays where it is
    return default_device()


def _seed(config: Config) -> None:
    if config.seed is None:
        return
    # Ranks draw different numbers (dropout), each run the same.
    seed = config.seed + (dist.get_rank() if dist.is_initialized() else 0)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _optimizer(
    given: Optimizer | Callable[[list[Any]], Optimizer] | None,
    config: Config,
    model: nn.Module,
    model_parameters: Iterable[Any] | None,
) -> Optimizer | None:
    if given is not None and config.optimizer is not None:
        warnings.warn("`optimizer` in the configuration is not used: one was given to initialize.", stacklevel=3)
    if isinstance(given, Optimizer):
        if isinstance(given, ShardedOptimizer):
            raise ShardingError("this optimizer belongs to another engine; give initialize the plain one.")
        return given
    params = (
        list(model_parameters) if model_parameters is not None else [p for p in model.parameters() if p.requires_grad]
    )
    if given is not None:
        made = given(params)
        if not isinstance(made, Optimizer):
            raise ConfigError(f"optimizer: the callable returned {type(made).__name__}, not a torch.optim.Optimizer.")
        return made
    return None if config.optimizer is None else build_optimizer(config.optimizer, params)


def _scheduler(
    given: LRScheduler | Callable[[Optimizer], LRScheduler] | None,
    config: Config,
    optimizer: ShardedOptimizer | None,
) -> LRScheduler | None:
    if given is not None and config.scheduler is not None:
        warnings.warn("`scheduler` in the configuration is not used: one was given to initialize.", stacklevel=3)
    if given is not None and (isinstance(given, LRScheduler) or hasattr(given, "step")):
        return given  # type: ignore[return-value]
    if given is None and config.scheduler is None:
        return None
    if optimizer is None:
        raise ConfigError("scheduler: there is no optimizer to schedule; add `optimizer` or pass one to initialize.")
    if given is not None:
        return given(optimizer)
    return build_scheduler(config.scheduler, optimizer) if config.scheduler is not None else None
