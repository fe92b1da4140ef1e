"""Checkpoints: what is read, what is refused, and where it goes."""

from __future__ import annotations

import json
import os
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from shardwise.big_models import (
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from shardwise.errors import ConfigError, NotYetSupported, ShardingError
from tests.big_models.models import IDS, Tied, parameter_bytes, run, saved, tied

pytestmark = pytest.mark.filterwarnings("ignore:the buffers of offloaded modules take")


def empty() -> Tied:
    with init_empty_weights():
        return Tied().eval()


def sharded(folder: Path) -> Path:
    """The checkpoint in three files with an index."""
    state = {name: value for name, value in tied().state_dict().items() if name != "head.weight"}
    names, folder = sorted(state), folder / "sharded"
    folder.mkdir(parents=True)
    where = {name: f"model-0000{i % 3 + 1}-of-00003.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: state[name].clone() for name in names if where[name] == file}, str(folder / file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


@pytest.mark.parametrize("kind", ["file", "folder", "index", "sharded folder", "files without index"])
def test_kinds_of_checkpoints(kind: str, tmp_path: Path) -> None:
    expected = run(tied(), IDS)
    if kind in ("file", "folder"):
        path = saved(tied(), tmp_path / "whole")
        path = path / "model.safetensors" if kind == "file" else path
    else:
        path = sharded(tmp_path)
        if kind == "index":
            path = path / "model.safetensors.index.json"
        elif kind == "files without index":
            (path / "model.safetensors.index.json").unlink()
    model = load_checkpoint_and_dispatch(empty(), path, {"": "disk"}, strict=True)
    assert parameter_bytes(model) == 0
    assert torch.equal(run(model, IDS), expected)
    plain = load_checkpoint_and_dispatch(empty(), path, strict=True)
    assert torch.equal(run(plain, IDS), expected)
    assert plain.head.weight is plain.embed.weight


def test_weights_on_disk_are_used_from_the_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "offload"
    model = load_checkpoint_and_dispatch(empty(), saved(tied(), tmp_path), {"": "disk"}, offload_folder=folder)
    assert torch.equal(run(model, IDS), run(tied(), IDS))
    assert not list(tmp_path.glob("offload/*.safetensors"))
    # Cast ones are written once, rather than cast for each call.
    half = load_checkpoint_and_dispatch(
        empty(), tmp_path, {"": "disk"}, offload_folder=folder, dtype="bfloat16", offload_buffers=True
    )
    assert load_file(folder / "embed.weight.safetensors")["embed.weight"].dtype == torch.bfloat16
    state = half.state_dict()
    assert {value.dtype for value in state.values()} == {torch.bfloat16, torch.int64}
    assert state["norm.num_batches_tracked"].dtype == torch.int64
    expected = tied().to(torch.bfloat16)
    for name, value in expected.state_dict().items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize("limit", [0, 500, 1200, 2500, 10**6])
@pytest.mark.parametrize("kind", ["auto", "sequential"])
def test_automatic_maps(kind: str, limit: int, tmp_path: Path) -> None:
    path = saved(tied(), tmp_path / "checkpoint")
    model = load_checkpoint_and_dispatch(empty(), path, kind, max_memory={"cpu": limit})
    assert torch.equal(run(model, IDS), run(tied(), IDS))
    assert parameter_bytes(model) <= limit
    if limit < 10**6:
        assert "disk" in model.hf_device_map.values()
    else:
        assert model.hf_device_map == {"": "cpu"}
        assert not hasattr(model, "_hf_hook")


def test_in_two_steps(tmp_path: Path) -> None:
    path, folder, places = saved(tied(), tmp_path), tmp_path / "offload", {"": "disk", "embed": "cpu", "head": "cpu"}
    model = empty()
    load_checkpoint_in_model(model, path, places, offload_folder=folder)
    assert model.head.weight is model.embed.weight
    assert model.blocks[0].up.weight.is_meta
    dispatch_model(model, places, offload_dir=folder)
    assert torch.equal(run(model, IDS), run(tied(), IDS))
    with pytest.raises(ConfigError, match="offload_folder"):
        load_checkpoint_in_model(empty(), path, places)


def test_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read and not yet in the model is one tensor."""
    from shardwise.big_models import checkpoint

    alive: list[int] = []
    get = checkpoint.SafetensorsFiles.get

    def counted(files: checkpoint.SafetensorsFiles, entry: checkpoint.Entry) -> torch.Tensor:
        tensor = get(files, entry)
        alive.append(id(tensor))
        weakref.finalize(tensor, alive.remove, id(tensor))
        assert len(alive) <= 2  # the one before is let go as this one comes
        return tensor

    monkeypatch.setattr(checkpoint.SafetensorsFiles, "get", counted)
    model = empty()
    load_checkpoint_in_model(model, sharded(tmp_path), {"": "cpu"})
    assert torch.equal(run(model, IDS), run(tied(), IDS))


def test_files_are_mapped_anew_and_what_was_given_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that pages that were read do not count as the process's memory for as long as the model lives."""
    from shardwise.big_models import checkpoint

    opened: list[str] = []

    def opens(file: str, **kwargs: str) -> object:
        opened.append(file)
        return safe_open(file, **kwargs)

    monkeypatch.setattr(checkpoint, "safe_open", opens)
    monkeypatch.setattr(checkpoint, "_MAPPED", 2000)
    model = load_checkpoint_and_dispatch(empty(), saved(tied(), tmp_path), {"": "disk"})
    before = len(opened)
    state = model.state_dict()
    for _ in range(4):
        assert torch.equal(run(model, IDS), run(tied(), IDS))
    # A call reads the embedding twice, as the head is tied to it.
    read = 4 * (sum(p.nbytes for p in tied().parameters()) + tied().embed.weight.nbytes)
    assert read // 4000 < len(opened) - before < 2 * read // 2000
    for name, value in tied().state_dict().items():
        assert torch.equal(state[name], value)


def test_real_parameters_keep_their_identity_and_dtype(tmp_path: Path) -> None:
    path = saved(tied(), tmp_path)
    model = Tied().eval()
    before = model.gain
    load_checkpoint_in_model(model, path)
    assert model.gain is before
    assert torch.equal(run(model, IDS), run(tied(), IDS))
    double = Tied().double()
    load_checkpoint_in_model(double, path)
    assert double.gain.dtype == torch.float64  # like load_state_dict: the model's dtype unless one is given
    half = empty()
    load_checkpoint_in_model(half, path, dtype=torch.float16, keep_in_fp32_modules=["norm", "gain"])
    assert half.embed.weight.dtype == torch.float16
    assert half.norm.weight.dtype == half.gain.dtype == torch.float32


def test_names_that_differ(tmp_path: Path) -> None:
    state = {name: value.clone() for name, value in tied().state_dict().items() if name not in ("head.weight", "gain")}
    save_file({**state, "classifier.bias": torch.ones(2)}, str(tmp_path / "model.safetensors"))
    with pytest.warns(
        UserWarning, match=r"gain; in the checkpoint but not in the model, so not used: classifier\.bias"
    ):
        load_checkpoint_in_model(Tied(), tmp_path)
    with pytest.raises(ConfigError, match=r"strict.*not in the checkpoint, so left as they are: gain;"):
        load_checkpoint_in_model(Tied(), tmp_path, strict=True)
    with (
        pytest.warns(UserWarning, match="not in the checkpoint"),
        pytest.raises(ShardingError, match=r"no values \(meta device\): gain\. Load"),
    ):
        load_checkpoint_and_dispatch(empty(), tmp_path, {"": "disk"})


def test_a_tied_weight_under_any_of_its_names_and_a_buffer_that_is_not_saved(tmp_path: Path) -> None:
    state = {name: value.clone() for name, value in tied().state_dict().items() if name != "embed.weight"}
    save_file(state, str(tmp_path / "model.safetensors"))
    model = load_checkpoint_and_dispatch(empty(), tmp_path, {"": "disk"}, strict=True)
    assert torch.equal(run(model, IDS), run(tied(), IDS))
    save_file({**state, "blocks.0.scale": torch.full((8,), 7.0)}, str(tmp_path / "model.safetensors"))
    with pytest.warns(UserWarning, match=r"not in the model, so not used: blocks\.0\.scale"):
        model = load_checkpoint_and_dispatch(empty(), tmp_path)
    assert torch.equal(run(model, IDS), run(tied(), IDS))


def test_ties_are_seen_in_the_state_dict_of_a_cast_model(tmp_path: Path) -> None:
    model = load_checkpoint_and_dispatch(empty(), saved(tied(), tmp_path), {"": "disk"}, dtype="bfloat16")
    state = model.state_dict()
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
    assert state["embed.weight"].dtype == torch.bfloat16


def test_shapes_and_kinds_that_differ(tmp_path: Path) -> None:
    path = saved(tied(), tmp_path)
    with pytest.raises(ConfigError, match=r"embed\.weight: \(16, 8\) in the checkpoint, \(32, 8\) in the model"):
        load_checkpoint_in_model(Tied(vocabulary=32), path)
    save_file({"weight": torch.ones(2, 2, dtype=torch.int8)}, str(tmp_path / "codes.safetensors"))
    with pytest.raises(ConfigError, match=r"'weight' is torch\.int8"):
        load_checkpoint_in_model(nn.Linear(2, 2, bias=False), tmp_path / "codes.safetensors")


@pytest.mark.parametrize(
    "entry",
    [
        "../secret.safetensors",
        "/etc/x.safetensors",
        "a/../../x.safetensors",
        "C:\\x.safetensors",
        "..\\x.safetensors",
        "",
    ],
)
def test_an_index_must_not_leave_its_folder(entry: str, tmp_path: Path) -> None:
    saved(tied(), tmp_path)
    os.replace(tmp_path / "model.safetensors", tmp_path / "secret.safetensors")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"gain": entry}}))
    with pytest.raises(ConfigError, match="leaves the index's folder"):
        load_checkpoint_in_model(empty(), folder)


