"""Several models in one process: adversaries with two optimizers, teachers, frozen parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwise import NotYetSupported
from tests.accelerator.loops import accelerating, sharded
from tests.ranks import RankPools

ROWS, ROUNDS = 4, 4


def network(seed: int, out: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, out)).double()


def noise(round_: int, ranks: int, rank: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What is real and what the generator is given; of one rank, or of all."""
    draw = torch.Generator().manual_seed(round_)
    both = torch.randn(2, ranks * ROWS, 3, generator=draw, dtype=torch.float64)
    part = both if rank is None else both[:, rank * ROWS : (rank + 1) * ROWS]
    return part[0], part[1]


def adversaries(
    generator: Any, judge: Any, optimizers: tuple[Any, Any], backward: Any, batches: list[Any]
) -> list[float]:
    """The usual loop: the judge learns from real and fake, then the generator through the judge."""
    by_judge, by_generator = optimizers[1], optimizers[0]
    losses = []
    for real, z in batches:
        by_judge.zero_grad()
        fake = generator(z)
        loss = nn.functional.softplus(-judge(real)).mean() + nn.functional.softplus(judge(fake.detach())).mean()
        backward(loss)
        by_judge.step()
        by_generator.zero_grad()
        other = nn.functional.softplus(-judge(fake)).mean()
        backward(other)
        by_generator.step()
        losses += [float(loss.detach()), float(other.detach())]
    return losses


def optimizers(generator: nn.Module, judge: nn.Module) -> tuple[Any, Any]:
    return (
        torch.optim.Adam(generator.parameters(), lr=0.02, betas=(0.5, 0.99)),
        torch.optim.SGD(judge.parameters(), lr=0.1, momentum=0.9),
    )


def with_accelerator(stage: int | None, together: bool) -> tuple[list[float], list[torch.Tensor]]:
    plugin = None if stage is None else sharded(stage, train_micro_batch_size_per_gpu=ROWS)
    with accelerating(cpu=True, deepspeed_plugin=plugin) as accelerator:
        models: tuple[Any, Any] = network(1, 3), network(2, 1)
        first, second = optimizers(*models)
        if together:
            *models, first, second = accelerator.prepare(*models, first, second)  # type: ignore[assignment]
        else:
            one, first = accelerator.prepare(models[0], first)
            two, second = accelerator.prepare(models[1], second)
            models = one, two
        batches = [noise(i, accelerator.num_processes, accelerator.process_index) for i in range(ROUNDS)]
        losses = adversaries(models[0], models[1], (first, second), accelerator.backward, batches)
        losses = accelerator.reduce(torch.tensor(losses, dtype=torch.float64), "mean").tolist()
        weights = [v.clone() for m in models for v in accelerator.get_state_dict(m).values()]
    return losses, weights


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", [None, 0, 2, 3])
def test_two_models_and_two_optimizers_are_plain_torch(ranks: RankPools, stage: int | None, size: int) -> None:
    models = network(1, 3), network(2, 1)
    batches = [noise(i, size, None) for i in range(ROUNDS)]
    want = adversaries(*models, optimizers(*models), torch.Tensor.backward, batches)
    for losses, weights in ranks(size).run(with_accelerator, stage, size == 2):
        # float64; sums in another order, four rounds.
        assert losses == pytest.approx(want, rel=1e-10)
        for got, wanted in zip(weights, [v for m in models for v in m.state_dict().values()], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)


class Adapted(nn.Module):
    """A frozen base, and a small part that is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.base = nn.Linear(3, 3).requires_grad_(False)
        self.down, self.up = nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


def adapted(stage: int | None, teacher: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    plugin = None if stage is None else sharded(stage, train_micro_batch_size_per_gpu=ROWS)
    with accelerating(cpu=True, deepspeed_plugin=plugin) as accelerator:
        model: Any = Adapted()
        old: Any = network(9, 3).requires_grad_(False)
        optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        old = accelerator.prepare(old) if teacher else old
        losses = []
        for i in range(3):
            x, _ = noise(i, accelerator.num_processes, accelerator.process_index)
            with torch.no_grad():
                target = old(x)
            loss = (model(x) - target).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        state = {k: v.clone() for k, v in accelerator.get_state_dict(model).items()}
    return losses, state


@pytest.mark.parametrize("stage", [None, 0, 2, 3])
def test_frozen_parts_and_a_teacher(ranks: RankPools, stage: int | None) -> None:
    model, old = Adapted(), network(9, 3)
    base = model.base.weight.clone()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    want = []
    for i in range(3):
        x, _ = noise(i, 2, None)
        loss = (model(x) - old(x).detach()).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        want.append(loss.item())
    for losses, state in ranks(2).run(adapted, stage, True):
        assert losses == pytest.approx(want, rel=1e-10)
        assert torch.equal(state["base.weight"], base)
        torch.testing.assert_close(state["up.weight"], model.up.weight.detach(), rtol=1e-9, atol=1e-11)


def separately(stage: int | None) -> list[float]:
    """Two models that accumulate in windows of their own, one after the other in each round."""
    plugin = None if stage is None else sharded(stage, train_micro_batch_size_per_gpu=1)
    with accelerating(cpu=True, deepspeed_plugin=plugin, gradient_accumulation_steps=2) as accelerator:
        pairs = []
        for _ in range(2):
            model: Any = nn.Linear(1, 1, bias=False)
            nn.init.zeros_(model.weight)
            pairs.append(accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0)))
        found = []
        for _ in range(4):
            for model, optimizer in pairs:
                with accelerator.accumulate(model):
                    accelerator.backward(model(torch.ones(1, 1)).sum())
                    optimizer.step()
                    optimizer.zero_grad()
            found += [-float(accelerator.get_state_dict(m)["weight"]) for m, _ in pairs]
    return found


@pytest.mark.parametrize("stage", [None, 0, 2])
def test_windows_of_two_engines(ranks: RankPools, stage: int | None) -> None:
    assert ranks(2).run(separately, stage) == [[0, 0, 1, 1, 1, 1, 2, 2]] * 2


def clips(stage: int | None) -> list[float]:
    """Both models' parameters in one call, as `itertools.chain` gives them."""
    plugin = None if stage is None else sharded(stage, train_micro_batch_size_per_gpu=1)
    with accelerating(cpu=True, deepspeed_plugin=plugin) as accelerator:
        pairs = []
        for _ in range(2):
            model: Any = nn.Linear(1, 1, bias=False)
            nn.init.zeros_(model.weight)
            pairs.append(accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0)))
        accelerator.backward(sum(m(torch.full((1, 1), 3.0 + i)).sum() for i, (m, _) in enumerate(pairs)))
        norm = accelerator.clip_grad_norm_([p for m, _ in pairs for p in m.parameters()], 1.0)
        for _, optimizer in pairs:
            optimizer.step()
        return [float(norm), *(-float(accelerator.get_state_dict(m)["weight"]) for m, _ in pairs)]


def test_clipping_two_models_by_one_norm() -> None:
    assert clips(None) == pytest.approx([5, 0.6, 0.8], rel=1e-5)
    with pytest.raises(NotYetSupported, match="one by one"):
        clips(2)
