"""`join_uneven_inputs`: loops of different lengths, on CPU ranks as well."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from shardwise import NotYetSupported
from shardwise.accelerator import InitProcessGroupKwargs
from tests.accelerator.loops import accelerating, sharded
from tests.ranks import RankPools

SHORT = [InitProcessGroupKwargs(timeout=timedelta(seconds=4))]


def network(norm: bool) -> nn.Module:
    torch.manual_seed(6)
    middle = [nn.BatchNorm1d(4)] if norm else []
    return nn.Sequential(nn.Linear(3, 4), *middle, nn.Tanh(), nn.Linear(4, 1)).double()


def rows(rank: int, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(5, 3, dtype=torch.float64, generator=draw)


def joined(counts: list[int], norm: bool, accumulate: int = 1) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Each rank takes ``counts[rank]`` micro-batches; the gradient's norm before each step, and the last state."""
    with accelerating(cpu=True, gradient_accumulation_steps=accumulate, kwargs_handlers=SHORT) as accelerator:
        model: Any = network(norm)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        norms = []
        with accelerator.join_uneven_inputs([model]):
            for step in range(counts[accelerator.process_index]):
                with accelerator.accumulate(model):
                    accelerator.backward(model(rows(accelerator.process_index, step)).square().mean())
                    if accelerator.sync_gradients:
                        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1e9)))
                    optimizer.step()
                    optimizer.zero_grad()
        accelerator.wait_for_everyone()
        return norms, {k: v.clone() for k, v in accelerator.get_state_dict(model).items()}


def by_hand(counts: list[int], accumulate: int = 1) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Ranks that are through give zeros, and the mean is over all."""
    model = network(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for first in range(0, max(counts), accumulate):
        for step in range(first, first + accumulate):
            for rank in [r for r, n in enumerate(counts) if step < n]:
                loss = model(rows(rank, step)).square().mean() / len(counts) / accumulate
                loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.state_dict()


@pytest.mark.parametrize("counts", [[3, 5], [4, 1], [2, 2], [0, 2], [1, 4, 2], [3, 0, 3]])
def test_uneven_loops_end_together(ranks: RankPools, counts: list[int]) -> None:
    norms, state = by_hand(counts)
    for rank, (found, last) in enumerate(ranks(len(counts)).run(joined, counts, False)):
        assert found == pytest.approx(norms[: counts[rank]], rel=1e-11)
        for name, value in last.items():
            torch.testing.assert_close(value, state[name], rtol=1e-11, atol=1e-12)


def test_uneven_loops_that_accumulate(ranks: RankPools) -> None:
    norms, state = by_hand([6, 2], 2)
    first, second = ranks(2).run(joined, [6, 2], False, 2)
    assert first[0] == pytest.approx(norms, rel=1e-11) and second[0] == pytest.approx(norms[:1], rel=1e-11)
    torch.testing.assert_close(second[1]["0.weight"], state["0.weight"], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("counts", [[3, 5], [5, 3], [1, 4, 2]])
def test_a_model_with_buffers(ranks: RankPools, counts: list[int]) -> None:
    """The first rank's running statistics are shared before each forward, also when that one is through."""
    found = ranks(len(counts)).run(joined, counts, True)
    for _, state in found[1:]:
        for name, value in state.items():
            torch.testing.assert_close(value, found[0][1][name], rtol=0, atol=0)
    longest = max(range(len(counts)), key=lambda r: counts[r])
    assert len(found[longest][0]) == max(counts)
    assert int(found[0][1]["1.num_batches_tracked"]) >= 1


def of_a_loader(even: bool | None) -> tuple[list[int], bool]:
    with accelerating(cpu=True, kwargs_handlers=SHORT) as accelerator:
        model: Any = network(False)
        model, loader = accelerator.prepare(model, DataLoader(torch.arange(5.0), batch_size=1))  # type: ignore[arg-type]
        seen = []
        with accelerator.join_uneven_inputs([model], even_batches=even):
            for batch in loader:
                seen.append(int(batch))
                accelerator.backward(model(batch.double().expand(2, 3)).sum())
        return seen, loader.even_batches


def test_even_batches_are_off_inside_of_the_block_only(ranks: RankPools) -> None:
    assert ranks(2).run(of_a_loader, None) == [([0, 2, 4], True), ([1, 3, 0], True)]
    assert ranks(2).run(of_a_loader, False) == [([0, 2, 4], True), ([1, 3], True)]


def test_one_process_joins_nobody() -> None:
    assert joined([3], True)[0]
    with accelerating(cpu=True, deepspeed_plugin=sharded(2, train_micro_batch_size_per_gpu=1)) as accelerator:
        model: Any = network(False)
        engine, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(NotYetSupported, match="join_uneven_inputs"), accelerator.join_uneven_inputs([engine]):
            pass


def weighed() -> None:
    with accelerating(cpu=True, gradient_normalization="tokens") as accelerator:
        model: Any = network(False)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with accelerator.join_uneven_inputs([model]):
            raise AssertionError("not reached")


def test_weights_of_windows_in_uneven_loops_are_refused(ranks: RankPools) -> None:
    assert len(ranks(2).run_expecting(NotYetSupported, weighed, match="gradient_normalization='tokens'")) == 2


def breaks() -> str:
    with accelerating(cpu=True, kwargs_handlers=SHORT) as accelerator:
        model: Any = network(False)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(ZeroDivisionError), accelerator.join_uneven_inputs([model]):
            raise ZeroDivisionError
        accelerator.backward(model(rows(0, 0)).sum())  # an ordinary backward again
        return "went on"


def test_an_error_in_the_block_ends_the_joining(ranks: RankPools) -> None:
    assert ranks(2).run(breaks) == ["went on"] * 2
