"""Whether a switched module still computes what it did."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.func import functional_call

from shardwise import _torch
from shardwise.errors import ConfigError
from shardwise.sharding.access import pinned, unit_of

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

# Largest difference, relative to the largest output. Computed in float64, where a correct switch is within 1e-13; 1e-5
# leaves room for modules that take their softmax in float32 (1e-7 for each of a few sums), and is far below what a
# missing mask or a wrong scale does even where freshly initialised weights make all scores small (1e-3).
IN_DOUBLE = 1e-5
# In the module's own dtype, when float64 does not run or on the real inputs: a few dozen roundings.
OWN_DTYPE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# Rows of the random inputs; keys of another sequence have their own length.
BATCH, LENGTH, OTHER_LENGTH = 2, 8, 5


def has_values(module: nn.Module) -> bool:
    """Whether the module's parameters hold numbers (not on the meta device, not in a dry run)."""
    tensors = [*module.parameters(), *module.buffers()]
    return not any(t.is_meta or _torch.is_fake(t) for t in tensors)


@contextlib.contextmanager
def quiet(module: nn.Module) -> Iterator[None]:
    """A context in which the module is in evaluation, its parameters whole, and random numbers left as they were."""
    units = {id(u): u for p in module.parameters() if (u := unit_of(p)) is not None}
    devices = {t.device for t in module.parameters() if t.device.type == "cuda"}
    with pinned(units.values()), torch.random.fork_rng(devices=list(devices)), evaluating(module):
        yield


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """A context in which the module and its parts are in evaluation."""
    flags = [(m, m.training) for m in module.modules()]
    for part, _ in flags:
        part.training = False
    try:
        yield
    finally:
        for part, was in flags:
            part.training = was


def run_in(module: nn.Module, dtype: torch.dtype | None, inputs: Inputs) -> torch.Tensor:
    """The first tensor that the module returns, its parameters and the inputs cast to a dtype (None: as they are).

    No graph is kept, but it is recorded: without one, ``nn.MultiheadAttention`` takes an inference-only path.
    """
    args, kwargs = inputs
    with torch.enable_grad(), torch.autocast(_device(module).type, enabled=False):
        if dtype is None:
            return first_tensor(module(*args, **kwargs))
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        cast = {n: t.detach().to(dtype).requires_grad_() for n, t in tensors.items() if t.is_floating_point()}
        args, kwargs = map_tensors(args, dtype), map_tensors(kwargs, dtype)
        return first_tensor(functional_call(module, cast, args, kwargs))


