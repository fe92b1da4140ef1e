"""Hugging Face models on two ranks: the losses of one process, and a state that loads back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise

pytest.importorskip("transformers")

from tests.hf.zoo import (
    IGNORED,
    RANKS,
    ROWS,
    ZOO,
    Kind,
    Run,
    adamw,
    built,
    compare,
    copied,
    engine_for,
    engine_run,
    llama,
    llama_config,
    next_words,
    norm_of,
    plain_run,
    rank,
    released,
    same_state,
    sent,
)

STAGES = (0, 1, 2, 3)
LLAMA = ZOO["llama"]
# Everything is computed in float64 on both sides and only the order of sums differs. With float32 (the real weights)
# one sum is good to about 1e-7, and three steps of AdamW pass it on.
LIMIT = {torch.float64: 1e-10, torch.float32: 1e-5}
# A parameter's own error relative to its tensor's largest value; AdamW divides by the gradient's size.
STATE_LIMIT = {torch.float64: 1e-8, torch.float32: 1e-3}


# ---------------------------------------------------------------------------------------------- training


def train_at_all_stages(name: str) -> tuple[Run | None, dict[int, Run]]:
    """The reference (on rank 0) and this rank's runs; the states are compared here."""
    kind = ZOO[name]
    plain = built(kind)
    reference = plain_run(kind, plain) if rank() == 0 else None
    expected, runs = copied(plain), {}
    for stage in STAGES:
        model = built(kind)
        before = copied(model)
        with engine_for(model, stage, kind) as engine:
            check_rest(engine, stage, kind)
            runs[stage] = engine_run(kind, engine)
            check_rest(engine, stage, kind)
            state = engine.module_state_dict()
        for prefix in kind.unused:
            chosen = [key for key in state if prefix in key]
            assert chosen and all(torch.equal(state[key], before[key]) for key in chosen)
        if reference is not None:
            same_state(state, expected, STATE_LIMIT[kind.dtype])
            other = built(kind, seed=8)
            other.load_state_dict(state, strict=True)
            same_state(copied(other), state, 0)
        same_state(copied(model), state, 0)  # whole and ordinary again
    return reference, runs


def check_rest(engine: Any, stage: int, kind: Kind) -> None:
    """Between steps stage 3 holds half of each parameter above the threshold, the others hold everything."""
    params = [p for p in engine.module.parameters() if p.numel() > kind.zero["stage3_param_persistence_threshold"]]
    assert {released(p) for p in params} == {stage == 3}
    whole = sum(p.numel() * p.element_size() for p in engine.module.parameters())
    # The alignment of each small unit's parameters is all that is on top.
    assert engine.memory_report()["parameters"] <= whole * (0.6 if stage == 3 else 1.1)


@pytest.mark.parametrize("name", ZOO)
def test_a_model_trains_with_the_losses_of_one_process(ranks, name):
    (reference, first), (_, second) = ranks(RANKS).run(train_at_all_stages, name, timeout=110)
    assert len(set(reference.losses)) == len(reference.losses)
    for stage in STAGES:
        compare([first[stage], second[stage]], reference, LIMIT[ZOO[name].dtype], f"{name} at stage {stage}")


def count(batch: dict[str, torch.Tensor]) -> int:
    """Tokens that a causal model's loss is the mean of: the first has nothing before it."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def ragged(step: int, micro: int, of_rank: int) -> dict[str, torch.Tensor]:
    """A micro-batch whose number of targets is its own."""
    batch = next_words(10 * step + micro, of_rank)
    batch["labels"][:, : 1 + micro + 2 * of_rank] = IGNORED
    return batch


def train_by_tokens(stage: int) -> float:
    """Two micro-steps on ragged batches, dicts through ``train_batch``. (Not Llama, whose norms round to float32: the
    ranks' losses are not scaled by powers of two here, so that they would round otherwise.)"""
    kind = ZOO["gpt2"]
    plain, model = built(kind), built(kind)
    optimizer = adamw(plain)
    norm = 0.0
    with engine_for(model, stage, kind, gradient_accumulation_steps=2, gradient_normalization="tokens") as engine:
        for step in range(3):
            parts = [ragged(step, micro, r) for micro in range(2) for r in range(RANKS)]
            assert len({count(part) for part in parts}) > 2
            plain(**{key: torch.cat([p[key] for p in parts]) for key in parts[0]}).loss.backward()
            norm = norm_of(plain)
            optimizer.step()
            optimizer.zero_grad()
            engine.train_batch(iter([ragged(step, micro, rank()) for micro in range(2)]), tokens=count)
            assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-10)
        same_state(engine.module_state_dict(), copied(plain), 1e-8)
    return norm


