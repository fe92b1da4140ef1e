"""Collectives on nested values: gather, reduce, broadcast, pad. All processes must call each of them.

Each begins with one small collective in which the processes compare what they were given (the operation, its settings,
the structure, dtypes and shapes). When it differs, all of them raise, with a list by process, and no collective is left
over; so a process that gives another shape, another number of tensors or something that cannot be sent is an error, and
never a hang or a wrong result.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from shardwise.accelerator.agreement import DistributedOperationException, agreed_tensors, same_call, unsendable
from shardwise.accelerator.current import current_processes
from shardwise.accelerator.nested import (
    ConvertOutputsToFp32,
    concatenate,
    convert_outputs_to_fp32,
    convert_to_fp32,
    find_batch_size,
    find_device,
    honor_type,
    ignorant_find_batch_size,
    is_namedtuple,
    is_torch_tensor,
    listify,
    recursively_apply,
    send_to_device,
    slice_tensors,
)
from shardwise.accelerator.process import Processes
from shardwise.dist import Axis
from shardwise.dist.objects import broadcast_value, gather_alike, gather_values
from shardwise.errors import ConfigError

REDUCTIONS = ("sum", "mean", "max", "none")


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor (``torch.nested``) was given to :func:`pad_across_processes`, which leaves it as it is."""


def gather(tensor: Any, *, processes: Processes | None = None) -> Any:
    """Every process's tensors, one after the other along the first dimension, on all processes.

    Args:
        tensor: nested lists, tuples and mappings of tensors, with the same structure, dtypes and shapes everywhere. A
            tensor without dimensions counts as ``[1]``.
        processes: among whom; by default those of the program.

    Returns:
        The same structure. The tensors lie where the given ones lie and carry no gradient. One process gets
        ``tensor`` itself.

    Raises:
        DistributedOperationException: the processes' values differ in structure, dtype or shape.
        ValueKindError: something that is no tensor.
    """
    processes = processes or current_processes()
    if processes.num_processes == 1:
        return tensor
    found = agreed_tensors(tensor, "gather", processes)
    sent = [t.to(processes.wire_device(t.device)) for t in found]
    whole = gather_alike(processes.axis, sent, "gather")
    return _put_back(tensor, [w.to(t.device) for w, t in zip(whole, found, strict=True)])


def gather_object(object: Any, *, processes: Processes | None = None) -> Any:
    """Every process's objects in one list, in the order of the processes.

    Args:
        object: a list of what :data:`shardwise.dist.values.KINDS` names; the lists of all processes are joined into
            one. Anything but a list or tuple counts as a list of one.
        processes: among whom; by default those of the program.

    Returns:
        The list. One process gets ``object`` itself.

    Raises:
        ValueKindError: a process gave something that cannot be sent; on all processes.
    """
    processes = processes or current_processes()
    if processes.num_processes == 1:
        return object
    device = processes.wire_device()
    same_call("gather_object", processes)
    every = gather_values(processes.axis, object, device, "gather_object")
    return [item for value in every for item in (value if type(value) in (list, tuple) else [value])]


def broadcast(tensor: Any, from_process: int = 0, *, processes: Processes | None = None) -> Any:
    """One process's tensors on all of them, written into the given ones and returned.

    Args:
        tensor: nested tensors, with the same structure, dtypes and shapes everywhere.
        from_process: who gives.
        processes: among whom; by default those of the program.

    Raises:
        ConfigError: no such process.
        DistributedOperationException, ValueKindError: as for :func:`gather`.
    """
    processes = processes or current_processes()
    wrong, operation = _no_such_process(from_process, processes), f"broadcast from {from_process}"
    if processes.num_processes == 1:
        same_call(operation, processes, wrong=wrong)
        return tensor
    found = agreed_tensors(tensor, operation, processes, wrong=wrong)
    arrived = []
    for given in found:
        sent = given.detach().to(processes.wire_device(given.device)).contiguous().resolve_conj().resolve_neg()
        # As bytes: gloo knows no bool and no 16 bits of some kinds.
        processes.axis.broadcast(sent.reshape(-1).view(torch.uint8), from_process, "broadcast")
        arrived.append(_write(given, sent))
    return _put_back(tensor, arrived)