def test_links_within_a_download_cache_are_followed(tmp_path: Path) -> None:
    saved(tied(), tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "part.safetensors").symlink_to(tmp_path / "blobs" / "model.safetensors")
    stored = load_file(tmp_path / "blobs" / "model.safetensors")
    names = dict.fromkeys(stored, "part.safetensors")
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert torch.equal(run(load_checkpoint_and_dispatch(empty(), snapshot, {"": "disk"}), IDS), run(tied(), IDS))


def test_pickled_checkpoints_are_never_read(tmp_path: Path) -> None:
    touched = tmp_path / "touched"

    class Harm:
        def __reduce__(self) -> object:
            return (touched.touch, ())

    (tmp_path / "bin").mkdir()
    torch.save({"gain": Harm()}, tmp_path / "bin" / "pytorch_model.bin")
    (tmp_path / "bin" / "pytorch_model.bin.index.json").write_text("{}")
    for path in (tmp_path / "bin", tmp_path / "bin" / "pytorch_model.bin"):
        with pytest.raises(ConfigError, match=r"pickled.*convert it once"):
            load_checkpoint_in_model(empty(), path)
    (tmp_path / "x.index.json").write_text(json.dumps({"weight_map": {"gain": "bin/pytorch_model.bin"}}))
    with pytest.raises(ConfigError, match="pickled"):
        load_checkpoint_in_model(empty(), tmp_path / "x.index.json")
    assert not touched.exists()