@pytest.mark.parametrize("stage", [1, 3])
def test_ragged_batches_are_weighted_by_their_tokens(ranks, stage):
    first, second = ranks(RANKS).run(train_by_tokens, stage)
    assert first == second > 0


def train_checkpointed(name: str, reentrant: bool) -> None:
    kind = ZOO[name]
    plain = built(kind)
    reference = plain_run(kind, plain)
    expected = copied(plain)
    for stage in (2, 3):
        model = built(kind)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        with engine_for(model, stage, kind) as engine:
            run = engine_run(kind, engine)
            assert run.norms == pytest.approx(reference.norms, rel=1e-10), stage
            same_state(engine.module_state_dict(), expected, 1e-8)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert_classifier"])
def test_activation_checkpointing_changes_nothing(ranks, name, reentrant):
    ranks(RANKS).run(train_checkpointed, name, reentrant)


# ---------------------------------------------------------------------------------------------- adapters


class Adapter(nn.Module):
    """LoRA: a frozen layer and two small matrices beside it."""

    def __init__(self, base: nn.Linear, size: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, size, bias=False)
        self.up = nn.Linear(size, base.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def with_adapters() -> nn.Module:
    torch.manual_seed(7)
    model = llama().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
        layer.self_attn.v_proj = Adapter(layer.self_attn.v_proj)
    return model.double().train()


def train_adapters(stage: int, checkpointed: bool) -> None:
    kind = LLAMA
    plain = with_adapters()
    reference = plain_run(kind, plain)
    model = with_adapters()
    if checkpointed:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    start = copied(model)
    trained = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    with engine_for(model, stage, kind) as engine:
        before = sent(engine, "reduce_scatter")
        run = engine_run(kind, engine)
        per_step = (sent(engine, "reduce_scatter") - before) / kind.steps
        by_name = dict(engine.module.named_parameters())
        if stage == 3:
            assert all(released(by_name[n]) for n in frozen if by_name[n].dim() > 1)
        assert all(by_name[n].grad is None for n in frozen)
        state = engine.module_state_dict()
        adapters = engine.module_state_dict(exclude_frozen_parameters=True)
    assert run.norms == pytest.approx(reference.norms, rel=1e-10)
    same_state(state, copied(plain), 1e-8)
    assert all(torch.equal(state[n], start[n]) for n in frozen)
    assert set(adapters) >= set(trained) and not set(adapters) & set(frozen)
    # Only adapters travel: half of each is sent, and small units are padded to 2 ranks x 64 bytes for each parameter.
    payload = sum(trained.values()) * 8 // RANKS
    assert payload <= per_step <= payload + len(trained) * 128


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("stage", [2, 3])
def test_adapters_on_a_frozen_base(ranks, stage, checkpointed):
    ranks(RANKS).run(train_adapters, stage, checkpointed)


# ---------------------------------------------------------------------------------------------- generation


def generate(name: str, stage: int) -> None:
    kind = ZOO[name]
    plain = built(kind).eval()
    prompt = torch.arange(1, 9).view(2, 4)
    model = built(kind)
    with engine_for(model, stage, kind) as engine:
        for _ in range(2):  # before and after a step
            engine.eval()
            length = 3 + 4 * rank()
            with torch.no_grad():
                own = engine.generate(prompt, max_new_tokens=length, do_sample=False)
                same = engine.module.generate(prompt, max_new_tokens=5, do_sample=False)
            engine.train()
            assert torch.equal(own, plain.generate(prompt, max_new_tokens=length, do_sample=False))
            assert torch.equal(same, plain.generate(prompt, max_new_tokens=5, do_sample=False))
            if stage == 3:
                assert all(released(p) for p in model.parameters() if p.dim() > 1)
            loss = engine(**next_words(0, rank())).loss
            engine.backward(loss)
            engine.step()
            plain.load_state_dict(engine.module_state_dict())


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["gpt2", "llama_tied"])
def test_generation_to_different_lengths_on_the_ranks(ranks, name, stage):
    ranks(RANKS).run(generate, name, stage)


# ---------------------------------------------------------------------------------------------- files


