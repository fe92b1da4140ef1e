"""Bad configurations and bad arguments: a sentence that says where and what, or a training that does as told."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise import Config, ConfigError, NotYetSupported, ShardingError, ShardwiseError
from shardwise.config.problems import format_path
from tests.config.configs import NAMES, OLD_SPELLINGS, real_config
from tests.config.mutations import KINDS, Edit, at, mutate, paths

EDITS = 200
"""Edits of each kind: 1,000 in all."""
MAX_MICRO_STEPS = 6
WIDTH = 4


# ---------------------------------------------------------------------------------------------- edited configs


def resolved(name: str, world_size: int) -> dict[str, Any]:
    """A real config with its batch cut down for some ranks: the same keys, and at most two micro-steps."""
    config = real_config(name)
    batch = Config.load(config, world_size=2)
    gas = min(batch.gradient_accumulation_steps, 2)
    for key, value in (
        ("train_batch_size", gas * world_size),
        ("train_micro_batch_size_per_gpu", 1),
        ("gradient_accumulation_steps", gas),
    ):
        if key in config:
            config[key] = value
    zero = config.get("zero_optimization", {})
    for key in ("mics_shard_size", "zero_hpz_partition_size"):
        if zero.get(key, -1) > world_size:
            zero[key] = world_size
    return config


def tiny() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))


@contextmanager
def trained(config: Any, **arguments: Any) -> Iterator[tuple[Any, list[float]]]:
    """Two steps, or as much of them as some micro-steps are; gives the engine and the losses."""
    engine, *_ = shardwise.initialize(model=tiny(), config=config, **arguments)
    try:
        losses: list[float] = []
        x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
        dtype = next(engine.module.parameters()).dtype
        for _ in range(min(2 * engine.gradient_accumulation_steps(), MAX_MICRO_STEPS)):
            loss = engine(x.to(dtype)).float().square().mean()
            tokens = 2.0 if engine.config.gradient_normalization == "tokens" else None
            engine.backward(loss, tokens=tokens)
            engine.step()
            losses.append(loss.item())
        yield engine, losses
    finally:
        engine.destroy()


def missing(config: dict[str, Any]) -> dict[str, Any]:
    """What the script of a config without an optimizer passes to ``initialize``."""
    return {} if "optimizer" in config else {"optimizer": lambda params: torch.optim.AdamW(params, lr=1e-3)}


# What a setting has come to in the engine itself, not in the object that was read from the JSON.
IN_EFFECT: dict[str, Callable[[Any], Any]] = {
    "train_batch_size": lambda e: e.train_batch_size(),
    "train_micro_batch_size_per_gpu": lambda e: e.train_micro_batch_size_per_gpu(),
    "gradient_accumulation_steps": lambda e: e.gradient_accumulation_steps(),
    "gradient_clipping": lambda e: e.gradient_clipping(),
    "zero_optimization.stage": lambda e: e.zero_optimization_stage(),
    "fp16.enabled": lambda e: next(e.module.parameters()).dtype == torch.float16,
    "bf16.enabled": lambda e: next(e.module.parameters()).dtype == torch.bfloat16,
    "seed": lambda e: torch.initial_seed(),
    "scheduler.type": lambda e: type(e.lr_scheduler).__name__,
}


def in_effect(engine: Any, edit: Edit) -> None:
    path = format_path(edit.path)
    if path in IN_EFFECT:
        assert IN_EFFECT[path](engine) == edit.value, edit
    elif edit.path[:2] == ("optimizer", "params") and edit.path[2:] and edit.path[2] in engine.optimizer.defaults:
        held = engine.optimizer.defaults[edit.path[2]]
        assert held == (tuple(edit.value) if isinstance(held, tuple) else edit.value), edit


def in_force(loaded: Any, written: Any) -> bool:
    """Whether what was loaded says what was written: null is absent, infinity is never."""
    if isinstance(written, dict):
        keys = {key: value for key, value in written.items() if value is not None and key not in OLD_SPELLINGS}
        return all(in_force(loaded[key], value) for key, value in keys.items())
    if isinstance(written, float) and math.isinf(written):
        return loaded is None
    return isinstance(loaded, bool) == isinstance(written, bool) and loaded == written


def outcome(edit: Edit) -> str:
    """``refused`` or ``trained``; anything else fails the test."""
    path = format_path(edit.path)
    try:
        with trained(edit.config, **missing(edit.config)) as (engine, losses):
            assert edit.kind != "typo", edit
            assert math.isfinite(losses[0]), edit
            settings = engine.config
            if edit.value == "auto":
                assert path in settings.filled, edit
            elif edit.path == ("zero_optimization",) and edit.value is True:
                assert engine.zero_optimization_stage() == 1  # an old spelling, with a warning
            elif edit.value is not None and edit.path[-1] not in OLD_SPELLINGS:
                assert in_force(at(settings.as_dict(), edit.path), edit.value), edit
                in_effect(engine, edit)
            steps = min(2, MAX_MICRO_STEPS // engine.gradient_accumulation_steps())
            assert engine.global_steps == steps, edit
            if steps and not settings.fp16.enabled and max(engine.get_lr(), default=0) < 1e3:
                assert engine.skipped_steps == 0, edit
                assert all(math.isfinite(loss) for loss in losses), edit
            return "trained"
    except ShardwiseError as error:
        text = str(error)
        # A batch number that does not fit is named with the two others.
        assert path in text, (edit, text)
        assert "Traceback" not in text and "pydantic" not in text, text
        return "refused"


def edits(kind: str, count: int, world_size: int) -> list[Edit]:
    rng = random.Random(f"{kind} on {world_size}")
    make = changed if kind == "changed" else mutate
    return [make(resolved(rng.choice(NAMES), world_size), kind, rng) for _ in range(count)]


def changed(config: dict[str, Any], kind: str, rng: random.Random) -> Edit:
    """Another value of the same type, which mostly is a good one: what it asks for must then happen."""
    path = rng.choice([p for p in paths(config) if isinstance(at(config, p), bool | int | float) and p[0] != "amp"])
    section, key = at(config, path[:-1]), path[-1]
    value = section[key]
    if isinstance(value, bool):
        section[key] = not value
    else:
        section[key] = rng.choice(
            [value + 1, max(value - 1, 0)] if isinstance(value, int) else [value * 1.5, value / 2]
        )
    return Edit(kind, config, path, section[key])


@pytest.fixture
def own_warnings_only():
    """Whatever torch warns of would be a setting that shardwise let pass and should not have."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "zero_optimization. true is read as")
        warnings.filterwarnings("ignore", "zero_optimization.cpu_offload is the old name of")
        warnings.filterwarnings("ignore", r"scheduler\.params\.cycle_momentum has no effect: .* has no betas")
        yield


