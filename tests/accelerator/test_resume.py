"""A run that was killed goes on as if it had not been: the samples, the numbers, the hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from shardwise import ShardwiseError
from shardwise.accelerator import DataLoaderConfiguration
from shardwise.accelerator.seeds import set_seed
from tests.accelerator.loops import accelerating, falling, sharded
from tests.ranks import RankPools

EPOCHS, ROUNDS = 4, 2  # killed in the third epoch, after two rounds of two processes


class Noisy(nn.Module):
    """With dropout, so that the random states matter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def samples(folder: str, length: int, seedable: bool, resume: bool, kill: bool) -> list[list[int]]:
    """The numbers that all processes read together, by epoch; from the kill on if ``resume``."""
    config = DataLoaderConfiguration(use_seedable_sampler=seedable)
    with accelerating(cpu=True, dataloader_config=config) as accelerator:
        set_seed(99 if resume else 3, processes=accelerator.processes)
        loader = accelerator.prepare(DataLoader(list(range(length)), batch_size=2, shuffle=True))  # type: ignore[arg-type]
        found: list[list[int]] = []
        if resume:
            accelerator.load_state(folder)
        for epoch in range(2 if resume else 0, EPOCHS):
            found.append([])
            for number, batch in enumerate(loader, 1):
                found[-1] += accelerator.gather_for_metrics(batch).tolist()
                if kill and (epoch, number) == (2, ROUNDS):
                    accelerator.save_state(folder)
                    return found
    return found


@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_685_2016_a_run_killed_in_epoch_3_sees_the_same_samples(
    tmp_path: Path, ranks: RankPools, size: int, seedable: bool
) -> None:
    length, folder = 23, str(tmp_path / "state")
    whole = ranks(2).run(samples, folder, length, seedable, False, False)[0]
    assert [sorted(e) for e in whole] == [list(range(length))] * EPOCHS and whole[0] != whole[1]
    before = ranks(2).run(samples, folder, length, seedable, False, True)[0]
    assert before == [*whole[:2], whole[2][: 4 * ROUNDS]]
    for found in ranks(size).run(samples, folder, length, seedable, True, False):
        assert found[0] == whole[2][4 * ROUNDS :]
        # The order of a whole epoch is drawn from a state that the first process kept.
        assert found[1] == whole[3]


def relay(folder: str, length: int, leg: int, way: str) -> list[int]:
    """One leg of a run that is killed twice in its third epoch: the numbers that it read of that epoch, and the next.

    Args:
        way: of going on: by ``load_state`` alone, or as scripts do it that skip what was read by themselves.
    """
    with accelerating(cpu=True) as accelerator:
        set_seed(3 + leg, processes=accelerator.processes)
        loader = accelerator.prepare(DataLoader(list(range(length)), batch_size=2, shuffle=True))  # type: ignore[arg-type]
        if leg:
            accelerator.load_state(folder)
        found: list[int] = []
        for epoch in range(2 if leg else 0, EPOCHS):
            if way == "set_epoch":
                loader.set_epoch(epoch)
            skips = way == "skip" and leg and epoch == 2
            # What the first leg has read: two rounds, each of two batches; the second one more.
            this = accelerator.skip_first_batches(loader, leg * ROUNDS) if skips else loader
            for number, batch in enumerate(this, 1):
                if epoch >= 2:
                    found += accelerator.gather_for_metrics(batch).tolist()
                if epoch == 2 and leg < 2 and number == ROUNDS:
                    accelerator.save_state(folder)
                    return found
    return found


@pytest.mark.parametrize(("way", "sizes"), [("load", (2, 1, 3)), ("set_epoch", (2, 2, 1)), ("skip", (2, 2, 2))])
def test_685_2823_a_run_that_is_killed_twice(
    tmp_path: Path, ranks: RankPools, way: str, sizes: tuple[int, int, int]
) -> None:
    length, folder = 31, str(tmp_path / "state")
    whole = ranks(2).run(samples, folder, length, False, False, False)[0]
    found: list[int] = []
    for leg, size in enumerate(sizes):
        legs = ranks(size).run(relay, folder, length, leg, way)
        assert all(other == legs[0] for other in legs)
        found += legs[0]
    assert found == [*whole[2], *whole[3]]


def numbers(folder: str, stage: int | None, resume: bool, stop: int = 9) -> list[float]:
    """Losses of the updates, the norms, and a digest of the weights; saved after the fourth of nine."""
    plugin = None if stage is None else sharded(stage, gradient_clipping=0.5)
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "deepspeed_plugin": plugin}
    with accelerating(cpu=True, **options) as accelerator:
        set_seed(8 if resume else 4, device_specific=True, processes=accelerator.processes)
        model: Any = Noisy()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule: Any = falling(optimizer)
        loader: Any = DataLoader(torch.randn(12, 4, generator=torch.Generator().manual_seed(1)), 2, shuffle=True)  # type: ignore[arg-type]
        model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
        if resume:
            accelerator.load_state(folder)
            assert accelerator.optimizer_step_was_skipped is False
        found, done = [], 4 if resume else 0
        while True:
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(batch).square().mean()
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        found += [loss.item(), float(accelerator.clip_grad_norm_(model.parameters(), 0.5))]
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    done += 1
                    if done == 4 and not resume:
                        accelerator.save_state(folder)
                        found.clear()
                    if done == stop:
                        weights = accelerator.get_state_dict(model)
                        digest = [float(w.double().sum()) for w in weights.values()]
                        return [*found, *digest, optimizer.param_groups[0]["lr"]]


