"""Which parameters Muon steps: the hidden matrices of a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from shardwise.errors import ConfigError
from shardwise.messages import logger

# The parts of names by which input and output layers go; `embed` and `lm_head` anywhere in a part.
_ENDS_BY_NAME = frozenset({"wte", "wpe", "head", "heads", "classifier", "score", "output_projection"})
_MUON_ONLY = ("momentum", "ns_method")
_ADAM_ONLY = ("betas", "eps")


class Hidden:
    """Tells hidden matrices from the rest, and remembers names for the report.

    A parameter is hidden when it has two dimensions, both above 1, and is not part of an embedding or of the output
    layer: not a parameter of ``nn.Embedding`` or ``nn.EmbeddingBag`` (nor tied to one), not the weight of the
    model's ``get_output_embeddings()``, and no part of its name contains ``embed`` or ``lm_head`` or is one of
    ``wte``, ``wpe``, ``head``, ``heads``, ``classifier``, ``score``, ``output_projection``. A parameter's attribute
    ``use_muon`` (True or False) beats the rule.

    Args:
        model: the model, or None where the parameters come with their names.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._names: dict[int, str] = {}
        self._ends: set[int] = set()
        if model is None:
            return
        for name, param in model.named_parameters(remove_duplicate=False):
            self.name(name, param)
        for module in model.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                self._ends.update(id(p) for p in module.parameters(recurse=False))
        output = getattr(model, "get_output_embeddings", lambda: None)()
        if isinstance(output, nn.Module):
            self._ends.update(id(p) for p in output.parameters())

    def name(self, name: str, param: Any) -> None:
        """Learn a name of a parameter; one name of an input or output layer is enough for it to be one."""
        self._names.setdefault(id(param), name)
        parts = name.lower().split(".")
        if _ENDS_BY_NAME & set(parts) or any("embed" in part or "lm_head" in part for part in parts):
            self._ends.add(id(param))

    def __call__(self, param: Any) -> bool:
        """Whether Muon steps the parameter.

        Raises:
            ConfigError: it is a matrix of which nothing is known.
        """
        said = getattr(param, "use_muon", None)
        if said is not None:
            return bool(said)
        if param.dim() != 2 or min(param.shape) <= 1:
            return False
        if id(param) not in self._names:
            raise ConfigError(
                f"optimizer.type: Muon cannot tell whether a matrix of shape {tuple(param.shape)} is a hidden one: it "
                "is not a parameter of the model. Set its attribute use_muon to True or False."
            )
        return id(param) not in self._ends

    def named(self, params: Iterable[Any]) -> list[str]:
        """The names of parameters, where known."""
        return [self._names.get(id(p), f"a parameter of shape {tuple(p.shape)}") for p in params]


def split_groups(params: Iterable[Any], model: nn.Module | None) -> list[dict[str, Any]]:
    """Groups for Muon and for AdamW, out of parameters, (name, parameter) pairs or groups; reported once.

    A group's own settings go to both halves, but those that only one of them has.
    """
    hidden = Hidden(model)
    groups: list[dict[str, Any]] = []
    loose: list[Any] = []
    for item in params:
        groups.append(dict(item)) if isinstance(item, Mapping) else loose.append(item)
    if loose:
        groups.append({"params": loose})
    halves: list[dict[str, Any]] = []
    for group in groups:
        members = [_unnamed(p, hidden) for p in _as_list(group["params"])]
        chosen = [hidden(p) for p in members]
        for use_muon in (True, False):
            half = [p for p, is_hidden in zip(members, chosen, strict=True) if is_hidden == use_muon]
            other = _ADAM_ONLY if use_muon else _MUON_ONLY
            settings = {k: v for k, v in group.items() if k not in other}
            if half:
                halves.append({**settings, "params": half, "use_muon": use_muon})
    _report(halves, hidden)
    return halves


def _as_list(params: Any) -> list[Any]:
    return [params] if hasattr(params, "requires_grad") else list(params)


def _unnamed(item: Any, hidden: Hidden) -> Any:
    if isinstance(item, tuple):
        hidden.name(*item)
        return item[1]
    return item


def _report(halves: list[dict[str, Any]], hidden: Hidden) -> None:
    if dist.is_initialized() and dist.get_rank():
        return
    for use_muon, who in ((True, "Muon"), (False, "AdamW")):
        names = hidden.named(p for half in halves if half["use_muon"] == use_muon for p in half["params"])
        # One line for the same parameter of all blocks.
        shown = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name) for name in names)
        logger.info("optimizer Muon: %s steps %d parameters: %s", who, len(names), ", ".join(shown) or "none")
