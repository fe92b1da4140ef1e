"""`shardwise.initialize`: a model and a configuration in, an engine out."""

from __future__ import annotations

import argparse
import contextlib
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from shardwise import _torch
from shardwise.agreed import require_same_config
from shardwise.data import build_loader
from shardwise.dist import Mesh, init_distributed
from shardwise.dist.mesh import default_device
from shardwise.engine import Engine
from shardwise.engine_blocks import check_blocks
from shardwise.errors import CommError, ConfigError
from shardwise.ingredients import check_arguments, check_dtype, gradient_arguments, make_optimizer, make_scheduler
from shardwise.messages import logger, set_level, show_messages
from shardwise.monitor import check_packages
from shardwise.notes import notes
from shardwise.optim.sharded import ShardedOptimizer
from shardwise.precision import build_scaler, model_dtype
from shardwise.sharding import ShardedModel

if TYPE_CHECKING:
    from shardwise.config import Config


def initialize(
    args: Any = None,
    model: nn.Module = None,  # type: ignore[assignment]
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
    *,
    auto: Mapping[str, object] | None = None,
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
        auto: what an ``"auto"`` in the configuration becomes, by JSON path: ``{"optimizer.params.lr": 1e-4}``. Bucket
            sizes are filled by themselves (from ``model.config.hidden_size`` where there is one), as are
            ``fp16.enabled`` and ``bf16.enabled`` (from the parameters' dtype).

    Returns:
        The engine, its optimizer, its loader, its schedule; the last three None where there is none.

    Raises:
        ConfigError: a wrong configuration, with every problem and its JSON path.
        NotYetSupported: an argument or key whose capability has not landed.
        ShardingError: a model that cannot be sharded.
    """
    check_arguments(model, optimizer, lr_scheduler, mpu, mesh_param)
    show_messages()
    source = _config_source(args, config, config_params)
    if dist_init_required is not False:
        init_distributed()
    device = _device_of(model)
    with warned_once():
        settings = _load(source, model, auto or {})
    check_packages(settings)  # these two here, because they may refuse: nothing has been changed yet
    scaler = build_scaler(settings.fp16)
    zero = settings.zero_optimization
    check_blocks(model, settings)
    _seed(settings)
    mesh = Mesh.build(
        shard_size=max(zero.mics_shard_size, 0),
        secondary_size=zero.zero_hpz_partition_size,
        timeout=timedelta(seconds=settings.communication_timeout),
    )
    sharded = None
    undo = contextlib.ExitStack()  # what `destroy` takes back, or an error here
    try:
        require_same_config(settings, mesh.world, device)
        check_dtype(model, settings)
        undo.callback(set_level(settings.log_level))
        if mesh.world.position == 0:
            for note in notes(settings):
                logger.info(note)
        if settings.flashattention.enable:
            from shardwise.attention import switch_attention  # imports torch.fx

            switched = switch_attention(model, settings.flashattention, main=mesh.world.position == 0)
            undo.callback(switched.undo)
        sharded = ShardedModel(
            model,
            zero,
            mesh,
            device=device,
            low_dtype=model_dtype(settings),
            accumulates=settings.gradient_accumulation_steps > 1 or not settings.managed_gradient_accumulation,
            **gradient_arguments(settings, mesh),
        )
        inner = make_optimizer(optimizer, settings, model, model_parameters)
        wrapped = None
        if inner is not None:
            wrapped = ShardedOptimizer(
                inner,
                sharded,
                sub_group_size=zero.sub_group_size,
                allow_untested=settings.zero_allow_untested_optimizer,
            )
        with warned_once():
            schedule = make_scheduler(lr_scheduler, settings, wrapped)
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
        engine = Engine(model, settings, mesh, sharded, wrapped, schedule, loader, scaler, undo)
        engine._begin()
    except Exception:
        undo.close()
        # The error that is raised is the one that happened here, not the absence of ranks that did not fail.
        with contextlib.suppress(CommError):
            if sharded is not None:
                sharded.close()
        mesh.close()
        raise
    return engine, wrapped, loader, schedule


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config`` to a script's parser, as scripts written for upstream expect.

    Args:
        parser: the script's parser; changed in place and returned.
    """
    group = parser.add_argument_group("shardwise")
    group.add_argument("--deepspeed", action="store_true", help="train with the engine (a flag for the script to read)")
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of the ds_config.json")
    return parser


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


@contextlib.contextmanager
def warned_once() -> Iterator[None]:
    """Warnings about the configuration are the first rank's to give, and blame the caller of ``initialize``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    if not dist.is_initialized() or dist.get_rank() == 0:
        for warning in caught:
            warnings.warn(warning.message, warning.category, stacklevel=4)


def _load(source: Any, model: nn.Module, given: Mapping[str, object]) -> Config:
    from shardwise.config import Config  # not at import time: pydantic costs more than all the rest of this library

    world_size = dist.get_world_size() if dist.is_initialized() else 1
    dtypes = {p.dtype for p in model.parameters()}
    auto: Mapping[str, object] = {
        "bf16.enabled": torch.bfloat16 in dtypes,
        "fp16.enabled": torch.float16 in dtypes,
        **_width_sizes(model),
        **given,
    }
    if not isinstance(source, Config):
        return Config.load(source, world_size=world_size, auto=auto)
    # Read again, because the number of ranks may be another; what was written and filled in stays known.
    loaded = Config.load(source.as_dict(), world_size=world_size)
    return loaded.model_copy(update={"written": source.written, "filled": source.filled})


def _width_sizes(model: nn.Module) -> dict[str, object]:
    from shardwise.config.auto import of_width

    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config
    hidden = getattr(text, "hidden_size", None)
    return of_width(hidden) if isinstance(hidden, int) and hidden > 0 else {}


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
