"""What goes into an engine beside the model: checked arguments, an optimizer, a schedule."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardwise.dist import Mesh
from shardwise.errors import ConfigError, NotYetSupported, ShardingError
from shardwise.optim import build_optimizer, build_scheduler
from shardwise.optim.sharded import ShardedOptimizer
from shardwise.precision import model_dtype, torch_dtype
from shardwise.sharding.gradient import Averaging

if TYPE_CHECKING:
    from shardwise.config import Config


def check_arguments(model: Any, optimizer: Any, lr_scheduler: Any, mpu: Any, mesh_param: Any) -> None:
    """Refuse what ``initialize`` cannot use, before anything is changed.

    Raises:
        ConfigError: an argument of a wrong kind.
        NotYetSupported: model-parallel groups.
        ShardingError: the optimizer of another engine.
    """
    if not isinstance(model, nn.Module):
        got = "none was given" if model is None else f"got {type(model).__name__}"
        raise ConfigError(f"model: shardwise.initialize needs the model to train, a torch.nn.Module; {got}.")
    if isinstance(optimizer, ShardedOptimizer):
        raise ShardingError("optimizer: this one belongs to another engine; give initialize the plain one.")
    if optimizer is not None and not isinstance(optimizer, Optimizer) and not callable(optimizer):
        raise ConfigError(
            f"optimizer: got {type(optimizer).__name__}, expected a torch.optim.Optimizer or a callable that makes "
            'one; an optimizer by name belongs in the configuration: "optimizer": {"type": "AdamW", "params": {...}}.'
        )
    if lr_scheduler is not None and not _is_schedule(lr_scheduler) and not callable(lr_scheduler):
        raise ConfigError(
            "lr_scheduler: expected a torch.optim.lr_scheduler.LRScheduler or a callable that makes one from the "
            f"optimizer, got {type(lr_scheduler).__name__}."
        )
    if mpu is not None or mesh_param is not None:
        raise NotYetSupported("mpu / mesh_param: model-parallel axes have not landed yet.")


def check_dtype(model: nn.Module, config: Config) -> None:
    """Whether the parameters will have the dtype that ``data_types.param_dtype`` says.

    Raises:
        ConfigError: a floating-point parameter has another one.
    """
    wanted = config.data_types.param_dtype
    if wanted is None or model_dtype(config) is not None:  # fp16 and bf16 cast them, and were compared when loaded
        return
    for name, param in model.named_parameters():
        if param.is_floating_point() and param.dtype != torch_dtype(wanted):
            found = str(param.dtype).removeprefix("torch.")
            raise ConfigError(
                f'data_types.param_dtype: "{wanted}", but {name} is {found} and nothing casts it. '
                "Cast the model before initialize, or remove the key."
            )


def gradient_arguments(config: Config, mesh: Mesh) -> dict[str, Any]:
    """What the configuration says of the dtypes and the division of gradients, for a :class:`ShardedModel`."""
    low = model_dtype(config)
    travels = config.communication_data_type is not None and mesh.world.size > 1
    wire = torch_dtype(str(config.communication_data_type)) if travels else None
    masters = not config.bf16.bf16_master_weights_and_grads
    accumulate = config.data_types.grad_accum_dtype
    # Without fp32 masters nothing would read what fp32 sums keep.
    narrow = torch.float32 if masters or low is None else low
    buffers = config.data_types.buffer_dtype
    return {
        "wire_dtype": wire,
        "sum_dtype": torch_dtype(accumulate) if accumulate else narrow,
        "averaging": Averaging.of(
            mesh.world.size,
            wire or low or torch.float32,
            prescale=config.prescale_gradients,
            predivide=config.gradient_predivide_factor,
            mean=config.gradient_allreduce_op == "mean",
        ),
        "masters": masters,
        "buffer_dtype": torch_dtype(buffers) if buffers else None,
        "by_rows": config.sparse_gradients,
    }


def make_optimizer(
    given: Optimizer | Callable[[list[Any]], Optimizer] | None,
    config: Config,
    model: nn.Module,
    model_parameters: Iterable[Any] | None,
) -> Optimizer | None:
    """The optimizer over the model's own parameters: the given one, or the configuration's, or none."""
    if given is not None and config.optimizer is not None:
        warnings.warn("`optimizer` in the configuration is not used: one was given to initialize.", stacklevel=4)
    if isinstance(given, Optimizer):
        return given
    if given is None and config.optimizer is None:
        return None
    params = [p for p in model.parameters() if p.requires_grad]
    if model_parameters is not None:
        params = list(model_parameters)
    if not params:
        raise ConfigError("model: it has no parameter that wants a gradient, so there is nothing to optimize.")
    if given is not None:
        made = given(params)
        if not isinstance(made, Optimizer):
            raise ConfigError(f"optimizer: the callable returned {type(made).__name__}, not a torch.optim.Optimizer.")
        return made
    return build_optimizer(config.optimizer, params, model) if config.optimizer is not None else None


def make_scheduler(
    given: LRScheduler | Callable[[Optimizer], LRScheduler] | None,
    config: Config,
    optimizer: ShardedOptimizer | None,
) -> LRScheduler | None:
    """The learning-rate schedule: the given one, or the configuration's, or none."""
    if given is not None and config.scheduler is not None:
        warnings.warn("`scheduler` in the configuration is not used: one was given to initialize.", stacklevel=4)
    if given is None and config.scheduler is None:
        return None
    if optimizer is None:
        raise ConfigError("scheduler: there is no optimizer to schedule; add `optimizer` or pass one to initialize.")
    if isinstance(given, LRScheduler) or (given is not None and _is_schedule(given)):
        return given  # type: ignore[return-value]
    if given is not None:
        made = given(optimizer)
        if not _is_schedule(made):
            raise ConfigError(f"lr_scheduler: the callable returned {type(made).__name__}, not a schedule.")
        return made
    return build_scheduler(config.scheduler, optimizer) if config.scheduler is not None else None


def _is_schedule(value: Any) -> bool:
    """Whether it steps. Schedules of other libraries need not derive from torch's class."""
    return isinstance(value, LRScheduler) or (callable(getattr(value, "step", None)) and not isinstance(value, type))
