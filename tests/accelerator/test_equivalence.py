"""The loop gives what a loop written by hand gives in one process, on the same global batches.

Data and weights are drawn anew in each session; a failure names the seed.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.accelerator.loops import (
    Net,
    Run,
    Trace,
    accelerating,
    by_accelerator,
    by_hand,
    by_hand_in_bf16,
    make_optimizer,
    sharded,
    table,
)
from tests.ranks import RankPools

SEED = int.from_bytes(os.urandom(3), "big")
# float64 has 16 digits. Sums over rows, micro-batches and ranks are taken in another order (errors of some 1e-15 of
# the largest term), which 14 updates of a contracting loss and AdamW's division by sqrt(v) enlarge by less than 1e4.
EXACT = 1e-10
CLIP = 0.7  # of 120 runs, the largest norm was never below 1.4, and the smallest never above 0.83


def same(got: Trace, want: Trace, tolerance: float = EXACT) -> None:
    for name in ("losses", "norms", "rates"):
        mine, wanted = getattr(got, name), getattr(want, name)
        assert mine == pytest.approx(wanted, rel=tolerance), f"{name}, seed {SEED}"
    assert set(got.weights) == set(want.weights)
    for name, value in got.weights.items():
        # Element by element an update may be small where terms cancel, so it is measured on the tensor.
        apart = float((value - want.weights[name]).norm() / want.weights[name].norm())
        assert apart < tolerance, f"{name}, seed {SEED}"


def several(runs: list[Run]) -> list[Trace]:
    return [by_accelerator(run) for run in runs]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
def test_the_loop_is_that_of_one_process(ranks: RankPools, size: int, stage: int | None) -> None:
    runs = [
        # 7 micro-batches: with 3 a window, the last one of each epoch is short.
        Run(SEED, optimizer, accumulate, stage=stage, n_fold=size, max_norm=CLIP)
        for optimizer in ("adamw", "sgd")
        for accumulate in (1, 3)
    ]
    wanted = [by_hand(run, size) for run in runs]
    assert max(n for trace in wanted for n in trace.norms) > CLIP, "updates are clipped"
    assert [len(trace.losses) for trace in wanted] == [14, 6, 14, 6]
    for found in ranks(size).run(several, runs):
        for got, want in zip(found, wanted, strict=True):
            same(got, want)


@pytest.mark.parametrize("stage", [None, 2])
def test_1170_a_schedule_may_advance_once_an_update(ranks: RankPools, stage: int | None) -> None:
    run = Run(SEED, accumulate=3, stage=stage, options={"step_scheduler": "update"})
    for found in ranks(2).run(by_accelerator, run):
        same(found, by_hand(run, 2))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_bf16_on_two_ranks_is_bf16_on_one(ranks: RankPools, accumulate: int) -> None:
    options = {"mixed_precision": "bf16", "step_scheduler": "update"}
    run = Run(SEED, "sgd", accumulate, dtype=torch.float32, options=options, max_norm=None)
    wanted, exact = by_hand_in_bf16(run, 2), by_hand(run, 2)
    for found in ranks(2).run(by_accelerator, run):
        # The same products of the same rows, and the mean of two gradients in float32: only the order in which
        # micro-batches add up may differ, by 1e-7 of a weight, which at times is another rounding to 8 bits of one.
        assert found.losses == pytest.approx(wanted, rel=1e-3), f"seed {SEED}"
        assert found.losses != pytest.approx(exact.losses, rel=1e-6), "low precision was not in use"
        assert all(w.dtype == torch.float32 for w in found.weights.values())


# -- how micro-batches weigh --


def ragged(kind: str, stage: int | None, lengths: list[list[int]], seed: int) -> list[tuple[list[float], Any]]:
    """Micro-batches with ``lengths[micro][rank]`` rows, three of them in a window; two epochs."""
    found: list[float] = []
    plugin = None if stage is None else sharded(stage, train_micro_batch_size_per_gpu=1)
    options: dict[str, Any] = {"gradient_normalization": kind, "gradient_accumulation_steps": 3}
    with accelerating(cpu=True, deepspeed_plugin=plugin, **options) as accelerator:
        model: Any = Net(seed)
        optimizer: Any = make_optimizer("adamw", model)
        rank, data = accelerator.process_index, table(sum(map(sum, lengths)), seed)
        batches = [part[rank] for part in cut(data.tensors, lengths)]
        loader: Any = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
        loader = accelerator.prepare_data_loader(loader) if accelerator.num_processes == 1 else OfRank(loader)
        model, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(2):
            for number, (x, y) in enumerate(loader, 1):
                if number == len(batches) and accelerator.num_processes > 1:
                    # An unprepared loader does not say that it ends; the script does.
                    accelerator.gradient_accumulation_steps = number % 3 or 3
                with accelerator.accumulate(model):
                    loss = (model(x) - y).square().mean()
                    accelerator.backward(loss, tokens=len(y))
                    if accelerator.sync_gradients:
                        found.append(float(accelerator.clip_grad_norm_(model.parameters(), 1e9)))
                    optimizer.step()
                    optimizer.zero_grad()
            accelerator.gradient_accumulation_steps = 3
        weights = accelerator.get_state_dict(model)["last.weight"].clone()
    return [(found, weights)]


class OfRank:
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        return iter(self.loader)


def cut(tensors: tuple[torch.Tensor, ...], lengths: list[list[int]]) -> list[list[tuple[torch.Tensor, ...]]]:
    parts, at = [], 0
    for row in lengths:
        parts.append([])
        for length in row:
            parts[-1].append(tuple(t[at : at + length] for t in tensors))
            at += length
    return parts


def ragged_by_hand(kind: str, lengths: list[list[int]], seed: int) -> tuple[list[float], torch.Tensor]:
    model = Net(seed)
    optimizer = make_optimizer("adamw", model)
    parts = cut(table(sum(map(sum, lengths)), seed).tensors, lengths)
    norms = []
    for _ in range(2):
        for first in range(0, len(parts), 3):
            window = [pair for row in parts[first : first + 3] for pair in row]
            losses = [(model(x) - y).square() for x, y in window]
            # Mean over the rows of the window, or over the means of its micro-batches.
            loss = torch.cat(losses).mean() if kind == "tokens" else torch.stack([v.mean() for v in losses]).mean()
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
            optimizer.step()
            optimizer.zero_grad()
    return norms, model.last.weight.detach()


@pytest.mark.parametrize("kind", ["tokens", "window"])
@pytest.mark.parametrize("stage", [None, 0, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_3877_ragged_micro_batches_weigh_by_what_is_in_them(
    ranks: RankPools, kind: str, stage: int | None, size: int
) -> None:
    lengths = [[2, 9], [5, 1], [3, 3], [7, 4]]  # the last window has one micro-batch
    lengths = [row[:size] for row in lengths]
    norms, weight = ragged_by_hand(kind, lengths, SEED)
    for [(found, last)] in ranks(size).run(ragged, kind, stage, lengths, SEED):
        assert found == pytest.approx(norms, rel=EXACT), f"seed {SEED}"
        torch.testing.assert_close(last, weight, rtol=1e-8, atol=1e-10)


def test_by_default_a_short_window_counts_less_as_upstream_has_it() -> None:
    run = Run(SEED, "sgd", accumulate=3, micros=4, epochs=1)
    # by_hand divides by 3 also where there is one.
    same(by_accelerator(run), by_hand(run, 1))
