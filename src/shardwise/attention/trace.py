"""A symbolic trace of one module's own forward, its children left as calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shardwise import _torch
from shardwise.attention.backend import Unsuitable
from shardwise.attention.install import original_forward

# What a call may have besides tensors: it becomes part of the trace, so another value is another trace.
CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device)

UNTRACEABLE = "it cannot be traced"


@dataclass(frozen=True)
class Call:
    """The arguments of a call, taken apart.

    Attributes:
        tensors: in order.
        key: everything that a trace depends on: the structure, the constants, the tensors' ranks, dtypes and devices,
            and the module's own plain attributes (``training`` is one).
    """

    tensors: list[torch.Tensor]
    leaves: list[Any]
    spec: TreeSpec
    key: tuple[Any, ...]

    @property
    def sizes(self) -> tuple[Any, ...]:
        """The tensors' shapes, for a trace that holds for these alone."""
        return tuple(tuple(t.shape) for t in self.tensors)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call, put together again."""
        args, kwargs = tree_unflatten(self.leaves, self.spec)
        return args, kwargs


@dataclass(frozen=True)
class Traced:
    """What a trace gave.

    Attributes:
        root: a stand-in for the module, to look things up on.
        graph: placeholders are the call's tensors, then ``constants``.
        constants: tensors that the forward makes from nothing but numbers, by the name of their placeholder.
    """

    root: nn.Module
    graph: fx.Graph
    constants: dict[str, torch.Tensor]

    def function(self) -> Callable[..., Any]:
        """The graph as a function of a module like the one that was traced, the call's tensors, and the constants."""
        self.graph.lint()
        return original_forward(fx.GraphModule(self.root, self.graph))


def describe(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Take a call apart.

    Raises:
        Unsuitable: an argument is an object that a trace cannot hold.
    """
    leaves, spec = tree_flatten((args, dict(kwargs)))
    kinds: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            kinds.append((leaf.dim(), leaf.dtype, leaf.device))
        elif isinstance(leaf, CONSTANTS):
            kinds.append((type(leaf), leaf))
        else:
            raise Unsuitable(f"it is called with a {type(leaf).__name__}")
    plain = tuple((k, v) for k, v in module.__dict__.items() if isinstance(v, bool | int | float | str))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return Call(tensors, leaves, spec, (str(spec), tuple(kinds), plain))


class _Input(fx.Proxy):
    """An argument of the forward, whose rank, dtype and device are part of the key, so that code may ask for them.

    With ``sized`` its shape is as well: code that builds tensors from lengths, or branches on them, can be traced.
    """

    def __init__(self, node: fx.Node, tracer: fx.Tracer, example: torch.Tensor, sized: bool) -> None:
        super().__init__(node, tracer)
        self._shape = example.shape if sized else None
        self._rank = example.dim()
        self._known = {"dtype": example.dtype, "device": example.device, "ndim": example.dim()}

    def __getattr__(self, name: str) -> Any:
        known = self.__dict__.get("_known", {})
        if name in known:
            return known[name]
        if name == "shape":
            return self.size()
        return super().__getattr__(name)

    def dim(self) -> int:
        return self._rank

    def size(self, dim: int | None = None) -> Any:
        if self._shape is not None:
            return self._shape if dim is None else self._shape[dim]
        if dim is not None:
            return self.tracer.create_proxy("call_method", "size", (self, dim), {})
        return tuple(self.size(i) for i in range(self.dim()))


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, call: Call, sized: bool) -> None:
        einops = sys.modules.get("einops")
        wrapped = () if einops is None else (einops.rearrange, einops.repeat)
        super().__init__(autowrap_functions=wrapped)
        self.trace_asserts = True
        self._call = call
        self._sized = sized

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True  # a child entered here would not run its hooks

    def iter(self, obj: Any) -> Iterator[Any]:
        """Also through the pieces of a ``chunk``, whose number is known."""
        node = obj.node
        if node.target in {"chunk", torch.chunk}:
            pieces = node.args[1] if len(node.args) > 1 else node.kwargs.get("chunks")
            if isinstance(pieces, int):
                return iter([obj[i] for i in range(pieces)])
        return super().iter(obj)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        leaves = list(self._call.leaves)
        position = 0
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                node = self.create_node("placeholder", f"input_{position}", (), {})
                leaves[i] = _Input(node, self, leaf, self._sized)
                position += 1
        args, kwargs = tree_unflatten(leaves, self._call.spec)
        return lambda root: root_fn(root, *args, **kwargs), [self.root]


def stand_in(module: nn.Module) -> nn.Module:
    """A module with the same class, children, parameters and attributes, to try things on."""
    copy: nn.Module = object.__new__(type(module))
    tables = ("_parameters", "_buffers", "_modules")
    copy.__dict__ = {k: dict(v) if k in tables else v for k, v in module.__dict__.items() if k != "forward"}
    return copy


def trace(module: nn.Module, call: Call, *, sized: bool = False) -> Traced:
    """The graph of a module's forward for calls like this one.

    Args:
        module: unchanged.
        call: from :func:`describe`.
        sized: the trace shall hold for these shapes only.

    Raises:
        Unsuitable: the forward cannot be traced, with the reason.
    """
    root = stand_in(module)
    before = _attributes(root)
    random = _random_state()
    try:
        graph = _Tracer(call, sized).trace(root)
    except Exception as error:  # whatever the user's code raises when it meets a value that is not there
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise Unsuitable(f"{UNTRACEABLE}: {first[:120]}") from error
    if random is not None and not random.equal(torch.get_rng_state()):
        torch.set_rng_state(random)
        raise Unsuitable("it draws random numbers beside its dropout")
    after = _attributes(root)
    changed = sorted(k for k in before.keys() | after.keys() if before.get(k) is not after.get(k))
    made = [k for k in changed if k.startswith(_CONSTANT) and isinstance(after[k], torch.Tensor)]
    kept = [k for k in changed if k not in made]
    if kept:
        raise Unsuitable(f"its forward keeps something in self.{kept[0].split('/')[-1]}")
    return Traced(root, graph, _as_inputs(graph, {k: after[k] for k in made}))


# fx's names of tensors that exist while a forward is traced.
_CONSTANT = "_tensor_constant"


def _as_inputs(graph: fx.Graph, constants: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make tensors that the module does not have into inputs of the graph."""
    places: dict[str, fx.Node] = {}
    last = [n for n in graph.nodes if n.op == "placeholder"][-1:]
    for node in list(graph.nodes):
        if node.op != "get_attr" or node.target not in constants:
            continue
        name = str(node.target)
        if name not in places:
            with graph.inserting_after(last[0]) if last else graph.inserting_before(next(iter(graph.nodes))):
                places[name] = graph.placeholder(name.lstrip("_"))
            last = [places[name]]
        node.replace_all_uses_with(places[name])
        graph.erase_node(node)
    return {place.name: constants[name] for name, place in places.items()}


def _random_state() -> torch.Tensor | None:
    """The state of the CPU's generator; None in a dry run, whose random numbers are none."""
    return None if _torch.is_fake(torch.empty(0)) else torch.get_rng_state()


def _attributes(module: nn.Module) -> dict[str, Any]:
    found = dict(module.__dict__)
    for table in ("_parameters", "_buffers", "_modules"):
        found.update({f"{table}/{k}": v for k, v in found.pop(table).items()})
    return found