@pytest.mark.parametrize("kind", [*KINDS, "changed"])
def test_an_edited_config_is_refused_by_its_path_or_trains_as_it_says(kind, own_warnings_only):
    outcomes, failed = [], []
    for edit in edits(kind, EDITS, 1):
        try:
            outcomes.append(outcome(edit))
        except Exception as error:  # all that escape are shown together
            failed.append(f"{edit.kind} {format_path(edit.path)} = {edit.value!r}: {type(error).__name__}: {error}")
    assert not failed, f"{len(failed)} of {EDITS}:\n" + "\n".join(failed)
    # A generator that only makes harmless edits, or only impossible ones, would prove nothing.
    assert outcomes.count("trained" if kind == "changed" else "refused") > EDITS / 4


def on_ranks(count: int) -> list[str]:
    return [outcome(edit) for kind in (*KINDS, "changed") for edit in edits(kind, count, 2)]


def test_an_edited_config_on_two_ranks(ranks):
    first, second = ranks(2).run(on_ranks, 12)
    assert first == second
    assert {"refused", "trained"} == set(first)


@pytest.mark.parametrize("name", NAMES)
def test_a_real_config_trains_as_it_is(name, own_warnings_only):
    config = resolved(name, 1)
    with trained(config, **missing(config)) as (engine, losses):
        assert engine.global_steps == 2
        assert all(math.isfinite(loss) for loss in losses)


