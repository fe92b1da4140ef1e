"""A ds_config under an Accelerator: what "auto" becomes, what is refused, and several engines in one process.

Numbers in the names are those of reports in Accelerate's tracker.
"""

from __future__ import annotations

import copy
import json
import logging
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from shardwise import ConfigError, DeepSpeedPlugin, NotYetSupported, ShardingError
from shardwise.accelerator import DummyOptim, DummyScheduler
from shardwise.utils import DistributedType
from tests.accelerator.loops import Net, accelerating, falling
from tests.ranks import RankPools

ADAMW = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "betas": [0.8, 0.9]}}
WARMUP = {
    "type": "WarmupDecayLR",
    "params": {k: "auto" for k in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")},
}


def config(**more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 2, **more}


def plugin(**more: Any) -> DeepSpeedPlugin:
    return DeepSpeedPlugin(hf_ds_config=config(**more))


def loader(size: int | None = 2) -> Any:
    return DataLoader(torch.ones(12, 6), batch_size=size)  # type: ignore[arg-type]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def engine_of(given: DeepSpeedPlugin, *more: Any, options: dict[str, Any] | None = None, **names: Any) -> Any:
    """The configuration of an engine that a script prepares; dicts are as `vars` shows them."""
    with accelerating(cpu=True, deepspeed_plugin=given, **(options or {})) as accelerator:
        model = names.get("model") or Net(0, torch.float32)
        optimizer = names["optimizer"](model) if "optimizer" in names else adamw(model)
        schedules = [names["schedule"](optimizer)] if "schedule" in names else []
        prepared = accelerator.prepare(model, optimizer, *schedules, *more)
        engine = prepared[0]
        found = {
            "micro": engine.train_micro_batch_size_per_gpu(),
            "gas": engine.gradient_accumulation_steps(),
            "batch": engine.train_batch_size(),
            "clip": engine.gradient_clipping(),
            "stage": engine.zero_optimization_stage(),
            "filled": dict(engine.config.filled),
            "accelerator_gas": accelerator.gradient_accumulation_steps,
            "groups": [{k: g[k] for k in ("lr", "weight_decay")} for g in prepared[1].param_groups],
            "printed": engine.config.steps_per_print,
            "precision": (accelerator.mixed_precision, accelerator.state.mixed_precision),
        }
        assert accelerator.distributed_type is DistributedType.DEEPSPEED
        assert accelerator.deepspeed_engine_wrapped is engine
    return types.SimpleNamespace(**found)


@contextmanager
def listening() -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shardwise")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


# -- batch sizes and windows --


def test_the_micro_batch_is_the_loaders() -> None:
    auto = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}
    for smallest, wanted in ((True, 2), (False, 4)):
        given = DeepSpeedPlugin(hf_ds_config=config(**auto), is_train_batch_min=smallest)
        with listening() as said:
            found = engine_of(given, loader(2), loader(4), options={"gradient_accumulation_steps": 3})
        assert (found.micro, found.gas, found.batch) == (wanted, 3, 3 * wanted)
        assert found.filled["train_micro_batch_size_per_gpu"] == wanted
        assert any("train_micro_batch_size_per_gpu" in text and str(wanted) in text for text in said), said
    for loaders, why in (([], "there is none"), ([loader(2), loader(None)], "one has none")):
        with pytest.raises(ConfigError, match=f"train_micro_batch_size_per_gpu: .*{why}"):
            engine_of(plugin(**auto), *loaders)


def test_2298_a_number_in_the_ds_config_counts() -> None:
    assert engine_of(plugin(train_micro_batch_size_per_gpu=7), loader(2)).micro == 7
    assert engine_of(plugin(train_micro_batch_size_per_gpu=7)).micro == 7


def on_two(split: bool, again: bool) -> tuple[int, int]:
    """Micro-batch and batch that the engine takes from a loader with 4 rows, which may be prepared before."""
    given = plugin(train_micro_batch_size_per_gpu="auto")
    with accelerating(cpu=True, deepspeed_plugin=given, split_batches=split) as accelerator:
        data = loader(4)
        if again:
            data = accelerator.prepare(data)
        model = Net(0, torch.float32)
        engine, _, _ = accelerator.prepare(model, adamw(model), data)
        return engine.train_micro_batch_size_per_gpu(), engine.train_batch_size()


