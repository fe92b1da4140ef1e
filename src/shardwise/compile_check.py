"""`compile`: whether a model can be compiled as the configuration says, before anything is changed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.sharding.blocks import find_blocks

KWARGS = ("mode", "fullgraph", "dynamic", "options")
# With CUDA graphs, which remember the addresses of parameters.
GRAPH_MODES = ("reduce-overhead", "max-autotune")


def check_compile(model: nn.Module, backend: str, kwargs: Mapping[str, Any], stage: int) -> None:
    """Whether the model can be compiled so at this ZeRO stage.

    Raises:
        ConfigError: an unknown back-end, argument or value; a model without blocks, or CUDA graphs, at stage 3.
    """
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ConfigError(f"compile.backend: {backend!r} is unknown; torch knows {', '.join(sorted(known))}.")
    _check_kwargs(backend, kwargs)
    if stage < 3:
        return
    options = kwargs.get("options") or {}
    if kwargs.get("mode") in GRAPH_MODES or options.get("triton.cudagraphs"):
        raise ConfigError(
            "compile.kwargs: CUDA graphs (mode reduce-overhead or max-autotune, option triton.cudagraphs) remember "
            "where parameters lie, which changes with every gather of zero_optimization.stage 3. Write "
            '"mode": "max-autotune-no-cudagraphs" or leave it out, or use stage 2.'
        )
    if not find_blocks(model):
        raise ConfigError(
            f"compile: {type(model).__name__} has no list of blocks (an nn.ModuleList, nn.ModuleDict or nn.Sequential "
            "of at least two modules of one class), and at zero_optimization.stage 3 the model as a whole cannot be "
            "compiled: its parameters are gathered between its modules. Put its repeated part into a list, or use "
            "stage 2, or turn compile off."
        )


def arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments for one call of ``torch.compile``, which takes things out of the options that it is given."""
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in kwargs.items()}


def _check_kwargs(backend: str, kwargs: Mapping[str, Any]) -> None:
    unknown = [name for name in kwargs if name not in KWARGS]
    if unknown:
        raise ConfigError(f"compile.kwargs.{unknown[0]}: unknown; torch.compile takes {', '.join(KWARGS)} here.")
    for name, allowed in (("fullgraph", "true or false"), ("dynamic", "true, false or null")):
        value = kwargs.get(name, False)
        if not isinstance(value, bool) and not (value is None and name == "dynamic"):
            raise ConfigError(f"compile.kwargs.{name}: {value!r} is wrong; write {allowed}.")
    mode, options = kwargs.get("mode"), kwargs.get("options")
    if mode and options:
        raise ConfigError("compile.kwargs: mode and options are both given; torch.compile takes one of the two.")
    if backend == "inductor":
        _check_mode(mode)
        _check_options(options)
    elif options or mode not in (None, "default"):
        name = "options" if options else "mode"
        raise ConfigError(
            f"compile.kwargs.{name}: modes and options are those of the back-end inductor, and compile.backend is "
            f"{backend!r}. Leave {name} out, or use inductor."
        )
    try:
        torch.compile(_nothing, backend=backend, **arguments(kwargs))
    except Exception as error:  # torch raises errors of several kinds, all of them about what it was given
        raise ConfigError(f"compile.kwargs: {error}") from error


def _check_mode(mode: Any) -> None:
    if mode is None:
        return
    from torch._inductor import list_mode_options  # not at import time: it takes a second

    known = list(list_mode_options())
    if mode not in known:
        raise ConfigError(f"compile.kwargs.mode: {mode!r} is unknown; torch knows {', '.join(known)}.")


def _check_options(options: Any) -> None:
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"compile.kwargs.options: {options!r} is no object; write names of options with their values."
        )
    from torch._inductor import list_options

    known = [*list_options(), "guard_filter_fn"]
    for name in options:
        if str(name).replace("-", "_") not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "torch._inductor.list_options() lists them."
            raise ConfigError(f"compile.kwargs.options.{name}: unknown to torch's inductor; {hint}")


def _nothing() -> None:
    """For torch to look at the arguments; compiled when called, which it is not."""