def test_what_has_not_landed_is_refused_before_training():
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    }
    with pytest.raises(NotYetSupported, match=r"zero_optimization\.offload_optimizer\.device"):
        engine, *_ = shardwise.initialize(model=tiny(), config=config)
        engine.destroy()


def test_a_loss_scale_that_starts_below_its_minimum_names_both():
    config = {**CONFIG, "fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 64}}
    refused(ConfigError, r"fp16\.initial_scale_power.*fp16\.min_loss_scale", config=config)


# ---------------------------------------------------------------------------------------------- bad arguments

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
WITHOUT_OPTIMIZER = {"train_micro_batch_size_per_gpu": 1}


def refused(kind: type[ShardwiseError], match: str, **arguments: Any) -> None:
    """``initialize`` raises, and the model is an ordinary model after it."""
    model = arguments.setdefault("model", tiny())
    arguments.setdefault("config", CONFIG)
    try:
        with pytest.raises(kind, match=match):
            engine, *_ = shardwise.initialize(**arguments)
            engine.destroy()
    finally:
        if isinstance(model, nn.Module) and any(p.requires_grad and not p.is_meta for p in model.parameters()):
            usable_again(model)


def usable_again(model: nn.Module) -> None:
    """A second initialize with good arguments works."""
    engine, *_ = shardwise.initialize(model=model, config=CONFIG)
    engine.backward(engine(torch.ones(1, WIDTH)).sum())
    engine.step()
    engine.destroy()


def test_no_model():
    refused(ConfigError, "model: shardwise.initialize needs the model to train", model=None)


@pytest.mark.parametrize("thing", ["gpt2", tiny, [tiny()], {"model": 1}], ids=["name", "function", "list", "dict"])
def test_a_model_that_is_none(thing):
    refused(ConfigError, "model: .*nn.Module", model=thing)


def test_no_config():
    refused(ConfigError, "config: none given; pass a path or a dict", config=None)


def test_two_configs():
    refused(ConfigError, "config: given as config and as config_params; give it once", config_params=CONFIG)


class Arguments:
    deepspeed_config = CONFIG


def test_a_config_in_args_and_another():
    refused(ConfigError, "config: given as config and as args.deepspeed_config", args=Arguments())


def test_the_config_in_args_and_the_old_name_are_read():
    for arguments in ({"args": Arguments()}, {"config_params": CONFIG}, {"config": Config.load(CONFIG)}):
        engine, *_ = shardwise.initialize(model=tiny(), **arguments)
        assert engine.get_lr() == [1e-3]
        engine.destroy()


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ("absent.json", "absent.json"),
        (7, "7|int"),
        ([], "list|object"),
        ({}, "train_batch_size: no batch size is given"),
        ("", "config|empty"),
    ],
)
def test_a_config_that_is_none(config, match):
    refused(ConfigError, match, config=config)


