"""What the processes agree on before they exchange anything, so that a difference is an error on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from shardwise.accelerator.nested import leaves
from shardwise.accelerator.process import Processes
from shardwise.dist.objects import gather_values, same_everywhere
from shardwise.dist.values import ValueKindError
from shardwise.errors import CommError, ShardwiseError

# How many differences of one process an error lists.
SHOWN = 8


class DistributedOperationException(CommError):
    """The processes gave an operation different things. Raised on all of them."""


def shape_of(tensor: torch.Tensor) -> str:
    """Dtype and shape: what must be the same where tensors are exchanged as they are."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def unsendable(tensor: torch.Tensor) -> str:
    """Why a tensor cannot be sent; empty if it can."""
    if tensor.is_nested or tensor.layout != torch.strided:
        return f"a {'nested' if tensor.is_nested else tensor.layout} tensor cannot be sent; make it dense first"
    return ""


def agreed_tensors(
    data: Any,
    operation: str,
    processes: Processes,
    describe: Callable[[torch.Tensor], str] = shape_of,
    problem: Callable[[torch.Tensor], str] = unsendable,
    wrong: ShardwiseError | None = None,
) -> list[torch.Tensor]:
    """The tensors in ``data``, once all processes are known to have given the same. All raise or none.

    Args:
        data: nested tensors.
        operation: its name and the settings that must be the same.
        processes: who compare.
        describe: what must be the same of each tensor.
        problem: why the operation cannot take a tensor.
        wrong: what is amiss with the arguments on this process; it is raised here once the others know.

    Raises:
        ValueKindError: on a process that gave something else than tensors, or one with a ``problem``.
        DistributedOperationException: the processes differ, or another process's value is amiss; with
            ``processes.debug`` also a tensor on a kind of device that this process does not compute on.
    """
    found: list[torch.Tensor] = []
    rows = []
    for path, leaf in leaves(data):
        place = path or "the value"
        if isinstance(leaf, torch.Tensor):
            amiss = _amiss(leaf, place, operation, processes, problem)
            wrong = wrong or amiss
            found.append(leaf)
            # Not every tensor that cannot be sent has a shape.
            rows.append(f"{place}: {describe(leaf) if amiss is None else 'cannot be sent'}")
        elif wrong is None:
            kind = type(leaf).__qualname__
            wrong = ValueKindError(
                f"`{operation}` takes nested lists, tuples and dicts of tensors; {place} is a {kind}."
            )
    same_call(operation, processes, rows, wrong)
    return found


def same_call(
    operation: str, processes: Processes, rows: Sequence[str] = (), wrong: ShardwiseError | None = None
) -> None:
    """Compare what the processes are about to do. It is the first collective of every operation, alike in all.

    Args:
        operation: its name and settings.
        processes: who compare.
        rows: what each of its tensors is.
        wrong: what is amiss on this process; it is raised here once the others know.

    Raises:
        DistributedOperationException: the processes differ.
    """
    if processes.num_processes == 1:
        if wrong is not None:
            raise wrong
        return
    rank, device, axis = processes.process_index, processes.wire_device(), processes.axis
    # A process with a problem says its rank, so that its text differs from all others and they listen.
    text = "\n".join([operation, *rows]) if wrong is None else f"rank {rank}: {wrong}"
    if same_everywhere(axis, text, device, operation):
        return
    given = gather_values(axis, [str(wrong or ""), operation, *rows], device, f"what was given to {operation}")
    if wrong is not None:
        raise wrong
    table = "\n".join(f"  rank {i}: {line}" for i, line in enumerate(_lines(given)))
    raise DistributedOperationException(
        f"all processes must call the same operation on values of one structure, dtype and shape, but\n{table}\n"
        "Use pad_across_processes first if the shapes differ on purpose."
    )


def _amiss(
    tensor: torch.Tensor, place: str, operation: str, processes: Processes, problem: Callable[[torch.Tensor], str]
) -> ShardwiseError | None:
    if text := problem(tensor):
        return ValueKindError(f"`{operation}`: {place}: {text}.")
    if processes.debug and tensor.device.type != processes.device.type:
        here = processes.device.type
        return DistributedOperationException(
            f"`{operation}`: {place} lies on the {tensor.device.type}, but this process computes on the {here}. "
            f"Move it to the {here} first."
        )
    return None


def _lines(given: list[list[str]]) -> Iterator[str]:
    """One line for each process: what is not the same for all."""
    common = set.intersection(*(set(rows) for _, _, *rows in given))
    for wrong, operation, *rows in given:
        own = [row for row in rows if row not in common]
        more = f", and {len(own) - SHOWN} more" if len(own) > SHOWN else ""
        yield f"`{operation}`, {wrong or ', '.join(own[:SHOWN]) or f'tensors: {len(rows)}'}{more}"
