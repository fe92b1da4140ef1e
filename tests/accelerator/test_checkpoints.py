"""`save_state` and `load_state`. Numbers in the names are those of reports in Accelerate's tracker."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from shardwise import Accelerator, CommError, ConfigError
from shardwise.accelerator import ProjectConfiguration, checkpoints
from shardwise.accelerator.weights import load_weights
from tests.accelerator.loops import Net, accelerating, falling, sharded
from tests.ranks import RankPools


def filled(accelerator: Accelerator, seed: int = 0, **more: Any) -> tuple[Any, Any, Any, Any]:
    """A model, an optimizer, a schedule and a loader, prepared."""
    model = Net(seed, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader: Any = DataLoader(list(range(8)), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    found: tuple[Any, Any, Any, Any] = accelerator.prepare(model, optimizer, falling(optimizer), loader)
    return found


def update(accelerator: Accelerator, model: Any, optimizer: Any, schedule: Any) -> float:
    """One step on random data; returns the loss."""
    loss = model(torch.randn(4, 6)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return float(loss)


def automatic(path: Path, **more: Any) -> dict[str, Any]:
    return {"cpu": True, "project_config": ProjectConfiguration(path, automatic_checkpoint_naming=True, **more)}


class Counter:
    """Something of the script's own."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "seen": [("a", None)], "array": np.arange(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["seen"] == [("a", None)] and state["array"].tolist() == [0, 1]
        self.count = state["count"]


def save_all(folder: str, stage: int | None) -> list[str]:
    plugin = None if stage is None else sharded(stage, train_micro_batch_size_per_gpu=1)
    with accelerating(cpu=True, deepspeed_plugin=plugin) as accelerator:
        model, optimizer, schedule, _ = filled(accelerator)
        accelerator.register_for_checkpointing(Counter(), Counter())
        update(accelerator, model, optimizer, schedule)
        accelerator.save_state(folder)
    return sorted(p.name for p in Path(folder).iterdir())


