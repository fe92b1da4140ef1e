"""Keys on the dtype, the division and the exchange of gradients: what they change, and that they change no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.sharding.gradient import Averaging
from tests.equivalence.harness import Tolerance, check
from tests.equivalence.recipe import Layout, Recipe

# Argued in test_loss_matrix: order of sums only, in float64.
EXACT = Tolerance(1e-10)
ALL = (("stage3_param_persistence_threshold", 0),)


def layouts(*top: tuple[str, Any], gas: int = 2, zero: tuple[tuple[str, Any], ...] = ()) -> list[Layout]:
    return [Layout(stage, gas, (*(ALL if stage == 3 else ()), *zero), top) for stage in (0, 1, 2, 3)]


def test_keys_that_change_how_gradients_travel_do_not_change_the_losses(ranks: Any) -> None:
    cases = [
        *layouts(("sparse_gradients", True)),
        *layouts(("sparse_gradients", True), gas=1),
        *layouts(("prescale_gradients", True), ("gradient_predivide_factor", 4.0)),
        *[Layout(3, 2, (*ALL, ("stage3_module_granularity_threshold", n))) for n in (200, 10**6)],
    ]
    # A tied embedding gets a gradient in every row.
    check(ranks, 2, [(Recipe(steps=3, tied=i % 8 < 4), layout) for i, layout in enumerate(cases)], EXACT)


@pytest.mark.parametrize(
    ("keys", "wire", "before", "after"),
    [
        ({}, torch.float32, 0.25, 1.0),
        ({}, torch.float16, 1.0, 0.25),
        ({"prescale": True}, torch.float16, 0.25, 1.0),
        ({"predivide": 2.0}, torch.float16, 0.5, 0.5),
        ({"predivide": 2.0}, torch.bfloat16, 0.25, 1.0),
        ({"mean": False}, torch.float32, 1.0, 1.0),
        ({"mean": False, "predivide": 2.0}, torch.float16, 0.5, 2.0),
    ],
)
def test_where_gradients_are_divided(keys: dict[str, Any], wire: torch.dtype, before: float, after: float) -> None:
    rest = {"prescale": False, "predivide": 1.0, "mean": True}
    assert Averaging.of(4, wire, **{**rest, **keys}) == Averaging(before, after)


# -- small runs of an engine --


def train(config: dict[str, Any], weigh: float = 1.0, *, steps: int = 3) -> dict[str, Any]:
    """Some steps of a small model, each micro-batch other numbers on each rank; what there is to see of it."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16, affine=False), nn.Linear(16, 4))
    base = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    engine, *_ = shardwise.initialize(model=model, config={**base, **config})
    try:
        rank = dist.get_rank() if dist.is_initialized() else 0
        dtype = next(engine.module.parameters()).dtype
        norms, losses, held = [], [], 0
        for step in range(steps):
            for micro in range(config.get("gradient_accumulation_steps", 1)):
                g = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
                x = torch.randn(4, 8, generator=g)
                loss = engine(x.to(dtype)).float().square().mean()
                engine.backward(loss * weigh)
                held = max(held, engine.memory_report()["gradients"])
                engine.step()
                losses.append(loss.item())
            norms.append(engine.get_global_grad_norm())
        return {
            "norms": norms,
            "losses": losses,
            "gradients": held,
            "skipped": engine.skipped_steps,
            "memory": engine.memory_report(),
            "states": {v.dtype for s in engine.optimizer.state.values() for n, v in s.items() if n != "step"},
            "buffer": next(b.dtype for n, b in engine.module.named_buffers() if n.endswith("running_mean")),
            "weights": {k: v.clone() for k, v in engine.module.state_dict().items()},
            "steps": engine.global_steps,
        }
    finally:
        engine.destroy()


