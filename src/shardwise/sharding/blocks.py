"""Finds the repeated blocks of a model: what is gathered, checkpointed or compiled as one."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def holds_blocks(module: nn.Module) -> bool:
    """Whether the module is a list of blocks: at least two members with parameters, all of one class."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return False
    members = [m for m in module.children() if _has_parameters(m)]
    return len(members) > 1 and len({type(m) for m in members}) == 1


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The members of the model's outermost block lists, in the model's order, by name.

    A list of single layers of torch (the ``nn.Linear`` of an MLP in an ``nn.Sequential``) is no list of blocks here:
    there is nothing inside them that could be recomputed or fused. Neither are lists in a list; their members are.
    """
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def visit(module: nn.Module, name: str) -> None:
        blocks = holds_blocks(module) and not all(_is_layer(m) for m in module.children() if _has_parameters(m))
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            if id(child) in seen:
                continue
            seen.add(id(child))
            if blocks and not isinstance(child, nn.ModuleList | nn.ModuleDict) and _has_parameters(child):
                found[path] = child
            else:
                visit(child, path)

    visit(model, "")
    return found


def names_of(blocks: dict[str, nn.Module]) -> str:
    """``model.layers.0 .. model.layers.11`` for a message."""
    names = list(blocks)
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


def _is_layer(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None


def _has_parameters(module: nn.Module) -> bool:
    first: Iterator[nn.Parameter] = module.parameters()
    return next(first, None) is not None