def save_and_load(name: str, stage: int, folder: str) -> list[str]:
    kind = ZOO[name]
    model = built(kind)
    with engine_for(model, stage, kind) as engine:
        engine_run(kind, engine)
        state = engine.module_state_dict()
        if rank() == 0:
            engine.module.save_pretrained(folder, state_dict=dict(state))  # it empties what it gets
        engine_run(kind, engine)  # saving has disturbed nothing
    if rank() != 0:
        return []
    loaded = type(model).from_pretrained(folder, dtype=kind.dtype)
    same_state(copied(loaded), state, 0)
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["gpt2", "llama", "llama_tied", "bert_classifier"])
def test_save_pretrained_writes_whole_tensors(ranks, tmp_path, name, stage):
    files, _ = ranks(RANKS).run(save_and_load, name, stage, str(tmp_path))
    assert "model.safetensors" in files and "config.json" in files


# ---------------------------------------------------------------------------------------------- zero.Init


class Watch:
    """The most parameter memory there was at once, in elements, while a model was built."""

    def __init__(self) -> None:
        self.params: list[nn.Parameter] = []
        self.peak = 0

    def note(self, _module: Any, _name: Any, param: nn.Parameter | None) -> None:
        if param is not None and not any(p is param for p in self.params):
            self.params.append(param)
        self.measure()

    def measure(self) -> None:
        with torch._C.DisableTorchFunction():  # zero.Init would take this for a use of the parameter
            live = {p.untyped_storage().data_ptr(): p for p in self.params if not released(p)}
            self.peak = max(self.peak, sum(p.untyped_storage().nbytes() // p.element_size() for p in live.values()))


def build_in_pieces(tied: bool) -> tuple[int, int]:
    from torch.nn.modules.module import register_module_parameter_registration_hook
    from transformers import LlamaForCausalLM

    from shardwise.sharding.unit import Unit

    config = llama_config(num_hidden_layers=6, tie_word_embeddings=tied)
    torch.manual_seed(11)
    plain = LlamaForCausalLM(config)
    after = torch.get_rng_state()
    watch, gather = Watch(), Unit.finish_gather

    def watched(unit: Unit) -> None:
        gather(unit)
        watch.measure()

    hook = register_module_parameter_registration_hook(watch.note)
    Unit.finish_gather = watched
    torch.manual_seed(11)
    try:
        with shardwise.zero.Init():
            model = LlamaForCausalLM(config)
    finally:
        Unit.finish_gather = gather
        hook.remove()
    assert torch.equal(torch.get_rng_state(), after)
    assert all(released(p) for p in model.parameters())
    peak = watch.peak
    state = {name: value.clone() for name, value in model.state_dict().items()}
    same_state(state, copied(plain), 0)
    train_both(plain, model)
    return peak, sum(p.numel() for p in plain.parameters())


def train_both(plain: nn.Module, model: nn.Module) -> None:
    """In float32, as both were built."""
    kind = LLAMA
    plain.train()
    model.train()
    reference = plain_run(kind, plain)
    with engine_for(model, 3, LLAMA) as engine:
        run = engine_run(kind, engine)
        assert run.norms == pytest.approx(reference.norms, rel=1e-5)
        same_state(engine.module_state_dict(), copied(plain), 1e-3)


@pytest.mark.parametrize("tied", [False, True], ids=["two_embeddings", "tied"])
def test_zero_init_builds_the_same_model_without_ever_having_it_whole(ranks, tied):
    for peak, total in ranks(RANKS).run(build_in_pieces, tied):
        # One embedding of it, and the few matrices that are touched at a time.
        assert peak < total / 2


# ---------------------------------------------------------------------------------------------- new embeddings


def resize_before(stage: int) -> int:
    model = built(LLAMA)
    model.resize_token_embeddings(60, mean_resizing=False)
    with engine_for(model, stage, LLAMA) as engine:
        engine_run(LLAMA, engine)
        return engine.module_state_dict()["model.embed_tokens.weight"].shape[0]


def resize_after(stage: int) -> None:
    with engine_for(built(LLAMA), stage, LLAMA) as engine:
        engine.module.resize_token_embeddings(60, mean_resizing=False)
        engine(**next_words(0, rank()))


@pytest.mark.parametrize("stage", [1, 3])
def test_new_embeddings_come_before_initialize(ranks, stage):
    assert ranks(RANKS).run(resize_before, stage) == [60, 60]
    match = r"parameter (model\.embed_tokens|lm_head)\.weight was added or replaced after shardwise\.initialize"
    ranks(RANKS).run_expecting(shardwise.ShardingError, resize_after, stage, match=match)


def test_the_batch_fits_the_configuration():
    assert next_words(0, 0)["input_ids"].shape[0] == ROWS
    # The means of the ranks' means are the means only because of this.
    assert count(next_words(0, 0)) == count(next_words(0, 1)) == count(next_words(3, 1))