def test_a_config_file_that_is_no_json(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": 4,\n "fp16": {"enabled": tru}}')
    refused(ConfigError, r"ds_config.json.*line 2", config=path)


@pytest.mark.parametrize("name", ["mpu", "mesh_param"])
def test_model_parallel_arguments(name):
    refused(NotYetSupported, f"{name}.*not landed", **{name: object()})


# --- optimizers


def test_an_optimizer_of_parameters_that_are_not_the_models():
    other = torch.optim.AdamW(nn.Linear(3, 5).parameters())
    refused(
        ShardingError, r"group 0 of the optimizer.*shape \(5, 3\).*not a parameter of the model",
        optimizer=other, config=WITHOUT_OPTIMIZER,
    )  # fmt: skip


def test_an_optimizer_of_this_and_another_model():
    model, other = tiny(), nn.Linear(3, 5)
    both = torch.optim.SGD([{"params": model.parameters()}, {"params": other.parameters()}], lr=0.1)
    refused(
        ShardingError, r"group 1 of the optimizer.*shape \(5, 3\)", model=model, optimizer=both,
        config=WITHOUT_OPTIMIZER,
    )  # fmt: skip
    # The plain optimizer still holds the model's parameters, not pieces of what is gone.
    assert [id(p) for p in both.param_groups[0]["params"]] == [id(p) for p in model.parameters()]


def test_model_parameters_that_are_not_the_models():
    refused(ShardingError, r"not a parameter of the model", model_parameters=nn.Linear(3, 5).parameters())


@pytest.mark.parametrize("made", [None, 7, "AdamW", nn.Linear(1, 1)], ids=lambda v: type(v).__name__)
def test_a_callable_that_makes_no_optimizer(made):
    refused(
        ConfigError, f"optimizer: the callable returned {type(made).__name__}, not a torch.optim.Optimizer",
        optimizer=lambda params: made, config=WITHOUT_OPTIMIZER,
    )  # fmt: skip


@pytest.mark.parametrize("thing", ["AdamW", 7, {"type": "AdamW"}], ids=["str", "int", "dict"])
def test_an_optimizer_that_is_none(thing):
    refused(
        ConfigError, f"optimizer: .*{type(thing).__name__}.*torch.optim.Optimizer",
        optimizer=thing, config=WITHOUT_OPTIMIZER,
    )  # fmt: skip


def test_an_optimizer_of_another_engine():
    engine, optimizer, _, _ = shardwise.initialize(model=tiny(), config=CONFIG)
    try:
        refused(ShardingError, "belongs to another engine", optimizer=optimizer, config=WITHOUT_OPTIMIZER)
    finally:
        engine.destroy()


def test_a_model_of_another_engine():
    model = tiny()
    engine, *_ = shardwise.initialize(model=model, config=CONFIG)
    try:
        with pytest.raises(ShardingError, match=r"parameter 0.weight is already managed.*destroy\(\)"):
            shardwise.initialize(model=model, config=CONFIG)
        engine.backward(engine(torch.ones(1, WIDTH)).sum())  # the first goes on
        engine.step()
    finally:
        engine.destroy()
    usable_again(model)


def test_an_engine_as_the_model():
    engine, *_ = shardwise.initialize(model=tiny(), config=CONFIG)
    try:
        with pytest.raises(ShardwiseError, match=r"already managed|is an engine"):
            shardwise.initialize(model=engine, config=CONFIG)
    finally:
        engine.destroy()


@pytest.mark.parametrize(
    ("optimizer", "match"),
    [
        ({"type": "AdamX"}, r"optimizer\.type.*AdamX"),
        ({"type": "OneBitLamb"}, r"optimizer\.type.*OneBitLamb.*write Lamb"),
        ({"type": "AdamW", "params": {"lr": -1}}, r"optimizer\.params\.lr"),
        ({"type": "AdamW", "params": {"momentum": 0.9}}, r"optimizer\.params\.momentum"),
        ({"type": "SGD", "params": {"lr": 0.1, "nesterov": True}}, r"optimizer\.params.*[Nn]esterov"),
    ],
)
def test_an_optimizer_section(optimizer, match):
    refused(ConfigError, match, config={**CONFIG, "optimizer": optimizer})


def test_a_step_without_an_optimizer():
    engine, *_ = shardwise.initialize(model=tiny(), config=WITHOUT_OPTIMIZER)
    try:
        engine.backward(engine(torch.ones(1, WIDTH)).sum())
        with pytest.raises(ConfigError, match=r"optimizer: absent.*nothing to step"):
            engine.step()
    finally:
        engine.destroy()


# --- schedules and data


def test_a_schedule_without_an_optimizer():
    section = {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}
    refused(
        ConfigError, "scheduler: there is no optimizer to schedule", config={**WITHOUT_OPTIMIZER, "scheduler": section}
    )


def test_a_callable_schedule_without_an_optimizer():
    refused(ConfigError, "scheduler: there is no optimizer", lr_scheduler=lambda o: None, config=WITHOUT_OPTIMIZER)


@pytest.mark.parametrize("made", [None, 7, "WarmupLR"], ids=lambda v: type(v).__name__)
def test_a_callable_that_makes_no_schedule(made):
    refused(ConfigError, f"lr_scheduler: the callable returned {type(made).__name__}", lr_scheduler=lambda o: made)


def test_a_schedule_that_is_none():
    refused(ConfigError, "lr_scheduler: .*int", lr_scheduler=7)


def test_a_schedule_section_that_torch_refuses():
    section = {"type": "CosineAnnealingLR", "params": {}}
    refused(ConfigError, r"scheduler\.params\.T_max", config={**CONFIG, "scheduler": section})


def test_train_batch_without_data():
    engine, *_ = shardwise.initialize(model=tiny(), config=CONFIG)
    try:
        with pytest.raises(ConfigError, match=r"train_batch\(\) without data_iter needs `training_data`"):
            engine.train_batch()
        with pytest.raises(ShardingError, match=r"train_batch needs a model that returns its loss.*dict"):
            engine.module.forward = lambda x: {"logits": x}
            engine.train_batch(iter([torch.ones(1, WIDTH)]))
    finally:
        engine.destroy()


# --- models


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.long())


