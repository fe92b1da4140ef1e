"""Hugging Face models through their attention registry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwise import ConfigError
from shardwise.attention import switch_attention
from shardwise.attention.check import blind_queries
from shardwise.attention.switch import ALREADY, HF
from tests.attention.models import Section
from tests.attention.tools import Watched, found_nothing, replaced, same
from tests.hf.zoo import RANKS, ZOO, built, compare, engine_for, engine_run, next_words, plain_run, rank

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 53, "pad_token_id": 0, "decoder_start_token_id": 0}


def t5(**keys: Any) -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**SIZES, **{**sizes, **keys}))


def neox() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(vocab_size=53, **sizes))


def mistral() -> nn.Module:
    """Keys behind a window are hidden: the mask is not that of the sequence alone."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    more = {"num_key_value_heads": 2, "sliding_window": 3}
    return transformers.MistralForCausalLM(transformers.MistralConfig(vocab_size=53, **sizes, **more))


MODELS = {
    "gpt2": ZOO["gpt2"].build,
    "llama": ZOO["llama"].build,
    "bert": ZOO["bert_classifier"].build,
    "t5": t5,
    "neox": neox,
    "mistral": mistral,
}
# In float64, but for softmax or rotary angles that the models compute in float32: 1e-7 each, in a few layers.
LIMIT = 5e-6


def eager(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().double().train()
    model.set_attn_implementation("eager")
    return model


def run(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    batch = next_words(0, 0)
    if type(model).__name__.startswith("Bert"):
        batch["labels"] = torch.tensor([0, 2])
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_from_its_own_code_to_the_registry_and_back(name, cross):
    model = eager(name)
    expected = run(model)
    attention = {n for n, m in model.named_modules() if type(m).__name__.endswith("Attention") and hasattr(m, "config")}
    attention |= {n for n, m in model.named_modules() if type(m).__name__ == "BertSelfAttention"}
    switched = switch_attention(model, Section(cross_attention=cross), main=False)
    assert model.config._attn_implementation == "sdpa"
    crossing = {n for n in attention if "EncDec" in n}
    assert set(switched.modules[HF]) == (attention if cross else attention - crossing) - {"bert.attention"}
    assert set(switched.left) == (set() if cross else crossing)
    run(model)  # the first forward of some is a check, too
    with Watched() as watched:
        same(run(model), expected, LIMIT)
    assert len(watched.seen) == len(switched.modules[HF])
    switched.undo()
    assert model.config._attn_implementation == "eager" and not replaced(model)
    same(run(model), expected, 0.0)


def test_a_model_on_sdpa_gets_the_order_only():
    torch.manual_seed(0)
    model = t5().double()
    expected = run(model)
    switched = switch_attention(model, Section(), main=False)
    assert len(switched.modules[ALREADY]) == 4 and len(switched.left) == 2
    same(run(model), expected, 0.0)
    switched.undo()
    assert model.config._attn_implementation == "sdpa" and not replaced(model)


@pytest.mark.parametrize(("setting", "wanted"), [(None, 0.2), (True, 0.2), (False, 0.0), (0.1, 0.1)])
def test_dropout(setting, wanted):
    model = t5(dropout_rate=0.2).train()
    switched = switch_attention(model, Section(attention_dropout=setting), main=False)
    with Watched() as watched:
        run(model)
        # Four are switched; two are cross-attention and keep their own.
        assert sorted(watched.seen) == sorted([wanted] * 4 + [0.2] * 2)
        watched.seen.clear()
        run(model.eval())
    assert watched.seen == [0.0] * 6
    switched.undo()


def test_what_cannot_is_named():
    found_nothing(
        transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=53, hidden_size=16, n_layer=2, n_head=2)),
        "BloomForCausalLM does not take its attention from the registry",
    )
    model = eager("gpt2")
    model.config.output_attentions = True
    found_nothing(model, "config asks for output_attentions")


def test_another_implementation_is_left_alone_but_its_dropout_cannot_be_set():
    model = eager("llama")
    model.config._attn_implementation_internal = "flex_attention"
    switched = switch_attention(model, Section(), main=False)
    assert list(switched.modules) == [f"{HF}, on flex_attention already and left there"] and not replaced(model)
    with pytest.raises(ConfigError, match="on flex_attention, whose dropout cannot be set"):
        switch_attention(model, Section(attention_dropout=0.0), main=False)


def test_a_wrong_implementation_is_caught(monkeypatch):
    from transformers.integrations import sdpa_attention
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def wrong(module, query, *args, **kwargs):
        return sdpa_attention.sdpa_attention_forward(module, query * 1.01, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", wrong)
    model = eager("llama")
    found_nothing(model, r"model\.layers\.0\.self_attn gives another output")
    assert model.config._attn_implementation == "eager"
    model = eager("neox")
    switched = switch_attention(model, Section(), main=False)
    with pytest.raises(ConfigError, match=r"layers\.0\.attention gives another output"):
        run(model)
    switched.undo()


def test_padding_on_the_left_is_not_compared(monkeypatch):
    """Queries of padding see no key, and every implementation gives its own for them; the rest is compared."""
    words = next_words(0, 0)["input_ids"] % 50 + 1
    mask = torch.ones_like(words)
    mask[1, :3] = 0
    inputs = {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, -100)}
    model = eager("neox").float()
    switched = switch_attention(model, Section(), main=False)
    model(**inputs).loss.backward()
    switched.undo()

    kernel = torch.nn.functional.scaled_dot_product_attention

    def wrong_where_seen(query, key, value, attn_mask=None, **keys):
        return kernel(query, key, value, attn_mask=attn_mask, **keys) * (1 + 1e-3 * (attn_mask is not None))

    model = eager("neox").float()
    switched = switch_attention(model, Section(), main=False)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", wrong_where_seen)
    with pytest.raises(ConfigError, match="gives another output"):
        model(**inputs)
    switched.undo()


@pytest.mark.parametrize("low", [None, -torch.inf, torch.finfo(torch.float32).min])
def test_blind_queries(low):
    seen = torch.ones(2, 1, 4, 4, dtype=torch.bool).tril()
    seen[1, ..., :2] = False
    mask = seen if low is None else torch.zeros(seen.shape).masked_fill(~seen, low)
    assert blind_queries([None, mask], 2).tolist() == [[False] * 4, [True, True, False, False]]
    assert blind_queries([mask[1:]], 2).tolist() == [[True, True, False, False]] * 2
    assert blind_queries([mask[0, 0], torch.ones(2, 4)], 2) is None


def train_on_ranks(stage: int) -> None:
    kind = ZOO["gpt2"]
    plain = built(kind)
    plain.set_attn_implementation("eager")
    reference = plain_run(kind, plain) if rank() == 0 else None
    for reentrant in (True, False):
        model = built(kind)
        model.set_attn_implementation("eager")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        switched = switch_attention(model, Section(), main=False)
        with engine_for(model, stage, kind) as engine:
            run = engine_run(kind, engine)
        switched.undo()
        runs: list[Any] = [None] * RANKS
        torch.distributed.all_gather_object(runs, run)
        if reference is not None:
            compare(runs, reference, 1e-10, f"stage {stage}")


def test_training_with_checkpoints_on_ranks(ranks):
    for stage in (0, 3):
        ranks(RANKS).run(train_on_ranks, stage)
