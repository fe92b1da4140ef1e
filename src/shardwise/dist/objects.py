"""Values of any size from rank to rank: tensors whose shapes the others do not know yet, text, numbers, nested.

These are for batches, metrics and messages, not for parameters: each call tells the others first what comes, and waits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.dist.comm import Axis
from shardwise.dist.values import ValueKindError, pack, unpack
from shardwise.dist.words import broadcast_text
from shardwise.errors import CommError

# Each of these collectives is waited for before the next begins, so one tag serves all.
TAG = 1


def broadcast_value(axis: Axis, value: Any, position: int, device: torch.device, key: str) -> Any:
    """A value of one rank, on all of them. All ranks must call this.

    Args:
        axis: the ranks.
        value: on the rank at ``position``, what :func:`shardwise.dist.values.pack` takes; elsewhere not used.
        position: who gives.
        device: where the tensors of the value arrive. Tensors of the giver that lie elsewhere are copied there.
        key: what is sent, for errors.

    Raises:
        ValueKindError: the value cannot be sent, on all ranks.
    """
    if axis.size == 1:
        return value
    text, problem = "", ""
    tensors: list[torch.Tensor] = []
    if axis.position == position:
        try:
            text, tensors = pack(value)
        except ValueKindError as error:
            problem = str(error)
    note = broadcast_text(axis, "!" + problem if problem else "=" + text, position, device, key)
    if note.startswith("!"):
        raise ValueKindError(f"{key}: {note[1:]}")
    if axis.position == position:
        shapes = [(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in tensors]
        broadcast_text(axis, pack(shapes)[0], position, device, key)
    else:
        shapes = unpack(broadcast_text(axis, "", position, device, key), [])
    arrived = []
    for i, (dtype, shape) in enumerate(shapes):
        if axis.position == position:
            here = tensors[i].to(device).contiguous()
        else:
            here = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        axis.broadcast(here, position, key)
        arrived.append(here)
    return value if axis.position == position else unpack(note[1:], arrived)


def gather_values(axis: Axis, value: Any, device: torch.device, key: str) -> list[Any]:
    """Every rank's value, on all of them, in the order of the ranks. All ranks must call this.

    Tensors arrive on the CPU. Args and errors as for :func:`broadcast_value`; one rank's refusal is everyone's error.
    """
    if axis.size == 1:
        return [value]
    try:
        text, tensors = pack(value)
        note = "=" + text
    except ValueKindError as error:
        note, tensors = f"!rank {axis.ranks[axis.position]}: {error}", []
    blocks = [t.cpu().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
    heads = [note.encode("utf-8", "surrogatepass"), pack([_head(t) for t in tensors])[0].encode()]
    lengths = torch.tensor([len(h) for h in heads], dtype=torch.int64).view(torch.uint8)
    mine = [lengths, *(torch.frombuffer(bytearray(h), dtype=torch.uint8) for h in heads if h), *blocks]
    parts = gather_bytes(axis, torch.cat(mine), device, key)
    found = [_parse(part.cpu()) for part in parts]
    refused = [text[1:] for text, _ in found if text.startswith("!")]
    if refused:
        raise ValueKindError(f"{key}: {refused[0]}")
    return [value if i == axis.position else unpack(text[1:], tensors) for i, (text, tensors) in enumerate(found)]


def gather_bytes(axis: Axis, mine: torch.Tensor, device: torch.device, key: str) -> list[torch.Tensor]:
    """Every rank's uint8 vector, of any length, on ``device``. All ranks must call this."""
    lengths = torch.zeros(axis.size, dtype=torch.float64, device=device)
    lengths[axis.position] = mine.numel()
    axis.sum_small(lengths, f"lengths of {key}")
    sizes = [int(n) for n in lengths.tolist()]
    longest = max(sizes)
    flat = torch.empty(longest * axis.size, dtype=torch.uint8, device=device)
    own = axis.slice_of(flat)
    own[: mine.numel()].copy_(mine)
    axis.all_gather(flat, own, key, TAG).wait()
    return [flat[i * longest : i * longest + n] for i, n in enumerate(sizes)]


