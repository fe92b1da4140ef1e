"""`Accelerator`: its arguments, what `prepare` does and undoes, mixed precision.

Numbers in the names are those of reports in Accelerate's tracker.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import shardwise.utils
from shardwise import Accelerator, ConfigError, DeepSpeedPlugin, NotYetSupported
from shardwise.accelerator import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from shardwise.accelerator.current import forget
from shardwise.accelerator.operations import gather
from shardwise.state import AcceleratorState, GradientState, PartialState
from shardwise.utils import DistributedType
from tests.accelerator.loops import accelerating, falling, sharded
from tests.ranks import RankPools


def pair() -> tuple[Any, Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


# -- arguments --


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"mixed_precision": "int4"}, "mixed_precision: expected one of no, fp16, bf16, got 'int4'"),
        ({"mixed_precision": "fp8"}, "'fp8' has not landed"),
        ({"gradient_accumulation_steps": 0}, "whole number of 1 or more, got 0"),
        ({"gradient_accumulation_steps": 2.0}, "whole number of 1 or more, got 2.0"),
        (
            {"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin(3)},
            "give one",
        ),
        ({"split_batches": True, "dataloader_config": DataLoaderConfiguration()}, "contradicts"),
        ({"dataloader_config": {"split_batches": True}}, "expected a DataLoaderConfiguration, got dict"),
        ({"deepspeed_plugin": {"stage": 2}}, "expected a DeepSpeedPlugin"),
        ({"deepspeed_plugin": DeepSpeedPlugin(), "deepspeed_plugins": DeepSpeedPlugin()}, "give one of them"),
        ({"deepspeed_plugins": {}}, "the dict is empty"),
        ({"fsdp_plugin": object()}, "choose a ZeRO stage"),
        ({"torch_tp_plugin": object()}, "not landed"),
        ({"megatron_lm_plugin": object()}, "not landed"),
        ({"parallelism_config": object()}, "not landed"),
        ({"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]}, "given twice"),
        ({"kwargs_handlers": [{"enabled": False}]}, "got dict, expected one of"),
        ({"dynamo_backend": "eager", "dynamo_plugin": TorchDynamoPlugin("eager")}, "give one of them"),
        ({"step_scheduler": "epoch"}, "step_scheduler"),
        ({"gradient_normalization": "samples"}, "gradient_normalization"),
        ({"log_with": "clipboard"}, "clipboard"),
        ({"backend": 1}, "unexpected keyword"),
    ],
)
def test_wrong_arguments_are_refused_and_change_nothing(arguments: dict[str, Any], match: str) -> None:
    forget()
    with pytest.raises((ConfigError, NotYetSupported, TypeError), match=match):
        Accelerator(cpu=True, **arguments)
    assert AcceleratorState().mixed_precision == "no"


@pytest.mark.parametrize("arguments", [{"rng_types": ["dice"]}, {"dynamo_backend": "no such compiler"}])
def test_what_only_prepare_can_refuse(arguments: dict[str, Any]) -> None:
    with accelerating(cpu=True, **arguments) as accelerator, pytest.raises(Exception, match=r"dice|no such compiler"):
        accelerator.prepare(DataLoader([1]))  # type: ignore[arg-type]
        accelerator.prepare(nn.Linear(1, 1))(torch.ones(1, 1))


def test_arguments_that_name_the_same_thing(tmp_path: Path) -> None:
    project = ProjectConfiguration(logging_dir=tmp_path / "logs")
    options: dict[str, Any] = {"cpu": True, "project_dir": tmp_path, "project_config": project}
    with accelerating(split_batches=True, rng_types=["torch"], **options) as accelerator:
        assert accelerator.split_batches and accelerator.dataloader_config.split_batches
        assert accelerator.project_dir == tmp_path and accelerator.logging_dir == tmp_path / "logs"
        assert accelerator.rng_types == ["torch"] and accelerator.device == torch.device("cpu")
        accelerator.even_batches = False
        loader = accelerator.prepare(DataLoader([1, 2]))  # type: ignore[arg-type]
        assert loader.even_batches is False
    with accelerating(cpu=True, dataloader_config=DataLoaderConfiguration(non_blocking=True)) as accelerator:
        assert accelerator.non_blocking and accelerator.prepare(DataLoader([1])).non_blocking  # type: ignore[arg-type]
        assert accelerator.rng_types == ["generator"] and not accelerator.is_fsdp2
    # As positions, in the order that upstream's scripts rely on.
    with accelerating(True, None, "bf16", 3, True) as accelerator:
        assert accelerator.gradient_accumulation_steps == 3 and accelerator.mixed_precision == "bf16"


def test_handlers_reach_what_they_are_for() -> None:
    handlers = [
        AutocastKwargs(enabled=False),
        GradScalerKwargs(init_scale=8.0, growth_interval=5),
        DistributedDataParallelKwargs(find_unused_parameters=True),
        InitProcessGroupKwargs(timeout=timedelta(seconds=5)),
        ProfileKwargs(activities=["cpu"]),
    ]
    with accelerating(cpu=True, mixed_precision="fp16", kwargs_handlers=handlers) as accelerator:
        assert accelerator.scaler.get_scale() == 8 and accelerator.scaler.get_growth_interval() == 5
        model, _ = accelerator.prepare(*pair())
        assert model(torch.ones(2, 3)).dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        with accelerator.profile() as profiler:
            torch.ones(2) + 1
        assert any("add" in event.key for event in profiler.key_averages())
    for wrong in (
        lambda: DistributedDataParallelKwargs(comm_hook="power_sgd"),
        lambda: InitProcessGroupKwargs(init_method="tcp://x"),
        lambda: ProfileKwargs(activities=["fpga"]).build(),
    ):
        with pytest.raises((ConfigError, NotYetSupported)):
            wrong()


def test_dynamo_compiles_and_unwraps() -> None:
    with accelerating(cpu=True, dynamo_backend="eager") as accelerator:
        model = nn.Linear(2, 2)
        prepared = accelerator.prepare(model)
        assert prepared is not model and torch.equal(prepared(torch.ones(1, 2)), model(torch.ones(1, 2)))
        assert accelerator.unwrap_model(prepared) is prepared
        assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is model
        assert set(accelerator.get_state_dict(prepared)) == {"weight", "bias"}
        assert accelerator.prepare(prepared) is prepared
    torch._dynamo.reset()


def test_the_launchers_variables_stand_back_behind_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "5")
    with accelerating(cpu=True) as accelerator:
        assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("bf16", 5)
    with accelerating(cpu=True, mixed_precision="no", gradient_accumulation_steps=2) as accelerator:
        assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("no", 2)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    with accelerating(cpu=True) as accelerator:
        assert accelerator.deepspeed_plugin is not None and accelerator.deepspeed_plugin.stage == 3
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "int4")
    with pytest.raises(ConfigError, match="int4"):
        Accelerator(cpu=True)


# -- several of them --


def test_1131_2463_two_accelerators_of_different_settings() -> None:
    with accelerating(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=4) as first:
        one, _ = first.prepare(*pair())
        with accelerating(cpu=True, mixed_precision="no") as second:
            two, optimizer = second.prepare(*pair())
            with first.accumulate(one):
                assert not first.sync_gradients and second.sync_gradients
            assert (first.mixed_precision, second.mixed_precision) == ("bf16", "no")
            assert first.state.mixed_precision == "bf16" and first.gradient_state is not second.gradient_state
            second.backward(two(torch.ones(2, 3)).sum())
            optimizer.step()
            assert not optimizer.step_was_skipped
        assert first.mixed_precision == "bf16" and one._is_accelerate_prepared
        assert copy.deepcopy(first) is first


def sweep() -> list[float]:
    """Two of them on all ranks, used in turn."""
    with accelerating(cpu=True) as first:
        one, by_one = first.prepare(*pair())
        second = Accelerator(cpu=True, deepspeed_plugin=sharded(2, train_micro_batch_size_per_gpu=2))
        two, by_two = second.prepare(*pair())
        for _ in range(2):
            x = torch.randn(4, 3)
            first.backward(one(x).square().sum())
            second.backward(two(x).square().sum())
            by_one.step(), by_two.step(), by_one.zero_grad(), by_two.zero_grad()
        weights = [first.get_state_dict(one)["0.weight"], second.get_state_dict(two)["0.weight"]]
        found = [float((w - gather(w[None], processes=first.processes)[0]).abs().max()) for w in weights]
        second.free_memory()
        return found


def test_1131_two_accelerators_on_two_ranks(ranks: RankPools) -> None:
    assert ranks(2).run(sweep) == [[0.0, 0.0]] * 2


def test_states_answer_from_the_newest_accelerator() -> None:
    forget()
    assert PartialState().num_processes == 1 and GradientState().num_steps == 1
    with accelerating(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3) as accelerator:
        assert AcceleratorState() is accelerator.state and AcceleratorState().mixed_precision == "bf16"
        assert GradientState() is accelerator.gradient_state and GradientState().num_steps == 3
        assert PartialState() is accelerator.processes and PartialState().is_main_process
        assert AcceleratorState().distributed_type is DistributedType.NO
        AcceleratorState._reset_state(reset_partial_state=True)
        with pytest.raises(AttributeError, match=r"AcceleratorState\._reset_state"):
            accelerator.prepare(nn.Linear(1, 1))
        with pytest.raises(AttributeError, match="has no attribute `distributed_type`"):
            _ = accelerator.state.distributed_type
    assert AcceleratorState().mixed_precision == "no"


# -- prepare --


def test_prepare_keeps_the_order_and_hands_through_what_it_does_not_know() -> None:
    with accelerating(cpu=True) as accelerator:
        model, optimizer = pair()
        schedule, loader, other = falling(optimizer), DataLoader([1, 2]), {"a": 1}  # type: ignore[arg-type]
        out = accelerator.prepare(schedule, other, loader, None, optimizer, "text", model)
        assert out[1] is other and out[3] is None and out[5] == "text" and out[6] is model
        assert out[0].scheduler is schedule and out[0].optimizers == [out[4]] and out[4].optimizer is optimizer
        assert isinstance(out[2], DataLoader) and isinstance(out[4], torch.optim.Optimizer)
        assert all(item._is_accelerate_prepared for item in (out[0], out[2], out[4], out[6]))
        again = accelerator.prepare(*out)
        assert all(a is b for a, b in zip(again, out, strict=True))
        assert [len(x) for x in (accelerator._models, accelerator._optimizers, accelerator._schedulers)] == [1, 1, 1]
        assert accelerator.prepare(other) is other and len(accelerator._dataloaders) == 1
        with pytest.raises(ConfigError, match="2 values for 1 objects"):
            accelerator.prepare(nn.Linear(1, 1), device_placement=[True, False])


def test_a_schedule_without_an_optimizer_may_be_prepared() -> None:
    class Own:
        steps = 0

        def step(self) -> None:
            self.steps += 1

    with accelerating(cpu=True) as accelerator:
        accelerator.prepare(*pair())
        schedule = accelerator.prepare_scheduler(Own())
        schedule.step()
        assert schedule.steps == 1


def test_84_739_free_memory_undoes_everything() -> None:
    with accelerating(cpu=True, mixed_precision="fp16") as accelerator:
        model, optimizer = pair()
        before = {k: (v if not isinstance(v, dict) else dict(v)) for k, v in vars(model).items()}
        loader = accelerator.prepare(DataLoader([1, 2]))  # type: ignore[arg-type]
        prepared, wrapped = accelerator.prepare(model, optimizer)
        for _ in loader:
            break
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(torch.ones(2, 3)).sum())
        assert accelerator.free_memory(prepared, wrapped, loader) == [None] * 3
        after = {k: (v if not isinstance(v, dict) else dict(v)) for k, v in vars(model).items()}
        assert after == before and model(torch.ones(2, 3)).dtype == torch.float32
        lists = ("_models", "_optimizers", "_schedulers", "_dataloaders")
        assert not any(getattr(accelerator, name) for name in lists)
        dead = [weakref.ref(x) for x in (model, wrapped, optimizer, loader)]
        del model, prepared, wrapped, optimizer, loader, before, after
        gc.collect()
        assert [ref() for ref in dead] == [None] * 4
        assert len(accelerator.prepare(*pair())) == 2, "it may be used again"


def freed() -> list[int]:
    """Hooks that are left on two ranks."""
    with accelerating(cpu=True) as accelerator:
        model, optimizer = pair()
        accelerator.prepare(model, optimizer)
        accelerator.backward(model(torch.randn(2, 3)).sum())
        kept = [p.grad.clone() for p in model.parameters()]
        accelerator.free_memory()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), kept, strict=True))
        hooks: Any = [p._post_accumulate_grad_hooks or {} for p in model.parameters()]
        model(torch.randn(2 + accelerator.process_index, 3)).sum().backward()  # talks to nobody
        return [len(model._forward_pre_hooks), len(model._forward_hooks), *map(len, hooks)]


def test_739_free_memory_on_two_ranks(ranks: RankPools) -> None:
    assert ranks(2).run(freed) == [[0] * 8] * 2


def edits() -> list[float]:
    with accelerating(cpu=True) as accelerator:
        model: Any = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        accelerator.backward(model(torch.full((1, 1), 1.0 + accelerator.process_index)).sum())
        seen = float(model.weight.grad)
        model.weight.grad.mul_(2)
        optimizer.step()
        return [seen, -model.weight.item()]


def test_gradients_can_be_seen_and_edited(ranks: RankPools) -> None:
    assert ranks(2).run(edits) == [[1.5, 3.0]] * 2


@pytest.mark.parametrize("stage", [None, 2])
def test_unwrap_model_gives_the_scripts_own(stage: int | None) -> None:
    plugin = None if stage is None else sharded(stage, train_micro_batch_size_per_gpu=1)
    with accelerating(cpu=True, mixed_precision="bf16", deepspeed_plugin=plugin) as accelerator:
        model, optimizer = pair()
        prepared, _ = accelerator.prepare(model, optimizer)
        assert accelerator.unwrap_model(prepared) is model
        if stage is None:
            assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False) is model
            assert not model._forward_hooks and not model._forward_pre_hooks


# -- mixed precision --


class Rich(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, fail: bool = False) -> dict[str, Any]:
        if fail:
            raise ZeroDivisionError
        out = self.layer(x)
        return {"logits": out, "hidden": (out, [out]), "ids": torch.ones(1, dtype=torch.int64), "name": "x"}


@pytest.mark.parametrize("in_fp32", [True, False])
def test_3477_outputs_are_in_fp32_unless_asked_otherwise(in_fp32: bool) -> None:
    with accelerating(cpu=True, mixed_precision="bf16", outputs_in_fp32=in_fp32) as accelerator:
        model = accelerator.prepare(Rich())
        out = model(torch.ones(1, 2))
        wanted = torch.float32 if in_fp32 else torch.bfloat16
        assert out["logits"].dtype == out["hidden"][0].dtype == out["hidden"][1][0].dtype == wanted
        assert out["ids"].dtype == torch.int64 and out["name"] == "x"
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(1, 2), fail=True)
        assert not torch.is_autocast_enabled("cpu"), "an error leaves autocast"
        with accelerator.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert all(p.dtype == torch.float32 for p in model.parameters())


def test_273_a_model_in_mixed_precision_is_copied_and_pickled() -> None:
    with accelerating(cpu=True, mixed_precision="bf16") as accelerator:
        model = accelerator.prepare(Rich())
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(torch.ones(1, 2))["logits"], model(torch.ones(1, 2))["logits"])
            assert twin.layer.weight is not model.layer.weight


def copies() -> list[bool]:
    """An average of the weights is kept and used on the first rank alone."""
    with accelerating(cpu=True) as accelerator:
        model, _ = accelerator.prepare(*pair())
        average, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        if accelerator.is_main_process:
            average(torch.ones(2, 3)).sum().backward()
            pickled(torch.ones(2, 3)).sum().backward()
        accelerator.wait_for_everyone()
        return [average[0].weight.grad is not None, model[0].weight.grad is None]


def test_273_a_copy_is_no_replica(ranks: RankPools) -> None:
    assert ranks(2).run(copies) == [[True, True], [False, True]]


# -- names --


def test_every_name_of_utils_is_there() -> None:
    for name in shardwise.utils.__all__:
        assert getattr(shardwise.utils, name) is not None, name
    for name in shardwise.utils.REFUSED:
        with pytest.raises(ImportError, match=f"shardwise.utils.{name}"):
            getattr(shardwise.utils, name)
    with pytest.raises(ImportError):
        from shardwise.utils import nothing_of_this_name  # type: ignore[attr-defined]  # noqa: F401
    assert shardwise.utils.is_deepspeed_available() and not shardwise.utils.is_fp8_available()
