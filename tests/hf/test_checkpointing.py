"""`activation_checkpointing` and `compile` on Hugging Face models, whose blocks get caches, tables and masks."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

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
