"""Which parameters travel together: cuts a model into units, and says which modules need which of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwise.sharding.access import external_parameters
from shardwise.sharding.blocks import holds_blocks
from shardwise.sharding.policy import POLICIES, Policy

if TYPE_CHECKING:
    from shardwise.config.sections import ZeroSection

# Units that need not follow a module are merged up to this size: large enough that a collective's latency does not
# count, small enough that several travel while the backward goes on.
MERGED_NUMEL = 4 * 1024 * 1024
# A larger module is never made a leaf because its submodules are small: it would all be in memory at once.
MAX_LEAF_NUMEL = 1_000_000_000


@dataclass
class UnitPlan:
    """A unit to be built."""

    name: str
    params: list[tuple[str, nn.Parameter]]
    dtype: torch.dtype
    policy: Policy
    by_rows: bool = False

    @property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return sum(p.numel() for _, p in self.params)


@dataclass
class ScopePlan:
    """A module whose forward and backward need its parameters whole."""

    name: str
    module: nn.Module
    params: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    external: list[nn.Parameter] = field(default_factory=list)


def plan_scopes(model: nn.Module, zero: ZeroSection) -> list[ScopePlan]:
    """The modules around which parameters are gathered, in the model's order; the model itself is the first.

    A scope is a leaf module named in the configuration or found by ``stage3_module_granularity_threshold``, or a member
    of a list of at least two modules of one class (the model's blocks; its whole subtree is one scope, so that branches
    inside a block do not make ranks diverge), or any other module that owns parameters itself.
    """
    leaves, fine = zero.leaf_module, _fine_grained(model, zero.stage3_module_granularity_threshold)
    root = ScopePlan("", model)
    scopes = [root]

    def visit(module: nn.Module, name: str, is_block: bool) -> None:
        whole = is_block or id(module) in fine or _is_leaf(module, name, leaves)
        params = _named(module, name, recurse=whole)
        scope = root
        if module is not model and params:
            scope = ScopePlan(name, module)
            scopes.append(scope)
        scope.params.extend(params)
        if whole:
            return
        blocks = holds_blocks(module)
        for child_name, child in module.named_children():
            # A list inside a list is no block: it has no forward around which to gather.
            is_block = blocks and not isinstance(child, nn.ModuleList | nn.ModuleDict)
            visit(child, f"{name}.{child_name}" if name else child_name, is_block)

    visit(model, "", False)
    scope_of = {id(s.module): s for s in scopes}
    for name, module in model.named_modules():
        for param in external_parameters(module):
            scope = scope_of.get(id(module)) or ScopePlan(name, module)
            if id(module) not in scope_of:
                scope_of[id(module)] = scope
                scopes.append(scope)
            scope.external.append(param)
    return scopes


def plan_units(
    scopes: list[ScopePlan],
    policy: Policy,
    zero: ZeroSection,
    low_dtype: torch.dtype | None,
    by_rows: Collection[int] = (),
) -> list[UnitPlan]:
    """Cut the scopes' parameters into units.

    Frozen and trained parameters and different dtypes never share a unit. Where parameters are released (stage 3) a
    unit belongs to one scope; small parameters (``stage3_param_persistence_threshold``) rest whole, by the policy of
    stage 2. Where nothing is released neighbours are merged. No unit is larger than the bucket sizes, except one
    parameter that is.

    Args:
        scopes: from :func:`plan_scopes`.
        policy: the row of the stage.
        zero: ``zero_optimization``.
        low_dtype: the dtype that fp16 or bf16 training casts floating-point parameters to.
        by_rows: ids of parameters whose gradients are exchanged by rows; each is a unit of its own.
    """
    cap = min(
        zero.reduce_bucket_size, zero.allgather_bucket_size if policy.shard_optimizer else zero.reduce_bucket_size
    )
    seen: set[int] = set()
    plans: list[UnitPlan] = []
    merged: dict[tuple[bool, torch.dtype], UnitPlan] = {}
    resting = POLICIES[2] if policy.release_params else policy
    persistent_left = zero.stage3_model_persistence_threshold
    for scope in scopes:
        own: dict[tuple[bool, torch.dtype], UnitPlan] = {}
        for name, param in scope.params:
            if id(param) in seen:
                continue
            seen.add(id(param))
            dtype = low_dtype if low_dtype is not None and param.dtype.is_floating_point else param.dtype
            key = (param.requires_grad, dtype)
            rests = not policy.release_params
            if not rests and param.numel() <= min(zero.stage3_param_persistence_threshold, persistent_left):
                rests = True
                persistent_left -= param.numel()
            pool, row, limit = (merged, resting, min(cap, MERGED_NUMEL)) if rests else (own, policy, cap)
            plan = pool.get(key)
            # Not where parameters are released: ranks that run different modules reduce in different orders there, and
            # how many rows there are is asked for at once.
            if id(param) in by_rows and param.requires_grad and rests:
                plan = UnitPlan(name, [], dtype, row, by_rows=True)
                plans.append(plan)
            elif plan is None or plan.numel + param.numel() > limit:
                plan = pool[key] = UnitPlan(name, [], dtype, row)
                plans.append(plan)
            plan.params.append((name, param))
    for plan in plans:
        if len(plan.params) > 1:
            plan.name = f"{plan.params[0][0]}..{plan.params[-1][0]}"
    return plans


def _named(module: nn.Module, name: str, *, recurse: bool) -> list[tuple[str, nn.Parameter]]:
    prefix = f"{name}." if name else ""
    return [(prefix + n, p) for n, p in module.named_parameters(recurse=recurse)]


def _fine_grained(model: nn.Module, threshold: int) -> set[int]:
    """The ids of the modules below the model that hold at most ``threshold`` parameters a submodule.

    Submodules count, the module itself included, if they have parameters and are no mere containers.
    """
    if not threshold:
        return set()
    found = set()
    for module in model.modules():
        parts = [m for m in module.modules() if not isinstance(m, nn.ModuleList | nn.ModuleDict | nn.Sequential)]
        counted = sum(any(True for _ in m.parameters()) for m in parts)
        numel = sum(p.numel() for p in module.parameters())
        is_tree = len(parts) > 1 and module in parts and module is not model
        if is_tree and 0 < numel <= MAX_LEAF_NUMEL and numel // counted <= threshold:
            found.add(id(module))
    return found


def _is_leaf(module: nn.Module, name: str, leaves: object) -> bool:
    classes: tuple[str, ...] = tuple(getattr(leaves, "classes", ()) or ())
    names: tuple[str, ...] = tuple(getattr(leaves, "names", ()) or ())
    suffixes: tuple[str, ...] = tuple(getattr(leaves, "name_suffixes", ()) or ())
    kind = type(module)
    return (
        kind.__name__ in classes
        or f"{kind.__module__}.{kind.__qualname__}" in classes
        or name in names
        or any(name.endswith(s) for s in suffixes)
    )