@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
def test_a_resumed_run_has_the_same_numbers_to_the_last_bit(
    tmp_path: Path, ranks: RankPools, stage: int | None
) -> None:
    folder = str(tmp_path / "state")
    whole = ranks(2).run(numbers, folder, stage, False)
    assert len(whole[0]) == 10 + 4 + 1
    assert ranks(2).run(numbers, folder, stage, True) == whole


def refused(folder: str, stage: int | None) -> str:
    try:
        numbers(folder, stage, True)
    except ShardwiseError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("stage", "size", "other"), [(2, 1, 2), (3, 3, 3), (2, 2, 0), (2, 2, 3), (2, 2, None), (None, 2, 2)]
)
def test_sharded_optimizers_of_another_layout_are_refused(
    tmp_path: Path, ranks: RankPools, stage: int | None, size: int, other: int | None
) -> None:
    folder = str(tmp_path / "state")
    ranks(2).run(numbers, folder, stage, False)
    for said in ranks(size).run(refused, folder, other):
        assert said, "loaded a part of another layout"


# -- hooks --


def test_hooks_see_models_weights_and_folder_and_can_be_removed(tmp_path: Path) -> None:
    calls: list[Any] = []
    with accelerating(cpu=True) as accelerator:
        model = accelerator.prepare(nn.Linear(1, 1))
        save = accelerator.register_save_state_pre_hook(lambda ms, ws, f: calls.append((list(ms), list(ws), f)))
        load = accelerator.register_load_state_pre_hook(lambda ms, f: calls.append((list(ms), f)))
        accelerator.save_state(tmp_path / "state")
        accelerator.load_state(tmp_path / "state")
        (models, [weights], folder), (loaded, read) = calls
        assert models == loaded == [model] and set(weights) == {"weight", "bias"}
        assert Path(folder).parent == tmp_path and Path(read) == tmp_path / "state"
        save.remove(), load.remove(), load.remove()
        accelerator.save_state(tmp_path / "state")
        assert len(calls) == 2


def test_a_file_that_a_hook_writes_is_in_the_checkpoint(tmp_path: Path) -> None:
    with accelerating(cpu=True) as accelerator:
        accelerator.register_save_state_pre_hook(lambda ms, ws, f: Path(f, "adapter.txt").write_text("mine") and None)
        accelerator.save_state(tmp_path / "state")
        assert (tmp_path / "state" / "adapter.txt").read_text() == "mine"


@pytest.mark.parametrize("takes", ["both", "weights"])
def test_hooks_that_take_over_a_model(tmp_path: Path, takes: str) -> None:
    """Scripts take the weights out of the list when they save, and the models when they load."""

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        for _ in range(len(models)):
            weights.pop()
        if takes == "both":
            models.clear()

    def load(models: list[Any], folder: str) -> None:
        while models:
            models.pop()

    with accelerating(cpu=True) as accelerator:
        model = accelerator.prepare(nn.Linear(1, 1))
        accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(load)
        accelerator.save_state(tmp_path / "state")
        assert not (tmp_path / "state" / "model.safetensors").exists()
        with torch.no_grad():
            model.weight.fill_(7)
        accelerator.load_state(tmp_path / "state")
        assert float(model.weight.detach()) == 7 and accelerator._models == [model]


def test_a_window_that_is_open_is_said_to_be_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import logging

    logging.getLogger("shardwise").addHandler(caplog.handler)
    try:
        with accelerating(cpu=True, gradient_accumulation_steps=4) as accelerator:
            model = accelerator.prepare(nn.Linear(1, 1))
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 1)).sum())
            accelerator.save_state(tmp_path / "state")
            accelerator.load_state(tmp_path / "state")
        assert "1 micro-batches of a window that was not complete" in caplog.text
    finally:
        logging.getLogger("shardwise").removeHandler(caplog.handler)


def scaled(folder: str, resume: bool) -> float:
    with accelerating(cpu=True, mixed_precision="fp16") as accelerator:
        model: Any = nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if resume:
            accelerator.load_state(folder)
        else:
            accelerator.backward(model(torch.ones(1, 1)).sum() * float("inf"))
            optimizer.step()
            accelerator.save_state(folder)
        return float(accelerator.scaler.get_scale())


def test_the_loss_scale_is_kept(tmp_path: Path) -> None:
    assert scaled(str(tmp_path / "s"), False) == scaled(str(tmp_path / "s"), True) == 32768