def broadcast_object_list(
    object_list: list[Any], from_process: int = 0, *, processes: Processes | None = None
) -> list[Any]:
    """One process's list on all of them: the given list is changed, and returned.

    Args:
        object_list: of what :data:`shardwise.dist.values.KINDS` names.
        from_process: who gives.
        processes: among whom; by default those of the program.

    Raises:
        ConfigError: no list, or no such process.
        ValueKindError: something that cannot be sent; on all processes.
    """
    processes = processes or current_processes()
    wrong = _no_such_process(from_process, processes)
    if not isinstance(object_list, list):
        kind = type(object_list).__qualname__
        wrong = ConfigError(f"object_list: a {kind}; expected a list, which is changed in place.")
    same_call(f"broadcast_object_list from {from_process}", processes, wrong=wrong)
    object_list[:] = broadcast_value(
        processes.axis, object_list, from_process, processes.wire_device(), "broadcast_object_list"
    )
    return object_list


def copy_tensor_to_devices(tensor: torch.Tensor | None = None, *, processes: Processes | None = None) -> torch.Tensor:
    """The tensor of the one process that has it, on the device of each. The others give None.

    Raises:
        ConfigError: no process gave a tensor, or several did; on all processes.
    """
    processes = processes or current_processes()
    same_call("copy_tensor_to_devices", processes)
    device = processes.wire_device()
    has = torch.zeros(processes.num_processes, device=device)
    has[processes.process_index] = tensor is not None
    processes.axis.sum_small(has, "copy_tensor_to_devices")
    givers = [rank for rank, one in enumerate(has.tolist()) if one]
    if len(givers) != 1:
        raise ConfigError(f"copy_tensor_to_devices: exactly one process gives a tensor, but these did: {givers}.")
    sent: torch.Tensor = broadcast_value(processes.axis, tensor, givers[0], device, "copy_tensor_to_devices")
    return sent.to(processes.device)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0, *, processes: Processes | None = None) -> Any:
    """The sum, mean or maximum of every process's tensors, on all of them. The given ones are not changed.

    Numbers of 16 bits and less are added in float32 and rounded once. A sum of bools counts them (int64); a mean of
    whole numbers is a float, as in torch.

    Args:
        tensor: nested tensors, with the same structure, dtypes and shapes everywhere.
        reduction: ``"mean"``, ``"sum"``, ``"max"``, or ``"none"`` to get ``tensor`` itself.
        scale: what the result is multiplied by.
        processes: among whom; by default those of the program.

    Raises:
        ConfigError: another reduction.
        DistributedOperationException, ValueKindError: as for :func:`gather`; or the maximum of complex numbers.
    """
    processes = processes or current_processes()
    if reduction == "none":
        return tensor
    wrong = None
    if reduction not in REDUCTIONS:
        wrong = ConfigError(f"reduction: `{reduction}`; expected one of {', '.join(REDUCTIONS)}.")
    operation = f"reduce {reduction}"
    found = agreed_tensors(tensor, operation, processes, problem=lambda t: _unreducible(t, reduction), wrong=wrong)
    totals = _totals(found, reduction, processes)
    size = processes.num_processes
    return _put_back(
        tensor, [_finished(total, t.dtype, reduction, size, scale) for total, t in zip(totals, found, strict=True)]
    )


def pad_across_processes(
    tensor: Any, dim: int = 0, pad_index: Any = 0, pad_first: bool = False, *, processes: Processes | None = None
) -> Any:
    """Tensors made as long along one dimension as the longest process's, so that they can be gathered.

    Args:
        tensor: nested tensors, with the same structure and numbers of dimensions everywhere. Those that lack the
            dimension stay as they are.
        dim: which; negative counts from the last.
        pad_index: what is put in.
        pad_first: put it before instead of behind.
        processes: among whom; by default those of the program.

    Raises:
        DistributedOperationException: the processes' values differ in structure or numbers of dimensions.
        ValueKindError: something that is no tensor.
    """
    processes = processes or current_processes()
    if processes.num_processes == 1:
        return tensor
    found = agreed_tensors(tensor, f"pad_across_processes dim={dim}", processes, _dimensions, _unpaddable)
    if any(t.is_nested for t in found):
        text = "pad_across_processes: nested tensors are left as they are; their parts have no common length."
        warnings.warn(text, CannotPadNestedTensorWarning, stacklevel=2)
    padded = [i for i, t in enumerate(found) if not t.is_nested and -t.dim() <= dim < t.dim()]
    if padded:
        lengths = torch.tensor([found[i].shape[dim] for i in padded], device=processes.wire_device())
        processes.axis.max_small(lengths, "pad_across_processes")
        for i, length in zip(padded, lengths.tolist(), strict=True):
            found[i] = _padded(found[i], dim % found[i].dim(), length, pad_index, pad_first)
    return _put_back(tensor, found)


