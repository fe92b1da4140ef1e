"""Language models of transformers, offloaded: the same tokens."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.big_models import (
    cpu_offload,
    dispatch_model,
    find_tied_parameters,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    remove_hook_from_submodules,
)
from tests.big_models.models import parameter_bytes, peak_bytes

pytestmark = [
    pytest.mark.filterwarnings("ignore:the buffers of offloaded modules take"),
    pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules"),
]
transformers = pytest.importorskip("transformers")
PROMPT = torch.tensor([[5, 7, 11, 13]])


def config() -> Any:
    return transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=63
    )


@pytest.fixture(scope="module")
def original() -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config()).eval()


@pytest.fixture(scope="module")
def checkpoint(original: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    original.save_pretrained(folder)
    return folder


def empty() -> Any:
    with init_empty_weights():
        return transformers.GPT2LMHeadModel(config()).eval()


def tokens(model: Any) -> list[int]:
    made = model.generate(PROMPT, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(PROMPT))
    return made[0].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("limit", [0, 60_000, 10**7])
def test_generate_with_weights_on_disk(limit: int, original: Any, checkpoint: Path, tmp_path: Path) -> None:
    model = load_checkpoint_and_dispatch(
        empty(),
        checkpoint,
        device_map="auto",
        max_memory={"cpu": limit},
        no_split_module_classes=["GPT2Block"],
        offload_folder=tmp_path,
        strict=False,
    )
    assert find_tied_parameters(model) == [["lm_head.weight", "transformer.wte.weight"]]
    assert parameter_bytes(model) <= limit
    with peak_bytes(model) as seen, torch.no_grad():
        assert torch.equal(model(PROMPT).logits, original(PROMPT).logits)
    if limit == 0:
        assert max(seen) == max(sum(p.nbytes for p in m.parameters(recurse=False)) for m in original.modules())
    assert tokens(model) == tokens(original)


def test_blocks_stay_whole(original: Any) -> None:
    limits: dict[int | str, int | float | str] = {"cpu": 100_000}
    found = infer_auto_device_map(original, limits, no_split_module_classes=["GPT2Block"])
    assert all(name.count(".") <= 2 for name in found)
    assert found["transformer.wte"] == found["lm_head"] == "cpu"


def test_offloaded_to_the_cpu_and_saved_again(original: Any, checkpoint: Path, tmp_path: Path) -> None:
    model = load_checkpoint_and_dispatch(empty(), checkpoint, {"": "cpu"})
    cpu_offload(model)
    assert tokens(model) == tokens(original)
    model.save_pretrained(tmp_path)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert tokens(again) == tokens(original)
    remove_hook_from_submodules(model)
    assert tokens(model) == tokens(original)


def test_a_dispatched_model_is_saved_with_its_values(original: Any, checkpoint: Path, tmp_path: Path) -> None:
    model = load_checkpoint_and_dispatch(empty(), checkpoint, {"": "disk", "transformer.h.1": "cpu"})
    with pytest.warns(UserWarning, match="offloaded modules"):
        model.save_pretrained(tmp_path)
    assert tokens(transformers.GPT2LMHeadModel.from_pretrained(tmp_path)) == tokens(original)


@pytest.mark.parametrize("places", [{"": "disk"}, {"": "cpu"}, {"shared": "cpu", "lm_head": "cpu", "": "disk"}])
def test_an_encoder_decoder(places: dict[str, str], tmp_path: Path) -> None:
    def build() -> Any:
        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()

    expected = tokens(build())
    model = build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the encoder's name of the shared embedding is on "disk" in the third map
        dispatch_model(model, places, offload_dir=tmp_path)
    assert model.hf_device_map == places
    assert tokens(model) == expected
    remove_hook_from_submodules(model)
    assert not hasattr(model, "hf_device_map")
    assert tokens(model) == expected