@pytest.mark.parametrize(
    "again",
    [False, True],
)
def test_the_micro_batch_on_two_processes(ranks: RankPools, again: bool) -> None:
    assert ranks(2).run(on_two, True, again) == [(2, 4)] * 2
    assert ranks(2).run(on_two, False, again) == [(4, 8)] * 2


def test_1970_windows_are_the_accelerators_unless_the_ds_config_says_otherwise() -> None:
    steps = {"gradient_accumulation_steps": 3}
    for given in (plugin(), plugin(gradient_accumulation_steps="auto")):
        assert engine_of(given, options=steps).gas == 3
    with pytest.warns(UserWarning, match="gradient_accumulation_steps: the ds_config says 5, the Accelerator 3"):
        found = engine_of(plugin(gradient_accumulation_steps=5), options=steps)
    assert (found.gas, found.accelerator_gas) == (5, 5)
    given = DeepSpeedPlugin(hf_ds_config=config(), gradient_accumulation_steps=4)
    with pytest.warns(UserWarning, match="says 4, the Accelerator 1"):
        assert engine_of(given).gas == 4


# -- clipping --


def norms(given: DeepSpeedPlugin, ask: float | None) -> tuple[float, float]:
    with accelerating(cpu=True, deepspeed_plugin=given) as accelerator:
        model = nn.Linear(1, 1, bias=False)
        engine, optimizer, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader())
        accelerator.backward(9 * engine(torch.ones(1, 1)).sum())
        if ask is not None:
            assert float(accelerator.clip_grad_norm_(engine.parameters(), ask)) == 9
        optimizer.step()
        return engine.grad_norm_before_clip, round(engine.grad_norm_after_clip, 4)


def test_3807_2791_nothing_is_clipped_that_nobody_asked_for(recwarn: pytest.WarningsRecorder) -> None:
    for given in (DeepSpeedPlugin(), DeepSpeedPlugin(zero_stage=0), plugin(), plugin(gradient_clipping=0)):
        assert norms(copy.deepcopy(given), None) == (9, 9)
        assert norms(copy.deepcopy(given), 2.5) == (9, 2.5)
        assert norms(copy.deepcopy(given), float("inf")) == (9, 9)
    assert not [w for w in recwarn if "clip" in str(w.message)]
    for asked in (DeepSpeedPlugin(gradient_clipping=3.0), DeepSpeedPlugin(config(), gradient_clipping=3.0)):
        assert norms(asked, None) == (9, 3)
    assert norms(plugin(gradient_clipping="auto"), None) == (9, 1), "as upstream fills it"
    assert norms(DeepSpeedPlugin(config(gradient_clipping="auto"), gradient_clipping=2.0), None) == (9, 2)


def test_3807_a_norm_that_contradicts_the_ds_config_is_told() -> None:
    with pytest.warns(UserWarning, match=r"clip_grad_norm_\(max_norm=5.0\): the ds_config says gradient_clipping: 2.0"):
        assert norms(plugin(gradient_clipping=2.0), 5.0) == (9, 2)


def test_clipping_of_other_kinds_is_refused() -> None:
    with accelerating(cpu=True, deepspeed_plugin=plugin()) as accelerator:
        model = Net(0, torch.float32)
        engine, _ = accelerator.prepare(model, adamw(model))
        with pytest.raises(NotYetSupported, match="clip_grad_norm_ only"):
            accelerator.clip_grad_value_(engine.parameters(), 1.0)
        with pytest.raises(NotYetSupported, match="norm_type=1"):
            accelerator.clip_grad_norm_(engine.parameters(), 1.0, norm_type=1)
        with pytest.raises(ConfigError, match="no prepared model"):
            accelerator.clip_grad_norm_(nn.Linear(1, 1).parameters(), 1.0)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_backward_that_the_engine_is_not_told_of_is_noticed(stage: int) -> None:
    with accelerating(cpu=True, deepspeed_plugin=plugin(zero_optimization={"stage": stage})) as accelerator:
        model = Net(0, torch.float32)
        engine, optimizer = accelerator.prepare(model, adamw(model))
        engine(torch.ones(2, 6)).sum().backward()
        with pytest.warns(UserWarning, match="changed nothing: no accelerator.backward"):
            optimizer.step()