def map_tensors(value: Any, dtype: torch.dtype) -> Any:
    """The same structure with its floating-point tensors in a dtype."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(v, dtype) for v in value)
    if isinstance(value, Mapping):
        return {k: map_tensors(v, dtype) for k, v in value.items()}
    return value


def first_tensor(value: Any) -> torch.Tensor:
    """The output that counts: attention modules return it first, weights and caches after it."""
    found = _torch.tensors_in(value)
    if not found:
        raise TypeError(f"returned {type(value).__name__}, no tensor")
    return found[0].detach()


def compare(
    name: str, original: torch.Tensor, switched: torch.Tensor, limit: float, blind: torch.Tensor | None = None
) -> float:
    """The difference relative to the largest output; where the original is not finite nothing is asked.

    Args:
        name: of the module.
        original, switched: its outputs, (B, L, ...).
        limit: the largest difference allowed.
        blind: (B, L), True for queries whose output counts for nothing (see :func:`blind_queries`).

    Raises:
        ConfigError: it is above the limit, or the shape is another.
    """
    if original.shape != switched.shape:
        raise ConfigError(_differs(name, f"shape {tuple(switched.shape)} instead of {tuple(original.shape)}"))
    # A query that sees no key: the original's softmax gives NaN there, the kernels give zeros.
    usable = original.isfinite()
    if blind is not None and blind.shape == original.shape[:2]:
        usable &= ~blind.reshape(*blind.shape, *[1] * (original.dim() - 2))
    if not usable.any():
        return 0.0
    wanted, got = original[usable].double(), switched[usable].double()
    error = float((wanted - got).abs().max() / wanted.abs().max().clamp(min=1e-30))
    if not error <= limit:
        raise ConfigError(_differs(name, f"{error:.1e} of the largest output (allowed: {limit:g})"))
    return error


def blind_queries(masks: Iterable[Any], rows: int) -> torch.Tensor | None:
    """Queries from which one of the masks hides every key: those of padding on the left.

    Their output is the mean of all values, or zero, or NaN, as an implementation likes; no later layer looks at it.

    Args:
        masks: True where a key is seen, or added to the scores; those not of shape (B or 1, heads or 1, L, S) are
            passed over.
        rows: B.

    Returns:
        (B, L); None where no mask has queries.
    """
    found: torch.Tensor | None = None
    for mask in masks:
        if not isinstance(mask, torch.Tensor) or mask.dim() != 4 or mask.shape[0] not in (1, rows):
            continue
        if mask.dtype != torch.bool and not mask.is_floating_point():
            continue
        seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        blind = ~seen.any(-1).all(1).expand(rows, -1)
        found = blind if found is None or found.shape != blind.shape else found | blind
    return found


def _differs(name: str, how: str) -> str:
    return (
        f"flashattention.enable: {name} gives another output with scaled_dot_product_attention than by its own code: "
        f"{how}. Set flashattention.enable to false, and report this module."
    )


def own_limit(module: nn.Module) -> float:
    """What is allowed in the dtype that the module has."""
    dtypes = [p.dtype for p in module.parameters() if p.is_floating_point()]
    return max((OWN_DTYPE.get(d, 1e-1) for d in dtypes), default=OWN_DTYPE[torch.float32])


def random_tensor(*sizes: int, module: nn.Module) -> torch.Tensor:
    """Normal numbers where the module is, the same in every run."""
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(*sizes, generator=generator).to(_device(module))


def width_of(module: nn.Module) -> int | None:
    """How wide the input of a module's first projection is."""
    for child in module.modules():
        if isinstance(child, nn.Linear):
            return child.in_features
        if type(child).__name__ == "Conv1D" and hasattr(child, "nx"):  # transformers' linear layer of GPT-2
            return int(cast(int, child.nx))
    for child in module.modules():
        for parameter in child._parameters.values():
            if parameter is not None and parameter.dim() == 2:
                return int(parameter.shape[0])
    return None


def on_real_inputs(
    name: str,
    module: nn.Module,
    original: Callable[[], Any],
    switched: Callable[[], Any],
    masks: Sequence[Any] = (),
) -> None:
    """The check in the first forward, for a module whose inputs could not be guessed.

    Args:
        name: of the module.
        module: in any mode.
        original, switched: make the call.
        masks: what the call hides (see :func:`blind_queries`).

    Raises:
        ConfigError: the outputs differ.
    """
    with evaluating(module), torch.no_grad():
        wanted = first_tensor(original())
        blind = blind_queries(masks, len(wanted)) if wanted.dim() else None
        compare(name, wanted, first_tensor(switched()), own_limit(module), blind)


def _device(module: nn.Module) -> torch.device:
    tensor = next(iter(module.parameters()), None)
    return torch.device("cpu") if tensor is None else tensor.device


@dataclass(frozen=True)
class Reference:
    """What the original gave for some inputs; ``dtype`` None is the module's own."""

    dtype: torch.dtype | None
    inputs: Inputs
    output: torch.Tensor


def references(module: nn.Module, inputs: list[Inputs], asked: list[Inputs] | None = None) -> list[Reference]:
    """Run the original on random inputs, in float64 where it can; inputs that it refuses are left out.

    Args:
        module: not switched yet, and :func:`quiet`.
        inputs: to try.
        asked: what the switched module shall be given instead of each, where the two differ.
    """
    found = []
    for one, other in zip(inputs, asked or inputs, strict=True):
        for dtype in (torch.float64, None):
            output = _attempt(module, dtype, one)
            if output is not None:
                found.append(Reference(dtype, other, output))
                break
    return found


def verify(name: str, module: nn.Module, wanted: list[Reference]) -> float | None:
    """Run the switched module on the same inputs, and compare.

    Returns:
        The largest difference; None if there is nothing to compare with.

    Raises:
        ConfigError: the outputs differ.
    """
    errors = []
    for one in wanted:
        limit = own_limit(module) if one.dtype is None else IN_DOUBLE
        errors.append(compare(name, one.output, run_in(module, one.dtype, one.inputs), limit))
    return max(errors, default=None)


def _attempt(module: nn.Module, dtype: torch.dtype | None, inputs: Inputs) -> torch.Tensor | None:
    try:
        return run_in(module, dtype, inputs)
    except Exception:  # whatever the user's module raises on inputs that were only guessed
        return None
