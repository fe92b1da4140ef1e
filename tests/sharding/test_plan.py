"""Which parameters travel together, and around which modules they are gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwise.config.sections import ZeroSection
from shardwise.sharding.plan import MERGED_NUMEL, ScopePlan, UnitPlan, plan_scopes, plan_units
from shardwise.sharding.policy import POLICIES
from tests.sharding.harness import WIDTH
from tests.sharding.models import Block, Stack, Tokens


def zero(**keys: Any) -> ZeroSection:
    return ZeroSection.model_validate({"stage": 3, "stage3_param_persistence_threshold": 0, **keys})


def scopes_of(model: nn.Module, **keys: Any) -> dict[str, list[str]]:
    return {scope.name: [name for name, _ in scope.params] for scope in plan_scopes(model, zero(**keys))}


def units_of(model: nn.Module, stage: int, low: torch.dtype | None = None, **keys: Any) -> list[UnitPlan]:
    section = zero(**keys)
    return plan_units(plan_scopes(model, section), POLICIES[stage], section, low)


def names(unit: UnitPlan) -> list[str]:
    return [name for name, _ in unit.params]


def all_names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


# ---------------------------------------------------------------- scopes


def test_a_language_model() -> None:
    scopes = scopes_of(Tokens())
    assert list(scopes) == ["", "tok", "blocks.0", "blocks.1", "head"]
    assert scopes[""] == ["pos"], "the root's own parameters"
    assert scopes["blocks.0"] == [f"blocks.0.{n}" for n in all_names(Block())], "a block is one scope"
    assert scopes["head"] == ["head.weight"]


def test_tied_weights_are_in_both_scopes() -> None:
    model = Tokens("module")
    scopes = {s.name: s for s in plan_scopes(model, zero())}
    assert scopes["tok"].params[0][1] is scopes["head"].params[0][1] is model.tok.weight


def test_a_sequence_of_different_modules_is_no_block_list() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.LayerNorm(2), nn.Sequential(nn.Linear(2, 2)))
    assert list(scopes_of(model)) == ["", "0", "2", "3.0"]


def test_a_sequence_of_equal_modules_is_one() -> None:
    model = nn.Sequential(Block(), nn.Tanh(), Block())
    assert list(scopes_of(model)) == ["", "0", "2"]


def test_one_block_alone_is_cut_into_its_modules() -> None:
    model = nn.ModuleList([Block()])
    assert list(scopes_of(model)) == ["", "0.norm", "0.up", "0.down"]


def test_nested_lists() -> None:
    model = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
    # Members of the outer list never run themselves: lists have no forward to hang a gather on.
    assert list(scopes_of(model)) == ["", "0.0", "0.1", "1.0", "1.1"]


def test_a_dict_of_blocks() -> None:
    model = nn.ModuleDict({"encoder": Block(), "decoder": Block()})
    assert list(scopes_of(model)) == ["", "encoder", "decoder"]


def test_the_root_with_parameters_of_its_own_is_the_first_scope() -> None:
    assert scopes_of(nn.Linear(2, 2)) == {"": ["weight", "bias"]}
    assert scopes_of(nn.Tanh()) == {"": []}


@pytest.mark.parametrize(
    "leaf",
    [{"classes": ["Block"]}, {"classes": ["tests.sharding.models.Block"]}, {"names": ["0"]}, {"name_suffixes": ["0"]}],
)
def test_leaf_modules(leaf: dict[str, Any]) -> None:
    model = nn.Sequential(Block(), nn.Linear(WIDTH, 2))
    assert list(scopes_of(model)) == ["", "0.norm", "0.up", "0.down", "1"]
    scopes = scopes_of(model, leaf_module=leaf)
    assert list(scopes) == ["", "0", "1"]
    assert scopes["0"] == [f"0.{n}" for n in all_names(Block())]


def test_fine_grained_modules_are_leaves() -> None:
    model = nn.Sequential(Block(), nn.Linear(WIDTH, 2))
    numel = sum(p.numel() for p in model[0].parameters())
    parts = len([m for m in model[0].modules() if any(True for _ in m.parameters())])
    just_below, just_enough = numel // parts - 1, numel // parts
    assert list(scopes_of(model, stage3_module_granularity_threshold=just_below)) == [
        "",
        "0.norm",
        "0.up",
        "0.down",
        "1",
    ]
    assert list(scopes_of(model, stage3_module_granularity_threshold=just_enough)) == ["", "0", "1"]


def test_the_whole_model_as_a_leaf() -> None:
    assert scopes_of(Stack(), leaf_module={"classes": ["Stack"]}) == {"": all_names(Stack())}


# ---------------------------------------------------------------- units


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_neighbours_are_merged_where_nothing_is_released(stage: int) -> None:
    (unit,) = units_of(Stack(), stage)
    assert sorted(names(unit)) == sorted(all_names(Stack()))
    assert unit.name == f"{names(unit)[0]}..{names(unit)[-1]}"
    assert unit.policy is POLICIES[stage]


def test_stage_3_cuts_by_scope() -> None:
    model = Tokens()
    units = units_of(model, 3)
    assert [u.name for u in units] == [
        "pos",
        "tok.weight",
        "blocks.0.norm.weight..blocks.0.down.bias",
        "blocks.1.norm.weight..blocks.1.down.bias",
        "head.weight",
    ]
    assert all(u.policy is POLICIES[3] for u in units)


@pytest.mark.parametrize("stage", [0, 3])
def test_tied_weights_are_in_one_unit_once(stage: int) -> None:
    units = units_of(Tokens("module"), stage)
    assert sorted(n for u in units for n in names(u)) == sorted(all_names(Tokens("module")))


@pytest.mark.parametrize("key", ["reduce_bucket_size", "allgather_bucket_size"])
@pytest.mark.parametrize("stage", [1, 3])
def test_bucket_caps(stage: int, key: str) -> None:
    up = 2 * WIDTH * WIDTH
    assert max(u.numel for u in units_of(Stack(), stage, **{key: up})) == up
    units = units_of(Stack(), stage, **{key: up - 1})
    assert [names(u) for u in units if u.numel >= up] == [
        [f"blocks.{i}.{name}.weight"] for i in range(3) for name in ("up", "down")
    ], "a parameter that is larger travels alone"
    assert all(u.numel < up for u in units if len(u.params) > 1)
    assert all(len(u.params) == 1 for u in units_of(Stack(), stage, **{key: 1}))


def test_nothing_is_gathered_at_stage_0() -> None:
    assert len(units_of(Stack(), 0, allgather_bucket_size=1)) == 1
    assert all(len(u.params) == 1 for u in units_of(Stack(), 0, reduce_bucket_size=1))


def test_merged_units_have_a_size_of_their_own() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(10)])
    sizes = [u.numel for u in units_of(model, 1)]
    assert max(sizes) <= MERGED_NUMEL and len(sizes) == 3
    assert len(units_of(model, 3)) == 10


def test_frozen_parameters_travel_apart() -> None:
    model = Stack()
    model.first.requires_grad_(False)
    model.blocks[1].up.bias.requires_grad_(False)
    for stage in (1, 3):
        units = units_of(model, stage)
        assert all(len({p.requires_grad for _, p in u.params}) == 1 for u in units)
        frozen = [n for u in units if not u.params[0][1].requires_grad for n in names(u)]
        assert frozen == ["first.weight", "first.bias", "blocks.1.up.bias"]


def test_dtypes_travel_apart() -> None:
    model = Stack()
    model.last.double()
    model.register_parameter("table", nn.Parameter(torch.arange(4), requires_grad=False))
    for stage in (1, 3):
        units = units_of(model, stage)
        assert {u.dtype for u in units} == {torch.float32, torch.float64, torch.int64}
        assert all(p.dtype is u.dtype for u in units for _, p in u.params)
        low = units_of(model, stage, torch.bfloat16)
        assert {u.dtype for u in low} == {torch.bfloat16, torch.int64}, "integers are not cast"
    assert len(units_of(model, 1, torch.bfloat16)) == 2, "float32 and float64 are one once they are cast"


def test_small_parameters_rest_whole() -> None:
    up = 2 * WIDTH * WIDTH
    units = units_of(Stack(), 3, stage3_param_persistence_threshold=up - 1)
    resting = [n for u in units if u.policy is POLICIES[2] for n in names(u)]
    assert resting == [n for n, p in Stack().named_parameters() if p.numel() < up]
    assert len([u for u in units if u.policy is POLICIES[2]]) == 1, "over the scopes, in one unit"
    assert all(u.policy is POLICIES[2] for u in units_of(Stack(), 3, stage3_param_persistence_threshold=up))


def test_not_more_than_the_models_threshold_rests() -> None:
    units = units_of(
        Stack(), 3, stage3_param_persistence_threshold=16, stage3_model_persistence_threshold=2 * WIDTH + 3
    )
    resting = [n for u in units if u.policy is POLICIES[2] for n in names(u)]
    assert sum(Stack().get_parameter(n).numel() for n in resting) <= 2 * WIDTH + 3
    assert resting[:2] == ["first.bias", "blocks.0.norm.weight"] and len(resting) == 3


def test_no_parameters() -> None:
    assert units_of(nn.Tanh(), 3) == [] and units_of(nn.Tanh(), 0) == []


def test_empty_parameters_are_planned() -> None:
    model = nn.Module()
    model.register_parameter("nothing", nn.Parameter(torch.empty(0, 3)))
    (unit,) = units_of(model, 3)
    assert unit.numel == 0 and names(unit) == ["nothing"]


shapes = st.lists(st.integers(0, 40), min_size=1, max_size=6)


@given(
    groups=st.lists(st.tuples(shapes, st.booleans(), st.booleans()), min_size=1, max_size=5),
    stage=st.integers(0, 3),
    cap=st.integers(1, 100),
    threshold=st.integers(0, 50),
)
@settings(max_examples=60, deadline=None)
def test_every_parameter_is_in_exactly_one_unit(groups: Any, stage: int, cap: int, threshold: int) -> None:
    model = nn.Module()
    for i, (sizes, frozen, wide) in enumerate(groups):
        part = nn.Module()
        for j, size in enumerate(sizes):
            value = torch.zeros(size, dtype=torch.float64 if wide else torch.float32)
            part.register_parameter(f"p{j}", nn.Parameter(value, requires_grad=not frozen))
        model.add_module(f"m{i}", part)
    units = units_of(model, stage, reduce_bucket_size=cap, stage3_param_persistence_threshold=threshold)
    assert sorted(n for u in units for n in names(u)) == sorted(all_names(model))
    for unit in units:
        assert len({(p.requires_grad, p.dtype) for _, p in unit.params}) == 1
        assert unit.numel <= cap or sum(p.numel() > 0 for _, p in unit.params) == 1
        assert unit.policy.stage in ({2, 3} if stage == 3 else {stage})
        if unit.policy is POLICIES[3]:
            assert len({name.split(".")[0] for name in names(unit)}) == 1


def test_a_scope_lists_the_parameters_its_module_owns() -> None:
    scope: ScopePlan = plan_scopes(Stack(), zero())[1]
    assert scope.name == "first" and [n for n, _ in scope.params] == ["first.weight", "first.bias"]