# -- what a ds_config is --


def test_where_a_ds_config_may_come_from(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config()))
    holder = types.SimpleNamespace(config=config())
    for source in (path, str(path), config(), holder):
        given = DeepSpeedPlugin(hf_ds_config=source)
        assert given.stage == 2 and given.get_value("zero_optimization.stage") == 2
    assert config() == holder.config, "the script's own is not changed"
    with pytest.raises(ConfigError, match="zero_optimization: missing"):
        DeepSpeedPlugin(hf_ds_config={"train_batch_size": 1})
    with pytest.raises(ConfigError):
        DeepSpeedPlugin(hf_ds_config=str(tmp_path / "none.json"))


def test_the_plugins_values_fill_auto_and_contradictions_are_told() -> None:
    for stage in (0, 3):
        given = DeepSpeedPlugin(config(zero_optimization={"stage": "auto"}), zero_stage=stage)
        assert given.stage == stage == engine_of(given).stage
    with pytest.warns(UserWarning, match="zero_stage=3"):
        assert engine_of(DeepSpeedPlugin(config(), zero_stage=3)).stage == 2
    assert engine_of(DeepSpeedPlugin(zero_stage=1), loader()).stage == 1
    assert engine_of(plugin()).printed is None


def test_sizes_that_follow_from_the_width_of_a_model() -> None:
    zero = {"stage": 3} | dict.fromkeys(
        ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
    )
    model = Net(0, torch.float32)
    model.config = types.SimpleNamespace(hidden_size=16)
    filled = engine_of(plugin(zero_optimization=zero), model=model).filled
    assert filled["zero_optimization.reduce_bucket_size"] == 256
    assert filled["zero_optimization.stage3_prefetch_bucket_size"] == 230
    assert filled["zero_optimization.stage3_param_persistence_threshold"] == 160


@pytest.mark.parametrize(("precision", "other"), [("bf16", "fp16"), ("fp16", "bf16")])
def test_3086_precision_of_script_and_ds_config(precision: str, other: str) -> None:
    asked = {"mixed_precision": precision}
    for given in (plugin(), plugin(**{precision: {"enabled": True}}), plugin(**{precision: {"enabled": "auto"}})):
        assert engine_of(given, options=asked).precision == (precision, precision)
    assert engine_of(plugin(**{precision: {"enabled": True}})).precision == (precision, precision)
    with pytest.raises(ConfigError, match=f"mixed_precision='{precision}', but the ds_config has {other}.enabled"):
        engine_of(plugin(**{other: {"enabled": True}}), options=asked)


def test_2463_a_plugin_may_be_used_by_two_accelerators() -> None:
    given = plugin()
    before = copy.deepcopy(given.deepspeed_config)
    assert engine_of(given, options={"mixed_precision": "bf16"}).precision[0] == "bf16"
    assert given.deepspeed_config == before
    assert engine_of(given, options={"mixed_precision": "no"}).precision[0] == "no"


@pytest.mark.parametrize(
    "given",
    [
        {"offload_optimizer_device": "cpu"},
        {"offload_param_device": "nvme"},
        {"offload_param_nvme_path": "/x"},
        {"enable_msamp": True},
        {"msamp_opt_level": "O1"},
    ],
)
def test_what_has_not_landed_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises((NotYetSupported, ConfigError), match=r"not landed|not supported"):
        DeepSpeedPlugin(**given)


def test_autotp_is_refused() -> None:
    with pytest.raises((NotYetSupported, ConfigError), match="tensor_parallel"):
        engine_of(plugin(tensor_parallel={"autotp_size": 2}))


# -- optimizers and schedules of the ds_config --


def dummy(model: nn.Module) -> Any:
    return DummyOptim(model.parameters(), lr=0.03, weight_decay=0.25)