def gather_tensor(axis: Axis, tensor: torch.Tensor, key: str) -> torch.Tensor:
    """Every rank's tensor, one after the other along the first dimension. All ranks must call this.

    Args:
        axis: the ranks.
        tensor: ``[n, ...]``, of the same dtype and shape on every rank; a single number counts as ``[1]``.
        key: what is gathered, for errors.

    Raises:
        CommError: the ranks' shapes or dtypes differ; on all ranks, with a list of them.
    """
    if axis.size == 1:
        return tensor
    require_same_shape(axis, tensor, key)
    return gather_alike(axis, [tensor], key)[0]


def gather_alike(axis: Axis, tensors: Sequence[torch.Tensor], key: str) -> list[torch.Tensor]:
    """:func:`gather_tensor` of several at once, whose shapes and dtypes are known to agree."""
    whole, handles = [], []
    for i, tensor in enumerate(tensors):
        mine = tensor.detach()
        mine = mine.reshape(1) if mine.dim() == 0 else mine
        flat = mine.new_empty((mine.shape[0] * axis.size, *mine.shape[1:]))
        whole.append(flat)
        if not mine.numel():
            continue
        own = axis.slice_of(flat.view(-1))
        own.view(mine.shape).copy_(mine)
        # As bytes: gloo knows no bool and no 16 bits of some kinds. All are under way at once, so each has its tag.
        handles.append(axis.all_gather(flat.view(-1).view(torch.uint8), own.view(torch.uint8), key, TAG + i))
    for handle in handles:
        handle.wait()
    return whole


def same_everywhere(axis: Axis, text: str, device: torch.device, key: str) -> bool:
    """Whether every rank gives the same text, in one small collective. All ranks must call this.

    What is compared is 62 bits of a hash: the largest of the ranks' is the smallest only where all are one.
    """
    if axis.size == 1:
        return True
    digest = int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") >> 2
    both = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
    axis.max_small(both, f"agreement on {key}")
    largest, negative = both.tolist()
    return bool(largest == -negative)


def shapes_of(axis: Axis, tensor: torch.Tensor, key: str) -> list[tuple[str, tuple[int, ...]]]:
    """Every rank's dtype and shape. All ranks must call this."""
    heads: list[tuple[str, tuple[int, ...]]] = gather_values(axis, _head(tensor), tensor.device, f"shape of {key}")
    return heads


def require_same_shape(axis: Axis, tensor: torch.Tensor, key: str) -> None:
    """Compare the ranks' tensors by dtype and shape. All ranks must call this, and all raise or none.

    Raises:
        CommError: they differ.
    """
    if same_everywhere(axis, repr(_head(tensor)), tensor.device, f"shape of {key}"):
        return
    rows = "\n".join(
        f"  rank {axis.ranks[i]}: {dtype} {list(shape)}"
        for i, (dtype, shape) in enumerate(shapes_of(axis, tensor, key))
    )
    raise CommError(
        f"`{key}` needs tensors of one shape and dtype on all ranks, but they are\n{rows}\n"
        "Use pad_across_processes first if they differ on purpose."
    )


def _head(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _parse(raw: torch.Tensor) -> tuple[str, list[torch.Tensor]]:
    """The text and the tensors in one rank's bytes."""
    text_length, head_length = raw[:16].clone().view(torch.int64).tolist()
    at = 16 + text_length
    text = bytes(raw[16:at].tolist()).decode("utf-8", "surrogatepass")
    heads = unpack(bytes(raw[at : at + head_length].tolist()).decode(), [])
    at += head_length
    tensors = []
    for dtype, shape in heads:
        kind = getattr(torch, dtype)
        size = torch.Size(shape).numel() * kind.itemsize
        # A copy: a view of another dtype must lie on a multiple of its size.
        tensors.append(raw[at : at + size].clone().view(kind).reshape(shape))
        at += size
    return text, tensors