def _no_such_process(from_process: int, processes: Processes) -> ConfigError | None:
    count = processes.num_processes
    if not isinstance(from_process, int) or not 0 <= from_process < count:
        return ConfigError(f"from_process: {from_process!r}; there are the processes 0 to {count - 1}.")
    return None


def _put_back(data: Any, results: list[torch.Tensor]) -> Any:
    """The structure of ``data`` with the results in place of its tensors, in order."""
    waiting = iter(results)
    return recursively_apply(lambda _: next(waiting), data)


@torch.no_grad()
def _write(given: torch.Tensor, arrived: torch.Tensor) -> torch.Tensor:
    """Fill ``given``, unless several of its elements are one number in memory (an expanded tensor)."""
    if any(stride == 0 and size > 1 for stride, size in zip(given.stride(), given.shape, strict=True)):
        return arrived.to(given.device)
    if given.data_ptr() != arrived.data_ptr() or given.is_conj() or given.is_neg():
        given.copy_(arrived)
    return given


def _unreducible(tensor: torch.Tensor, reduction: str) -> str:
    if reduction == "max" and tensor.dtype.is_complex:
        return "complex numbers have no maximum"
    return unsendable(tensor)


def _wide(dtype: torch.dtype, reduction: str) -> torch.dtype:
    """In what numbers are added or compared: 16 bits and less are rounded once, at the end."""
    if dtype.is_floating_point:
        return torch.float32 if dtype.itemsize < 4 else dtype
    if dtype == torch.bool or (reduction == "max" and not dtype.is_complex):
        return torch.int64  # not every backend compares all kinds of whole numbers
    return torch.int32 if dtype.itemsize < 4 else dtype


def _totals(found: list[torch.Tensor], reduction: str, processes: Processes) -> list[torch.Tensor]:
    """The sums or maxima, in the wide dtypes."""
    totals = [tensor.to(_wide(tensor.dtype, reduction), copy=True) for tensor in found]
    if processes.num_processes == 1:
        return totals
    results = []
    for total in totals:
        flat = total.detach().resolve_conj().resolve_neg().to(processes.wire_device(total.device)).reshape(-1)
        if flat.numel() and reduction == "max":
            flat = _maximum(flat, processes.axis)
        elif flat.numel():
            processes.axis.sum_small(flat, "reduce")
        results.append(flat.reshape(total.shape).to(total.device))
    return results


def _maximum(mine: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The maximum over the processes, NaN where one has it: what backends make of a NaN depends on its place."""
    if not mine.is_floating_point():
        axis.max_small(mine, "reduce")
        return mine
    unknown = mine.isnan()
    both = torch.cat([mine.masked_fill(unknown, -torch.inf), unknown.to(mine.dtype)])
    axis.max_small(both, "reduce")
    found, unknown = both[: mine.numel()], both[mine.numel() :] > 0
    return found.masked_fill(unknown, torch.nan)


def _finished(total: torch.Tensor, dtype: torch.dtype, reduction: str, size: int, scale: float) -> torch.Tensor:
    """What a total in a wide dtype becomes for tensors of ``dtype``."""
    # Divided before it is rounded: the sum of 16-bit numbers may be too large for 16 bits.
    result = total / size if reduction == "mean" else total
    result = result if scale == 1.0 else result * scale
    if dtype == torch.bool:
        return result.bool() if reduction == "max" and scale == 1.0 else result
    return result.to(dtype) if result.is_floating_point() == dtype.is_floating_point else result


def _dimensions(tensor: torch.Tensor) -> str:
    return f"{tensor.dim()} dimensions" + (" (nested)" if tensor.is_nested else "")


def _unpaddable(tensor: torch.Tensor) -> str:
    return "" if tensor.is_nested else unsendable(tensor)


def _padded(tensor: torch.Tensor, dim: int, length: int, pad_index: Any, pad_first: bool) -> torch.Tensor:
    missing = length - tensor.shape[dim]
    if not missing:
        return tensor
    shape = [missing if i == dim else n for i, n in enumerate(tensor.shape)]
    fill = tensor.new_empty(shape)
    fill[...] = pad_index
    return torch.cat([fill, tensor] if pad_first else [tensor, fill], dim)


__all__ = [
    "CannotPadNestedTensorWarning",
    "ConvertOutputsToFp32",
    "DistributedOperationException",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "find_batch_size",
    "find_device",
    "gather",
    "gather_object",
    "honor_type",
    "ignorant_find_batch_size",
    "is_namedtuple",
    "is_torch_tensor",
    "listify",
    "pad_across_processes",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
]