def test_a_model_on_the_meta_device():
    with torch.device("meta"):
        model = tiny()
    refused(ShardingError, "parameter 0.weight is on the meta device.*zero.Init", model=model)


def test_a_model_without_parameters():
    refused(ShardwiseError, "model.*no parameter", model=nn.ReLU())


def test_a_model_that_is_all_frozen():
    refused(ShardwiseError, "model.*no parameter", model=tiny().requires_grad_(False))


def test_a_sparse_gradient_is_trained_as_the_dense_one():
    engine, *_ = shardwise.initialize(model=Sparse(), config=CONFIG)
    try:
        engine.backward(engine(torch.ones(1)).sum())
        engine.step()
        assert engine.get_global_grad_norm() > 0
    finally:
        engine.destroy()


# --- losses


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (lambda out: out, r"scalar loss, got \(1, 4\).*loss.mean\(\)"),
        (lambda out: out.sum().item(), "scalar loss, got float"),
        (lambda out: None, "scalar loss, got NoneType"),
        (lambda out: {"loss": out.sum()}, "scalar loss, got dict"),
        (lambda out: out.sum().detach(), "loss without a graph.*no_grad, or detached"),
        (lambda out: torch.zeros(()), "loss without a graph"),
        (lambda out: torch.zeros((), requires_grad=True) * 1, "no parameter|model|graph"),
    ],
    ids=["vector", "number", "none", "dict", "detached", "constant", "another graph"],
)
def test_a_loss(loss, match):
    engine, *_ = shardwise.initialize(model=tiny(), config=CONFIG)
    try:
        if match != "no parameter|model|graph":
            with pytest.raises(ShardingError, match=match):
                engine.backward(loss(engine(torch.ones(1, WIDTH))))
        else:
            # Legal in torch: a step in which no parameter was used changes nothing.
            before = engine.module_state_dict()
            engine(torch.ones(1, WIDTH))
            engine.backward(loss(None))
            engine.step()
            assert all(torch.equal(v, before[k]) for k, v in engine.module_state_dict().items())
        engine.zero_grad()
        engine.backward(engine(torch.ones(1, WIDTH)).sum())  # and the engine goes on
        engine.step()
        assert engine.skipped_steps == 0
    finally:
        engine.destroy()


def test_tokens_that_are_missing():
    engine, *_ = shardwise.initialize(model=tiny(), config={**CONFIG, "gradient_normalization": "tokens"})
    try:
        with pytest.raises(
            ConfigError, match=r"gradient_normalization: .tokens. needs.*engine.backward\(loss, tokens=n\)"
        ):
            engine.backward(engine(torch.ones(1, WIDTH)).sum())
    finally:
        engine.destroy()


