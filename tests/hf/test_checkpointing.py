"""`activation_checkpointing` and `compile` on Hugging Face models, whose blocks get caches, tables and masks."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from tests.checkpointing.models import said
from tests.compilers import COUNTED, counting_backend
from tests.hf.zoo import RANKS, ZOO, built, engine_for, next_words, rank

ON = {"activation_checkpointing": {"enabled": True}}


def model_of(name: str) -> nn.Module:
    """With dropout where the model has some."""
    model = built(ZOO[name])
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    return model


def train(engine: Any, **inputs: Any) -> list[tuple[float, float]]:
    seen = []
    for step in range(2):
        torch.manual_seed(1000 * step + rank())
        loss = engine(**next_words(step, rank()), **inputs).loss
        engine.backward(loss)
        engine.step()
        seen.append((loss.item(), engine.get_global_grad_norm()))
        prompt = torch.arange(1, 5).view(1, 4)
        engine.eval()
        with torch.no_grad():
            assert engine.generate(prompt, max_new_tokens=3, do_sample=False).shape[1] == 7
        engine.train()
    return seen


class Runs:
    """Counts the runs of one layer of each block in training."""

    def __init__(self, model: nn.Module) -> None:
        self.count = 0
        for name, module in model.named_modules():
            if name.endswith(".mlp"):
                module.register_forward_pre_hook(self._seen)

    def _seen(self, module: nn.Module, args: Any) -> None:
        self.count += module.training


def train_both_ways(name: str) -> None:
    kind = ZOO[name]
    for stage in (3,):
        with engine_for(model_of(name), stage, kind) as engine:
            expected = train(engine)
        # As the model comes (it makes a cache), without a cache, and with the model's own checkpointing on.
        for case in ("cache", "no cache", "its own", "its own, later", "half"):
            model = model_of(name)
            if case == "its own":
                model.gradient_checkpointing_enable()
            number = 2 if case == "half" else None
            config = {"activation_checkpointing": {"enabled": True, "number_checkpoints": number}}
            with engine_for(model, stage, kind, **config) as engine:
                if case == "its own, later":
                    model.gradient_checkpointing_enable()
                runs = Runs(model)
                assert train(engine, use_cache=case in ("cache", "half")) == expected, (stage, case)
                assert runs.count == 2 * (3 + (number or 3)), (stage, case)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_losses_and_norms_are_those_without_it_bit_for_bit(ranks, name):
    ranks(RANKS).run(train_both_ways, name)


def test_a_cache_is_left_empty_with_a_word(caplog):
    caplog.set_level(logging.INFO, logger="shardwise")
    with engine_for(built(ZOO["llama"]), 0, ZOO["llama"], **ON) as engine:
        logging.getLogger("shardwise").addHandler(caplog.handler)
        try:
            out = engine(**next_words(0, 0), use_cache=True)
        finally:
            logging.getLogger("shardwise").removeHandler(caplog.handler)
        assert "leave the key-value cache empty" in caplog.text
        cache = next(value for value in out.values() if hasattr(value, "get_seq_length"))
        assert cache.get_seq_length() == 0
        engine.backward(out.loss)


def test_a_prefix_in_the_cache_is_read():
    """As prefix tuning gives it: the blocks are then not checkpointed, and the loss is right."""
    from transformers import DynamicCache

    def loss(**keys: Any) -> float:
        model = built(ZOO["llama"])
        batch = next_words(0, 0)
        with engine_for(model, 0, ZOO["llama"], **keys) as engine:
            with torch.no_grad():
                cache = model(input_ids=batch["input_ids"][:, :3], past_key_values=DynamicCache()).past_key_values
            found = engine(input_ids=batch["input_ids"][:, 3:], labels=batch["input_ids"][:, 3:], past_key_values=cache)
            engine.backward(found.loss)
            engine.step()
            return found.loss.item(), engine.get_global_grad_norm()

    assert loss(**ON) == loss()
    assert loss(compile={"enabled": True, "backend": "eager"}) == loss()
    assert loss(compile={"enabled": True, "backend": "eager"}, **ON) == loss()


def deep_llama() -> nn.Module:
    """More blocks than torch compiles variants."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 12, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=1, **sizes)).train()


def test_compiled_blocks_share_code_whatever_was_generated_before(caplog):
    """The model makes a cache by default, of which each block would read its own layer."""
    torch._dynamo.reset()
    prompt = torch.arange(1, 5).view(1, 4)
    with (
        counting_backend() as counting,
        said() as lines,
        engine_for(deep_llama(), 0, ZOO["llama"], compile=COUNTED) as engine,
    ):
        engine.eval()
        generated = engine.generate(prompt, max_new_tokens=12, do_sample=False)
        assert counting.graphs == 0, "each token of a cache is another"
        engine.train()
        for step in range(2):
            counting.runs = 0
            out = engine(**next_words(step, 0))
            engine.backward(out.loss)
            engine.step()
            assert counting.runs == 12 and counting.graphs <= 2
    assert out.past_key_values.get_seq_length() == 0
    assert str(lines).count("leave the key-value cache empty in training") == 1 and "uncompiled" not in str(lines)
    assert torch.equal(generated, deep_llama().eval().generate(prompt, max_new_tokens=12, do_sample=False))


def test_generation_in_training_mode_keeps_its_cache():
    model = deep_llama()
    with torch.no_grad():
        expected = model.generate(torch.arange(1, 5).view(1, 4), max_new_tokens=4, do_sample=False)
    with engine_for(model, 0, ZOO["llama"], compile={"enabled": True, "backend": "eager"}) as engine, torch.no_grad():
        found = engine.generate(torch.arange(1, 5).view(1, 4), max_new_tokens=4, do_sample=False)
    assert torch.equal(found, expected)
