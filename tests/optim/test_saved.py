"""An optimizer's state goes back where it came from, or is refused on all ranks; hooks; parameters unfrozen later.

That resuming is exact is in test_sharded.py.
"""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.errors import ShardingError
from shardwise.optim import Lamb
from tests.optim.sharded import Case, advance, engine_of, groups

NAMES = ("AdamW", "Lamb", "Adafactor")


def refusals(names: tuple[str, ...]) -> list[str]:
    """On a rank: what is said of the first rank's state, of another stage's and of a plain optimizer's, and then that
    the own one still loads."""
    said = []
    for name in names:
        case = Case(name, name, {"lr": 0.01})
        states = []
        for stage in (0, 3):
            engine = engine_of(case, stage, case.model(1))
            advance(engine, 1, range(2))
            states.append(copy.deepcopy(engine.optimizer.state_dict()))
            engine.destroy()
        first: list[Any] = [states[1]]
        dist.broadcast_object_list(first, 0)
        nameless = {k: v for k, v in states[0].items() if k != "shardwise"}
        broken = {"shardwise": {}} if dist.get_rank() else states[1]
        engine = engine_of(case, 3, case.model(1))
        try:
            for state in (first[0], states[0], nameless, broken):
                with pytest.raises(ShardingError) as caught:
                    engine.optimizer.load_state_dict(state)
                said.append(str(caught.value))
            engine.optimizer.load_state_dict(states[1])
            advance(engine, 1, range(2, 3))
        finally:
            engine.destroy()
    return said


def test_a_state_of_another_place_is_refused_on_all_ranks(ranks: Any) -> None:
    zero, one = ranks(2).run(refusals, NAMES)
    for theirs, own in zip(zero[::4], one[::4], strict=True):
        assert "rank 1 was given an optimizer state that is not its own" in theirs
        assert "saved by rank 0 of 2 at stage 3" in own and "where rank 1 of 2 at stage 3 has" in own
        assert "elements " in own and "engine.global_rank" in own
    for said in (zero, one):
        assert all("at stage 0" in text and "stage 3 has" in text for text in said[1::4])
        assert all("not saved by a sharded optimizer and does not fit" in text for text in said[2::4])
    assert all("rank 1 was given" in text for text in zero[3::4])
    assert all("not a whole one: KeyError" in text for text in one[3::4])


def test_states_go_through_files_and_plain_ones_of_the_same_sizes_load() -> None:
    model = Case("").model(0)
    config = {"train_micro_batch_size_per_gpu": 8}
    engine = shardwise.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)[0]
    try:
        advance(engine, 0, range(2))
        file = io.BytesIO()
        torch.save(engine.optimizer.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        engine.optimizer.load_state_dict(state)
        engine.optimizer.load_state_dict({k: v for k, v in state.items() if k != "shardwise"})
    finally:
        engine.destroy()
    assert "shardwise" not in engine.optimizer.state_dict()
    with pytest.raises(ShardingError, match="destroyed; load into the plain optimizer"):
        engine.optimizer.load_state_dict(state)


@pytest.mark.parametrize("name", ["Lamb", "Muon", "Adafactor", "Lion"])
def test_hooks_of_the_optimizer_are_called_around_a_step(name: str) -> None:
    case = Case(name, name, {"lr": 0.01})
    engine = engine_of(case, 0, case.model(0))
    calls: list[tuple[str, bool]] = []

    def note(kind: str) -> Any:
        def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            calls.append((kind, any(p.grad is not None for g in optimizer.param_groups for p in g["params"])))

        return hook

    try:
        engine.optimizer.register_step_pre_hook(note("before"))
        engine.optimizer.register_step_post_hook(note("after"))
        advance(engine, 0, range(2))
    finally:
        engine.destroy()
    assert calls == [("before", True), ("after", True)] * 2


def test_torchs_schedule_sees_that_lamb_was_stepped_first() -> None:
    model = Case("").model(0)
    optimizer = Lamb(groups(model), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    config = {"train_micro_batch_size_per_gpu": 8}
    engine = shardwise.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            advance(engine, 0, range(2))
    finally:
        engine.destroy()


def unfrozen_later(name: str) -> list[torch.dtype]:
    """On a rank: in which dtypes a matrix that is unfrozen after a step, and its state, are worked on."""
    model = Case("", dtype=torch.float32).model(0)
    model.branch.requires_grad_(False)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "optimizer": {"type": name, "params": {"lr": 1e-4}},
    }
    engine = shardwise.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    seen: list[torch.dtype] = []

    def note(optimizer: Any, args: Any, kwargs: Any) -> None:
        seen.extend(p.dtype for g in optimizer.param_groups for p in g["params"] if p.grad is not None)

    try:
        advance(engine, 0, range(1))
        model.branch.requires_grad_(True)
        engine.optimizer.register_step_pre_hook(note)
        advance(engine, 0, range(1, 3))
        for state in engine.optimizer.state.values():
            seen.extend(v.dtype for v in state.values() if isinstance(v, torch.Tensor))
        return list(dict.fromkeys(seen))
    finally:
        engine.destroy()


def test_parameters_unfrozen_later_are_stepped_in_fp32(ranks: Any) -> None:
    for name in ("Adafactor", "AdamW", "Muon"):
        assert ranks(2).run(unfrozen_later, name) == [[torch.float32]] * 2