@pytest.mark.parametrize("stage", [None, 3])
def test_names_and_no_pickle(tmp_path: Path, ranks: RankPools, stage: int | None) -> None:
    [names, _] = ranks(2).run(save_all, str(tmp_path / "state"), stage)
    optimizers = ["optimizer.safetensors"]
    if stage is not None:
        optimizers = ["optimizer_rank_0.safetensors", "optimizer_rank_1.safetensors"]
    assert names == sorted(
        [
            *optimizers,
            *("custom_checkpoint.safetensors", "custom_checkpoint_1.safetensors"),
            *("loader.safetensors", "model.safetensors", "scheduler.safetensors"),
            *("random_states_0.safetensors", "random_states_1.safetensors", "shardwise_state.json"),
        ]
    )
    for path in (tmp_path / "state").iterdir():
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            with safe_open(path, framework="pt") as file:
                list(file.keys())
    with safe_open(tmp_path / "state" / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(Net(0).state_dict())


def test_438_a_checkpoint_of_two_processes_loads_on_one(tmp_path: Path, ranks: RankPools) -> None:
    ranks(2).run(save_all, str(tmp_path / "state"), None)
    with accelerating(cpu=True) as accelerator:
        _, optimizer, schedule, _ = filled(accelerator, seed=5)
        counters = Counter(7), Counter(8)
        accelerator.register_for_checkpointing(*counters)
        accelerator.load_state(tmp_path / "state")
        assert [c.count for c in counters] == [0, 0]
        assert schedule.get_last_lr() == pytest.approx([0.1 * 0.97**2])
        assert len(optimizer.state) == 6
        Net(1).load_state_dict(load_weights(tmp_path / "state"))


def test_save_state_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with accelerating(**automatic(tmp_path)) as accelerator:
        filled(accelerator)
        real = checkpoints.write_value

        def failing(path: Path, value: Any) -> None:
            if path.name.startswith("loader"):
                raise OSError("no space left on device")
            real(path, value)

        monkeypatch.setattr(checkpoints, "write_value", failing)
        monkeypatch.setattr(checkpoints, "give_up", lambda final: None)  # as a kill, which clears nothing away
        with pytest.raises(OSError, match="no space"):
            accelerator.save_state()
        [partial] = (tmp_path / "checkpoints").iterdir()
        with pytest.raises(ConfigError, match="not finished"):
            accelerator.load_state(partial)
        with pytest.raises(ConfigError, match="there is no checkpoint in"):
            accelerator.load_state()
        monkeypatch.undo()
        assert Path(accelerator.save_state()).name == "checkpoint_0"
        assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_0"]


def fails_on_one(folder: str) -> str:
    with accelerating(cpu=True) as accelerator:
        filled(accelerator)
        real = checkpoints.write_value
        if accelerator.process_index == 1:
            checkpoints.write_value = lambda path, value: Path("/proc/none").mkdir()  # type: ignore[assignment]
        try:
            accelerator.save_state(folder)
        except (OSError, CommError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            checkpoints.write_value = real
    return ""


def test_an_error_on_one_process_is_an_error_on_all(tmp_path: Path, ranks: RankPools) -> None:
    first, second = ranks(2).run(fails_on_one, str(tmp_path / "state"))
    assert first.startswith("CommError: save_state failed: process 1") and "/proc/none" in second
    assert not (tmp_path / "state").exists()


def test_a_failed_save_leaves_the_checkpoint_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with accelerating(cpu=True) as accelerator:
        filled(accelerator)
        accelerator.save_state(tmp_path / "last")
        monkeypatch.setattr(checkpoints, "write_value", lambda path, value: (tmp_path / "none" / "x").mkdir())
        with pytest.raises(OSError):
            accelerator.save_state(tmp_path / "last")
        accelerator.load_state(tmp_path / "last")


def test_1601_3306_automatic_names_go_on_after_a_resume(tmp_path: Path) -> None:
    with accelerating(**automatic(tmp_path, total_limit=2)) as accelerator:
        filled(accelerator)
        for _ in range(12):
            accelerator.save_state()
        # By number, not by text: 9 is older than 11.
        assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"checkpoint_10", "checkpoint_11"}
    with accelerating(**automatic(tmp_path)) as accelerator:
        filled(accelerator)
        accelerator.load_state()
        assert accelerator.save_iteration == 12
        assert Path(accelerator.save_state()).name == "checkpoint_12"
    with accelerating(**automatic(tmp_path)) as accelerator:
        filled(accelerator)
        accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_10")
        with pytest.raises(ConfigError, match=r"checkpoint_11.* already exists"):
            accelerator.save_state()
        accelerator.project_configuration.iteration = 20
        accelerator.save_state()


def test_places_and_arguments_are_checked(tmp_path: Path) -> None:
    with accelerating(cpu=True) as accelerator:
        for call in (accelerator.save_state, accelerator.load_state):
            with pytest.raises(ConfigError, match="give it a folder"):
                call()
        with pytest.raises(ConfigError, match="pickle"):
            accelerator.save_state(tmp_path / "a", safe_serialization=False)
        with pytest.raises(ConfigError, match="unknown arguments max_size"):
            accelerator.save_state(tmp_path / "a", max_size=1)
        with pytest.raises(ConfigError, match="there is no folder"):
            accelerator.load_state(tmp_path / "a")
        with pytest.raises(ConfigError, match="pickle"):
            accelerator.save({"a": torch.ones(1)}, tmp_path / "x", safe_serialization=False)
        for size in ("1.5.2GB", "-5GB", "5", 0, -3, True):
            with pytest.raises(ConfigError, match="max_shard_size: expected a size"):
                accelerator.save_model(nn.Linear(1, 1), tmp_path / "m", max_shard_size=size)
        with pytest.raises(ConfigError, match="total_limit: expected 1 or more"):
            ProjectConfiguration(tmp_path, total_limit=0)
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match="is a file"):
            accelerator.save_model(nn.Linear(1, 1), tmp_path / "file")


def test_other_objects_than_were_saved_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with accelerating(cpu=True) as accelerator:
        filled(accelerator)
        accelerator.save_state(folder)
        accelerator.register_for_checkpointing(Counter())
        with pytest.raises(ConfigError, match="holds 0 objects, and 1 are here"):
            accelerator.load_state(folder)
    with accelerating(cpu=True) as accelerator:
        filled(accelerator)
        accelerator.prepare(nn.Linear(1, 1))
        with pytest.raises(ConfigError, match="holds 1 models, and 2 are prepared"):
            accelerator.load_state(folder)
    with accelerating(cpu=True) as accelerator:
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        accelerator.prepare(model, optimizer, falling(optimizer), DataLoader([1]))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="the weights do not fit the model"):
            accelerator.load_state(folder)
    (folder / "optimizer.safetensors").write_bytes(b"\x80\x04cposix\nsystem\n")
    with accelerating(cpu=True) as accelerator:
        filled(accelerator)
        with pytest.raises(ConfigError, match="not a whole safetensors file"):
            accelerator.load_state(folder)


def test_what_cannot_be_registered_is_listed() -> None:
    with accelerating(cpu=True) as accelerator, pytest.raises(ConfigError) as caught:
        accelerator.register_for_checkpointing(Counter(), [1, 2], nn.Linear(1, 1), "text")
    assert "Item at index 1, `[1, 2]`" in str(caught.value) and "Item at index 3, `text`" in str(caught.value)
    assert "index 0" not in str(caught.value) and "index 2" not in str(caught.value)
    assert not accelerator._custom_objects


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embed(ids))
        return out