def planned(optimizer: Any) -> Any:
    return DummyScheduler(optimizer, total_num_steps=9, warmup_num_steps=4)


def schedule_on(size: int) -> dict[str, Any]:
    found = engine_of(plugin(optimizer=ADAMW, scheduler=WARMUP), optimizer=dummy, schedule=planned)
    assert found.groups == [{"lr": pytest.approx(0.0, abs=0.03), "weight_decay": 0.25}]
    return found.filled


@pytest.mark.parametrize("size", [1, 2])
def test_2318_dummies_fill_the_optimizer_and_the_schedule(ranks: RankPools, size: int) -> None:
    for filled in ranks(size).run(schedule_on, size):
        values = {k.rpartition(".")[2]: v for k, v in filled.items() if ".params." in k}
        assert values == {
            "lr": 0.03,
            "weight_decay": 0.25,
            "warmup_min_lr": 0,
            "warmup_max_lr": 0.03,
            "warmup_num_steps": 4,
            "total_num_steps": -(-9 // size),
        }


def test_a_schedule_of_the_ds_config_advances_with_the_engine() -> None:
    given = plugin(optimizer=ADAMW, scheduler=WARMUP)
    with accelerating(cpu=True, deepspeed_plugin=given, gradient_accumulation_steps=2) as accelerator:
        model = Net(0, torch.float32)
        optimizer = dummy(model)
        engine, optimizer, schedule = accelerator.prepare(model, optimizer, planned(optimizer))
        rates = [schedule.get_last_lr()[0]]
        for _ in range(6):
            with accelerator.accumulate(engine):
                accelerator.backward(engine(torch.ones(2, 6)).sum())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            rates.append(schedule.get_last_lr()[0])
    # Upstream's warm-up starts from log(1): its first update changes nothing.
    assert rates[:4] == [0] * 4 and 0 < rates[4] == rates[5] < rates[6]


def test_dummies_and_sections_that_do_not_fit_are_refused() -> None:
    optimizer, scheduler = {"optimizer": ADAMW}, {"scheduler": WARMUP}
    for given, names, why in (
        (optimizer, {}, r"the ds_config has one, and so has the script \(AdamW\)"),
        ({}, {"optimizer": dummy}, "DummyOptim stands for that of the ds_config, which has none"),
        (scheduler, {"schedule": falling}, r"the ds_config has one, and so has the script \(LambdaLR\)"),
        (optimizer, {"optimizer": dummy, "schedule": planned}, "DummyScheduler stands for .* which has none"),
    ):
        with pytest.raises(ConfigError, match=why):
            engine_of(plugin(**given), **names)


def test_an_optimizer_needs_its_model_in_the_same_call() -> None:
    with accelerating(cpu=True, deepspeed_plugin=plugin()) as accelerator:
        one, two = nn.Linear(1, 1), nn.Linear(1, 1)
        with pytest.raises(ConfigError, match="prepared in one call"):
            accelerator.prepare(adamw(one))
        with pytest.raises(ShardingError, match="not a parameter of the model"):
            accelerator.prepare(one, two, torch.optim.SGD([*one.parameters(), *two.parameters()], lr=1.0))
        with pytest.raises(NotYetSupported, match="two optimizers"):
            accelerator.prepare(one, adamw(one), adamw(one))
        with pytest.raises(ConfigError, match="device_placement"):
            accelerator.prepare(one, device_placement=[True])


def test_the_scripts_optimizer_keeps_all_its_hyperparameters() -> None:
    with accelerating(cpu=True, deepspeed_plugin=plugin()) as accelerator:
        model = Net(0, torch.float32)
        groups = [{"params": [model.last.weight], "weight_decay": 0.5}, {"params": [model.first.weight], "lr": 7.0}]
        inner = torch.optim.AdamW(groups, lr=0.1, betas=(0.5, 0.6), eps=1e-3)
        _, optimizer = accelerator.prepare(model, inner)
        found = [(g["lr"], g["weight_decay"], g["betas"], g["eps"]) for g in optimizer.param_groups]
        assert found == [(0.1, 0.5, (0.5, 0.6), 1e-3), (7.0, 0.01, (0.5, 0.6), 1e-3)]