def stage(number: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": number, "stage3_param_persistence_threshold": 0}, **keys}


STAGES = (0, 1, 2, 3)


def sum_and_mean() -> list[tuple[Any, Any]]:
    size = dist.get_world_size()
    return [
        (train(stage(s, gradient_allreduce_op="sum"), 1.0 / size), train(stage(s, gradient_allreduce_op="mean")))
        for s in STAGES
    ]


def test_a_sum_of_gradients_is_the_mean_times_the_ranks(ranks: Any) -> None:
    for summed, mean in ranks(2).run(sum_and_mean)[0]:
        assert summed["norms"] == pytest.approx(mean["norms"], rel=1e-6)  # float32, other factors
        assert summed["losses"] == pytest.approx(mean["losses"], rel=1e-6)


def fp16_overflow(options: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Every rank's gradient is 40,000; the largest fp16 number is 65,504."""
    outcomes = []
    for keys in [{**stage(s), **keys} for s in STAGES for keys in options]:
        engine, *_ = shardwise.initialize(
            model=nn.Linear(1, 1, bias=False),
            config={**keys, "train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True, "loss_scale": 1}},
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        )
        try:
            engine.backward(engine(torch.ones(1, 1, dtype=torch.float16)).float().sum() * 40_000)
            engine.step()
            outcomes.append((engine.skipped_steps, engine.get_global_grad_norm()))
        finally:
            engine.destroy()
    return outcomes


def test_only_gradients_divided_before_the_sum_stay_in_the_range_of_fp16(ranks: Any) -> None:
    options: list[dict[str, Any]] = [{}, {"prescale_gradients": True}, {"gradient_predivide_factor": 2.0}]
    outcomes = ranks(2).run(fp16_overflow, options)[0]
    for i in range(0, len(outcomes), 3):
        (skipped, _), *rest = outcomes[i : i + 3]
        assert skipped == 1, "the sum overflows, and the step is skipped"
        assert rest == [(0, 40_000.0)] * 2


def accumulated_in(dtype: str | None) -> list[Any]:
    types = {"data_types": {"grad_accum_dtype": dtype}} if dtype else {}
    return [train(stage(s, bf16={"enabled": True}, gradient_accumulation_steps=4, **types)) for s in STAGES]


def test_gradients_of_a_window_add_up_in_the_dtype_that_the_config_says(ranks: Any) -> None:
    default, wide, narrow = (ranks(2).run(accumulated_in, dtype)[0] for dtype in (None, "fp32", "bf16"))
    for a, b, c in zip(default, wide, narrow, strict=True):
        assert (a["norms"], a["gradients"]) == (b["norms"], b["gradients"])
        assert a["norms"] != c["norms"], "sums of other dtypes round otherwise"
        assert a["norms"] == pytest.approx(c["norms"], rel=0.02)  # four sums of 8 bits
        assert c["gradients"] < a["gradients"]


def without_masters() -> list[Any]:
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    wide = {"gradient_accumulation_steps": 2, "data_types": {"grad_accum_dtype": "fp32"}}
    assert all(train(stage(s, bf16=bf16, **wide))["states"] == {torch.bfloat16} for s in STAGES)
    return [train(stage(s, bf16=bf16)) for s in STAGES] + [train(stage(2, bf16={"enabled": True}))]


def test_without_fp32_masters_all_state_is_bf16_and_equal_to_plain_bf16_training(ranks: Any) -> None:
    *runs, with_masters = ranks(2).run(without_masters)[0]
    (plain,) = ranks(1).run(without_masters)[0][:1]
    assert with_masters["states"] == {torch.float32}
    for run in runs:
        assert run["states"] == {torch.bfloat16}
        assert run["losses"][0] == runs[0]["losses"][0]
        # The stages step the same bf16 weights with the same bf16 gradients.
        assert all(torch.equal(v, runs[0]["weights"][k]) for k, v in run["weights"].items() if "running" not in k)
    assert runs[2]["memory"]["total"] < 0.7 * with_masters["memory"]["total"]
    assert plain["states"] == {torch.bfloat16}


def test_bf16_without_masters_is_plain_torch_in_bf16() -> None:
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    ours = train({"bf16": bf16})
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16, affine=False), nn.Linear(16, 4))
    for param in model.parameters():
        param.data = param.data.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0, fused=True)
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step))
        model(x.to(torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(v, ours["weights"][k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(("written", "dtype"), [(None, torch.float32), ("bf16", torch.bfloat16)])
def test_buffers_keep_their_dtype_unless_the_config_says(written: str | None, dtype: torch.dtype) -> None:
    types = {"data_types": {"buffer_dtype": written, "param_dtype": "bf16"}}
    assert train({"bf16": {"enabled": True}, **types})["buffer"] == dtype


def rows_sent(tied: bool) -> list[tuple[int, int]]:
    """Bytes of one step's gradients with and without the key, at stage 0 and 2, and with a sparse embedding."""
    sent = []
    for number in (0, 2):
        for by_rows in (True, False):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Embedding(4000, 16, sparse=number == 0), nn.Linear(16, 4000, bias=False))
            if tied:
                model[1].weight = model[0].weight
            engine, *_ = shardwise.initialize(
                model=model,
                config={**stage(number, sparse_gradients=by_rows), "train_micro_batch_size_per_gpu": 4},
                optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            )
            try:
                for _ in range(2):
                    before = sum(t.bytes_sent for axis in engine.mesh.axes() for t in axis.traffic.values())
                    engine.backward(engine(torch.tensor([[1, 5, 7, 3999]])).square().mean())
                    between = sum(t.bytes_sent for axis in engine.mesh.axes() for t in axis.traffic.values())
                    engine.step()
                sent.append(between - before)
            finally:
                engine.destroy()
    return [(sent[0], sent[1]), (sent[2], sent[3])]


def test_of_an_embedding_only_the_rows_travel_that_were_used(ranks: Any) -> None:
    table = 4000 * 16 * 4
    for by_rows, whole in ranks(2).run(rows_sent, False)[0]:
        # One of two tables is used in four rows only; its slice for the other rank is half of it.
        assert whole - by_rows > 0.45 * table


def unmanaged() -> list[tuple[Any, Any]]:
    pairs = []
    for s in STAGES:
        runs = []
        for managed in (True, False):
            torch.manual_seed(3)
            engine, *_ = shardwise.initialize(
                model=nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)),
                config=stage(
                    s,
                    managed_gradient_accumulation=managed,
                    train_micro_batch_size_per_gpu=2,
                    gradient_accumulation_steps=3,
                    optimizer={"type": "AdamW", "params": {"lr": 0.01}},
                ),
            )
            seen = []
            try:
                for step in range(3):
                    for micro in range(3):
                        g = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
                        loss = engine(torch.randn(2, 8, generator=g)).square().mean()
                        engine.backward(loss)
                        if managed or micro == 2:
                            engine.step()
                        seen.append(loss.item())
                    seen.append(engine.get_global_grad_norm())
                assert engine.global_steps == 3
                if not managed:
                    with pytest.raises(shardwise.ConfigError, match="managed_gradient_accumulation"):
                        engine.train_batch(iter([]))
            finally:
                engine.destroy()
            runs.append(seen)
        pairs.append((runs[0], runs[1]))
    return pairs


def test_the_script_may_say_by_its_steps_where_windows_end(ranks: Any) -> None:
    for managed, by_hand in ranks(2).run(unmanaged)[0]:
        assert by_hand == pytest.approx(managed, rel=1e-6)