def test_broken_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a file nor a folder"):
        load_checkpoint_in_model(empty(), tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"holds no \.safetensors"):
        load_checkpoint_in_model(empty(), tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"not one at all")
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        load_checkpoint_in_model(empty(), tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for text, said in (("{", "JSON"), ("[]", "JSON object"), ('{"weight_map": {"a": 1}}', "JSON object")):
        index.write_text(text)
        with pytest.raises(ConfigError, match=said):
            load_checkpoint_in_model(empty(), tmp_path)
    save_file({"gain": torch.ones(8)}, str(tmp_path / "a.safetensors"))
    index.write_text(json.dumps({"weight_map": {"embed.weight": "a.safetensors"}}))
    with pytest.raises(ConfigError, match=r"'embed\.weight' is not in a\.safetensors"):
        load_checkpoint_in_model(empty(), tmp_path)
    index.unlink()
    save_file({"gain": torch.ones(8)}, str(tmp_path / "b.safetensors"))
    with pytest.raises(ConfigError, match=r"'gain' is in a\.safetensors and in b\.safetensors"):
        load_checkpoint_in_model(empty(), tmp_path)


def test_arguments_without_support_are_refused(tmp_path: Path) -> None:
    path = saved(tied(), tmp_path)
    with pytest.raises(NotYetSupported, match="offload_8bit_bnb"):
        load_checkpoint_in_model(empty(), path, offload_8bit_bnb=True)
    with pytest.raises(NotYetSupported, match="broadcast_from_rank0"):
        load_checkpoint_and_dispatch(empty(), path, broadcast_from_rank0=True)
    with pytest.raises(ConfigError, match="'best' is none of auto"):
        load_checkpoint_and_dispatch(empty(), path, "best")


def test_plan_of_an_empty_model_is_that_of_the_real_one() -> None:
    limits: dict[int | str, int | float | str] = {"cpu": 1500}
    assert infer_auto_device_map(empty(), limits) == infer_auto_device_map(tied(), limits)