def test_no_sync_where_gradients_must_be_reduced():
    engine, *_ = shardwise.initialize(model=tiny(), config={**CONFIG, "zero_optimization": {"stage": 2}})
    try:
        with pytest.raises(ShardingError, match="no_sync: ZeRO stage 2"), engine.no_sync():
            pass
        with pytest.raises(ConfigError, match="train_batch_size: 0 is not a positive multiple"):
            engine.set_train_batch_size(0)
        with pytest.raises(ConfigError, match="train_micro_batch_size_per_gpu: -1"):
            engine.set_train_micro_batch_size(-1)
    finally:
        engine.destroy()


# ---------------------------------------------------------------------------------------------- on ranks


class Mine(torch.optim.Optimizer):
    """A class of the user's own, of which nobody knows what it does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        """Does nothing."""


def stage_one(**keys: Any) -> dict[str, Any]:
    return {**WITHOUT_OPTIMIZER, "zero_optimization": {"stage": 1}, **keys}


def with_optimizer(cls: type[torch.optim.Optimizer], config: dict[str, Any]) -> int:
    model = tiny()
    params = [p for p in model.parameters() if p.dim() == 2] if cls is torch.optim.Muon else model.parameters()
    with trained_by(model, cls(params, lr=0.1), config) as engine:
        return engine.global_steps


@contextmanager
def trained_by(model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Iterator[Any]:
    engine, *_ = shardwise.initialize(model=model, optimizer=optimizer, config=config)
    try:
        engine.backward(engine(torch.ones(1, WIDTH)).sum())
        engine.step()
        yield engine
    finally:
        engine.destroy()


@pytest.mark.parametrize("cls", [torch.optim.Adafactor, torch.optim.Muon])
@pytest.mark.parametrize("config", ["stage 0", "stage 1"])
def test_an_optimizer_that_needs_whole_parameters_gets_them(ranks, cls, config):
    keys = WITHOUT_OPTIMIZER if config == "stage 0" else stage_one()
    assert ranks(2).run(with_optimizer, cls, keys) == [1, 1]


def test_an_optimizer_that_needs_a_closure_says_so():
    """LBFGS evaluates the loss itself, which no stage can give it."""
    with pytest.raises(ShardwiseError, match=r"LBFGS.*closure"):
        with_optimizer(torch.optim.LBFGS, WITHOUT_OPTIMIZER)


def test_an_optimizer_class_that_nobody_knows(ranks):
    match = "not known whether the optimizer Mine.*zero_allow_untested_optimizer"
    ranks(2).run_expecting(ConfigError, with_optimizer, Mine, stage_one(), match=match)
    assert ranks(2).run(with_optimizer, Mine, stage_one(zero_allow_untested_optimizer=True)) == [1, 1]


def test_a_batch_that_does_not_fit_the_ranks(ranks):
    match = r"train_batch_size: 3 is no multiple of 1 \(train_micro_batch_size_per_gpu\) x 2 \(world size\)"
    ranks(2).run_expecting(ConfigError, odd_batch, match=match)


def odd_batch() -> None:
    engine, *_ = shardwise.initialize(model=tiny(), config={**CONFIG, "train_batch_size": 3})
    engine.destroy()


def odd_groups(key: str) -> None:
    zero = {"stage": 3, key: 3}
    engine, *_ = shardwise.initialize(model=tiny(), config={**CONFIG, "zero_optimization": zero})
    engine.destroy()


@pytest.mark.parametrize("key", ["mics_shard_size", "zero_hpz_partition_size"])
def test_groups_that_do_not_divide_the_ranks(ranks, key):
    match = rf"zero_optimization\.{key}: 3 does not divide the world size 2; write 1 or 2"
    ranks(2).run_expecting(ConfigError, odd_groups, key, match=match)