@pytest.mark.parametrize("stage", [None, 3])
def test_2807_2684_tied_weights(tmp_path: Path, stage: int | None) -> None:
    plugin = None if stage is None else sharded(stage, train_micro_batch_size_per_gpu=1)
    with accelerating(cpu=True, deepspeed_plugin=plugin) as accelerator:
        model: Any = Tied()
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        whole = accelerator.get_state_dict(model)
        assert set(whole) == {"embed.weight", "head.weight"}
        accelerator.save_model(model, tmp_path / "model", max_shard_size="1KB")
        accelerator.save_state(tmp_path / "state")
        before = whole["embed.weight"].clone()
        model.load_state_dict({k: v + 1 for k, v in whole.items()}) if stage is None else None
        accelerator.load_state(tmp_path / "state")
        assert torch.equal(accelerator.get_state_dict(model)["head.weight"], before)
    fresh = Tied()
    fresh.load_state_dict(load_weights(tmp_path / "model"))
    assert fresh.head.weight is fresh.embed.weight and torch.equal(fresh.head.weight, before)


def test_parts_of_a_model_and_an_index_that_names_other_files(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    with accelerating(cpu=True) as accelerator:
        accelerator.save_model(accelerator.prepare(model), tmp_path / "m", max_shard_size="1KB")
        assert len(list((tmp_path / "m").glob("*.safetensors"))) == 4
        fresh = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
        fresh.load_state_dict(load_weights(tmp_path / "m"))
        assert torch.equal(fresh[1].weight, model[1].weight)
        accelerator.save(accelerator.get_state_dict(model), tmp_path / "secret.safetensors")
        index = tmp_path / "m" / "model.safetensors.index.json"
        for place in ("../secret.safetensors", str(tmp_path / "secret.safetensors"), "..", 7, ["x"]):
            index.write_text(json.dumps({"weight_map": {"0.weight": place}}))
            with pytest.raises(ConfigError):
                load_weights(tmp_path / "m")
        for text in ('{"weight_map": ["model.safetensors"]}', "[]", "no JSON"):
            index.write_text(text)
            with pytest.raises(ConfigError, match=r"has no weight_map|cannot be read"):
                load_weights(tmp_path / "m")
        # Saved whole, nothing of the parts is left to be found first.
        accelerator.save_model(model, tmp_path / "m")
        assert [p.name for p in (tmp_path / "m").iterdir()] == ["model.safetensors"]


def test_2684_buffers_that_are_a_part_of_a_weight(tmp_path: Path) -> None:
    model = nn.Linear(2, 4)
    model.register_buffer("first", model.weight.detach()[:2])
    with accelerating(cpu=True) as accelerator:
        accelerator.prepare(model)
        accelerator.save_state(tmp_path / "state")
        wanted = model.weight.detach().clone()
        with torch.no_grad():
            model.weight.zero_()
            model.first.zero_()
        accelerator.load_state(tmp_path / "state")
        assert torch.equal(model.weight, wanted) and torch.equal(model.first, wanted[:2])


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(np.random.randn()), float(torch.rand(()))]


def test_3960_random_states_go_on(tmp_path: Path) -> None:
    np.random.randn()  # numpy keeps the second of two numbers
    with accelerating(cpu=True) as accelerator:
        accelerator.save_state(tmp_path / "state")
        expected = draws()
        draws()
        accelerator.load_state(tmp_path / "state")
        assert draws() == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
        lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=10),
        lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0, scale_fn=lambda x: 0.9**x),
        lr_scheduler.ReduceLROnPlateau,
        lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 5)], [3]),
        lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    ],
)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
def test_every_kind_of_schedule_is_kept(tmp_path: Path, make: Any) -> None:
    rates = []
    for load in (False, True):
        with accelerating(cpu=True) as accelerator:
            optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0, momentum=0.9)
            _, schedule = accelerator.prepare(optimizer, make(optimizer))
            value = [1.0] if isinstance(schedule.scheduler, lr_scheduler.ReduceLROnPlateau) else []
            if load:
                accelerator.load_state(tmp_path / "state")
            else:
                [schedule.step(*value) for _ in range(3)]
                accelerator.save_state(tmp_path / "state")
            [schedule.step(*value) for _ in range(2)]
            rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1]


@pytest.mark.parametrize(
    "text",
    [
        '{"format": 9}',
        "[]",
        '{"format": 1}',
    ],
)
def test_a_manifest_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    with accelerating(cpu=True) as accelerator:
        accelerator.save_state(tmp_path / "state")
        (tmp_path / "state" / "shardwise_state.json").write_text(text)
        with pytest.raises(ConfigError):
            accelerator.load_state(tmp_path / "state")


def test_a_load_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    with accelerating(cpu=True) as accelerator:
        model, *_ = filled(accelerator)
        accelerator.save_state(tmp_path / "state")
        (tmp_path / "state" / "optimizer.safetensors").unlink()
        nn.init.constant_(model.last.bias, 7.0)
        with pytest.raises(ConfigError, match="there is no such file"):
            accelerator.load_state(tmp_path / "state")
        assert model.last.bias.item() == 7
