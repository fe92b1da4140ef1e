"""Model-state bytes on a rank between backward and step: against the ZeRO formulas, and the tensors that exist.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5: with mixed
precision a parameter costs 2 bytes, its gradient 2, Adam's state 12 (fp32 master, two moments). fp32 training keeps no
master: 4 + 4 + 8.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import shardwise
from tests.equivalence.model import GLOBAL_BATCH, TinyGPT, batch


@dataclass
class Counted:
    """What one engine held: its own report, and the storages of its tensors, in bytes."""

    parameters: int
    report: dict[str, int]
    buffers: int
    gradients: int
    optimizer: int
    appeared: int
    pooled: int
    live_after_backward: list[str]
    live_after_step: list[str]


def count(cases: list[tuple[int, str, int]]) -> list[Counted]:
    """Each ``(stage, dtype, gas)`` after one whole step and the next window's last backward."""
    return [_count(*case) for case in cases]


def _count(stage: int, dtype: str, gas: int) -> Counted:
    gc.collect()
    before = nbytes(all_tensors())
    engine, *_ = shardwise.initialize(
        model=TinyGPT(width=192, vocabulary=1000, blocks=5),
        config={
            "train_batch_size": GLOBAL_BATCH,
            "gradient_accumulation_steps": gas,
            "optimizer": {"type": "AdamW"},
            "bf16": {"enabled": dtype == "bfloat16"},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
    )
    try:
        return _count_engine(engine, gas, before)
    finally:
        engine.destroy()


def _count_engine(engine: Any, gas: int, before: int) -> Counted:
    def backward() -> None:
        engine.backward(engine(*(t.chunk(gas * engine.world_size)[0] for t in batch(0, 0))))

    for _ in range(gas):
        backward()
        engine.step()
    units, grads = engine._sharded.units, engine._sharded.grads
    live_after_step = live(units)
    for _ in range(gas - 1):
        backward()
        engine.step()
    backward()
    gc.collect()
    state = [v for s in engine.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    found = Counted(
        parameters=sum(slot.numel for u in units for slot in u.slots),
        report=engine.memory_report(),
        buffers=nbytes(t for u in units for t in (u.flat, u.shard, u.secondary) if t is not None),
        gradients=nbytes(t for g in grads for t in (g.total, g._raw, g._kept) if t is not None),
        optimizer=nbytes([*state, *(u.master for u in units if u.master is not None)]),
        appeared=nbytes(all_tensors()) - before,
        pooled=sum(axis.pool.nbytes for axis in engine.mesh.axes()),
        live_after_backward=live(units),
        live_after_step=live_after_step,
    )
    engine.step()
    return found


def live(units: list[Any]) -> list[str]:
    return [u.name for u in units if u.live or u.flat.untyped_storage().nbytes()]


def all_tensors() -> list[torch.Tensor]:
    return [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind tensors, each storage once."""
    storages = [t.untyped_storage() for t in tensors if t.layout is torch.strided and t.device.type == "cpu"]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.nbytes()}.values())


def formula(counted: Counted, stage: int, world_size: int, dtype: str) -> float:
    weight, gradient, optimizer = (2, 2, 12) if dtype == "bfloat16" else (4, 4, 8)
    cut = [1 / world_size if stage >= at else 1 for at in (3, 2, 1)]
    return counted.parameters * (weight * cut[0] + gradient * cut[1] + optimizer * cut[2])


def assert_real(counted: Counted, what: str) -> None:
    """The report is the sum of the tensors that exist, and there are no others but the free exchange buffers."""
    report = counted.report
    assert report["parameters"] == counted.buffers, what
    assert report["gradients"] == counted.gradients, what
    assert report["optimizer"] == counted.optimizer, what
    assert report["total"] == counted.buffers + counted.gradients + counted.optimizer, what
    unknown = counted.appeared - counted.pooled - report["total"]
    # Norms, losses, the NaNs that stand for released parameters; nothing that grows with the model.
    assert 0 <= unknown < 8192, f"{what}: {unknown} bytes in tensors that the report does not know"


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_model_states_take_what_the_formulas_say(ranks: Any, world_size: int, dtype: str) -> None:
    cases = [(stage, dtype, 1) for stage in (0, 1, 2, 3)]
    for by_case in ranks(world_size).run(count, cases):
        for (stage, _, _), counted in zip(cases, by_case, strict=True):
            what = f"stage {stage}"
            assert 2e6 < counted.parameters < 3e6
            expected = formula(counted, stage, world_size, dtype)
            assert counted.report["formula"] == pytest.approx(expected, rel=1e-5), what
            assert counted.report["total"] <= 1.02 * expected, what
            assert_real(counted, what)
            if stage == 3:
                assert counted.live_after_backward == []
                assert counted.live_after_step == []


def test_low_precision_gradients_accumulate_in_fp32(ranks: Any) -> None:
    """Over several micro-steps, gradients of 2 bytes add up in 4: the formulas, and 2 bytes for each gradient kept."""
    cases = [(stage, "bfloat16", 4) for stage in (0, 1, 2, 3)]
    for by_case in ranks(2).run(count, cases):
        for (stage, _, _), counted in zip(cases, by_case, strict=True):
            more = 2 * counted.parameters / (2 if stage >= 2 else 1)
            assert counted.report["total"] <= 1.02 * (formula(counted, stage, 2, "bfloat16") + more), stage
            assert_real(counted, f"stage {stage}")


def test_one_process_keeps_everything(ranks: Any) -> None:
    """Whatever the stage: there is nobody to share with."""
    (by_case,) = ranks(1).run(count, [(stage, "float32", 1) for stage in (0, 3)])
    for counted in by_case:
        assert counted.report["total"] == pytest.approx(16 * counted.parameters, rel=0.02)
        assert_real(counted, "one process")
