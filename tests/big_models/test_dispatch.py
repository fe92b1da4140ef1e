"""Models whose weights lie elsewhere: the same results, in less memory."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.big_models import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    find_tied_parameters,
    remove_hook_from_submodules,
)
from shardwise.errors import ConfigError, ShardingError
from tests.big_models.models import IDS, Block, Tied, parameter_bytes, peak_bytes, run, tied

SPREAD = {
    "embed": "cpu",
    "head": "cpu",
    "gain": "cpu",
    "blocks.0": "disk",
    "blocks.1": "cpu",
    "blocks.2": "disk",
    "norm": "disk",
}

WAYS: dict[str, Callable[[nn.Module, Path], nn.Module]] = {
    "cpu": lambda model, folder: cpu_offload(model, "cpu"),
    "cpu with buffers": lambda model, folder: cpu_offload(model, offload_buffers=True),
    "disk": lambda model, folder: disk_offload(model, folder),
    "disk with buffers": lambda model, folder: disk_offload(model, folder, "cpu", offload_buffers=True),
    "map": lambda model, folder: dispatch_model(model, SPREAD, offload_dir=folder),
    "map, all on disk": lambda model, folder: dispatch_model(model, {"": "disk"}, offload_dir=folder),
    "one device": lambda model, folder: dispatch_model(model, {"": "cpu"}),
    "one device with hooks": lambda model, folder: dispatch_model(model, {"": "cpu"}, force_hooks=True),
    "preloaded": lambda model, folder: cpu_offload(model, preload_module_classes=["Block"]),
    "root preloaded": lambda model, folder: disk_offload(model, folder, preload_module_classes="Tied"),
}


@pytest.mark.parametrize("way", WAYS)
def test_same_outputs_values_and_an_ordinary_model_afterwards(way: str, tmp_path: Path) -> None:
    plain, model = tied(), tied()
    expected = run(plain, IDS)
    assert WAYS[way](model, tmp_path / "weights") is model
    for _ in range(2):
        assert torch.equal(run(model, IDS), expected)
    assert find_tied_parameters(model) == [["embed.weight", "head.weight"]]
    state = model.state_dict()
    assert state.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()

    remove_hook_from_submodules(model)
    assert all(not t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert find_tied_parameters(model) == [["embed.weight", "head.weight"]]
    assert all(p.requires_grad for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks or hasattr(m, "_hf_hook") for m in model.modules())
    model.double().load_state_dict(plain.double().state_dict())
    assert torch.equal(run(model, IDS), run(plain, IDS))


def test_nothing_stays_between_calls_and_one_layer_during_them(tmp_path: Path) -> None:
    model = disk_offload(tied(), tmp_path)
    largest = max(sum(p.nbytes for p in m.parameters(recurse=False)) for m in tied().modules())
    gain = 8 * 4  # the root's own parameter is there during the whole call
    with peak_bytes(model) as seen:
        run(model, IDS)
    assert parameter_bytes(model) == 0
    assert max(seen) == largest + gain
    blocks = cpu_offload(tied(), preload_module_classes=["Block"])
    with peak_bytes(blocks) as seen:
        run(blocks, IDS)
    assert max(seen) == sum(p.nbytes for p in Block(8).parameters()) + gain


def test_what_stays_stays(tmp_path: Path) -> None:
    model = dispatch_model(tied(), SPREAD, offload_dir=tmp_path)
    stays = sum(p.nbytes for n, p in tied().named_parameters() if n.startswith(("embed", "gain", "blocks.1")))
    with peak_bytes(model) as seen:
        run(model, IDS)
    largest = max(p.nbytes for n, p in tied().named_parameters() if n.startswith("blocks.0.up.w")) + 16 * 4
    assert parameter_bytes(model) == stays
    assert max(seen) == stays + largest
    assert model.hf_device_map == SPREAD


def test_row_4083_everything_on_disk_keeps_its_own_values(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    model = dispatch_model(copy.deepcopy(plain), {"": "disk"}, offload_dir=tmp_path)
    state = model.state_dict()
    assert len({value.data_ptr() for value in state.values()}) == 12
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value)
    assert torch.equal(run(model, torch.ones(1, 4)), run(plain, torch.ones(1, 4)))


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_row_2129_disk_offload_of_buffers_and_tied_weights(offload_buffers: bool, tmp_path: Path) -> None:
    plain, model = tied(), disk_offload(tied(), tmp_path, offload_buffers=offload_buffers)
    assert model.blocks[0].shift.is_meta == offload_buffers
    assert not model.blocks[0].scale.is_meta  # in no state dict, so it stays
    assert torch.equal(run(model, IDS), run(plain, IDS))
    assert torch.equal(run(model, IDS), run(plain, IDS))


def test_tied_weights_are_in_one_file_and_loaded_once_where_both_are_used(tmp_path: Path) -> None:
    model = disk_offload(tied(), tmp_path, preload_module_classes=["Tied"])
    files = {file.stem for file in tmp_path.glob("*.safetensors")}
    assert "embed.weight" in files
    assert "head.weight" not in files
    with peak_bytes(model) as seen:
        run(model, IDS)
    assert max(seen) == parameter_bytes(tied())


def test_a_folder_with_older_weights_is_not_believed(tmp_path: Path) -> None:
    disk_offload(tied(), tmp_path)
    torch.manual_seed(1)
    other = type(tied())().eval()
    expected = run(other, IDS)
    assert torch.equal(run(disk_offload(other, tmp_path), IDS), expected)


def test_a_module_that_hangs_in_two_places(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    plain = nn.Sequential(layer, nn.Sequential(layer, nn.Tanh()), layer)
    model, x = disk_offload(copy.deepcopy(plain), tmp_path), torch.ones(1, 3)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    assert torch.equal(run(model, x), run(plain, x))
    assert parameter_bytes(model) == 0
    remove_hook_from_submodules(model)
    assert torch.equal(run(model, x), run(plain, x))


def test_a_model_without_values_takes_them_from_the_folder_or_a_state_dict(tmp_path: Path) -> None:
    expected = run(tied(), IDS)
    disk_offload(tied(), tmp_path, offload_buffers=True)
    empty = tied()
    for module in empty.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="meta"))
    empty.head.weight = empty.embed.weight
    again = copy.deepcopy(empty)
    assert torch.equal(run(disk_offload(empty, tmp_path), IDS), expected)
    with pytest.raises(ShardingError, match=r"no values \(meta device\): gain, embed\.weight"):
        cpu_offload(again)
    assert not any(module._forward_hooks for module in again.modules())
    assert torch.equal(run(cpu_offload(again, state_dict=tied().state_dict()), IDS), expected)


def test_weights_leave_after_an_error_too() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.own = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.inner(x)
            raise KeyError("inside")

    model = cpu_offload(Fails())
    with pytest.raises(KeyError, match="inside"):
        model(torch.ones(1, 2))
    with pytest.raises(RuntimeError):
        model.inner(torch.ones(1, 5))
    assert parameter_bytes(model) == 0


def test_weights_of_a_module_that_is_not_called() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.inner.weight)

    x = torch.ones(1, 2)
    torch.manual_seed(0)
    plain = Reads()
    with pytest.raises(ShardingError, match=r"inner\.weight is offloaded.*linear.*preload_module_classes"):
        run(cpu_offload(copy.deepcopy(plain)), x)
    assert torch.equal(run(cpu_offload(copy.deepcopy(plain), preload_module_classes="Reads"), x), run(plain, x))


def test_attention_and_transformer_layers_of_torch() -> None:
    torch.manual_seed(0)
    plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False)
    plain.eval()
    model = cpu_offload(copy.deepcopy(plain))
    x = torch.randn(2, 3, 8)
    # torch takes a fused path, which rounds differently, for layers without hooks: give the plain ones some too.
    for layer in plain.layers:
        layer.linear1.register_forward_hook(lambda *_: None)
    assert torch.equal(run(model, x), run(plain, x))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_let_go_of_their_weights(kind: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = kind(3, 4, num_layers=2).eval()
    model = disk_offload(copy.deepcopy(plain), tmp_path)
    x = torch.randn(5, 1, 3)
    for _ in range(2):
        assert torch.equal(run(model, x)[0], run(plain, x)[0])
        assert all(weight.is_meta for weight in model._flat_weights)


def test_a_module_that_writes_to_its_weights_does_not_write_to_the_checkpoint(tmp_path: Path) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.own.add_(1)

    model = disk_offload(Writes(), tmp_path)
    assert [run(model, torch.ones(3))[0].item() for _ in range(3)] == [2.0] * 3
    assert model.state_dict()["own"].tolist() == [1.0] * 3


def test_weights_that_hooks_of_torch_compute_with() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(3, 3)), nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    )
    plain.eval()
    model, x = cpu_offload(copy.deepcopy(plain)), torch.ones(1, 3)
    assert torch.equal(run(model, x), run(plain, x))
    assert parameter_bytes(model) == 0


def test_a_module_that_calls_itself_and_threads() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.full((3,), 2.0))

        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            y = self(x, depth - 1) if depth else x
            return y * self.own

    model = cpu_offload(Again())
    assert run(model, torch.ones(3)).tolist() == [8.0] * 3
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.extend(run(model, torch.ones(3))[0].item() for _ in range(20)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [8.0] * 80
    assert parameter_bytes(model) == 0


def test_a_dispatched_model_cannot_be_moved_or_loaded_into(tmp_path: Path) -> None:
    model = dispatch_model(tied(), SPREAD, offload_dir=tmp_path)
    for move in (lambda: model.to("cpu"), lambda: model.half(), lambda: nn.Sequential(model).to(torch.float16)):
        with pytest.raises(ShardingError, match="remove_hook_from_submodules"):
            move()
    with pytest.raises(ShardingError, match="load_state_dict"):
        model.load_state_dict(tied().state_dict())
    with pytest.raises(ShardingError, match="dispatched before"):
        cpu_offload(model)
    remove_hook_from_submodules(model)
    assert not hasattr(model, "hf_device_map")
    model.to(torch.float16)


def test_no_gradients_for_what_comes_and_goes_and_no_graph_that_keeps_it() -> None:
    model = cpu_offload(tied())
    output = model(IDS)
    assert not output.requires_grad


def test_copies_are_independent(tmp_path: Path) -> None:
    model = disk_offload(tied(), tmp_path)
    expected = run(model, IDS)
    copied = copy.deepcopy(model)
    remove_hook_from_submodules(model)
    assert torch.equal(run(copied, IDS), expected)
    assert parameter_bytes(copied) == 0
    with torch.no_grad():
        model.gain.zero_()
    assert torch.equal(copied.state_dict()["gain"], tied().gain.detach())
    other = copy.deepcopy(copied)
    remove_hook_from_submodules(other)
    assert find_tied_parameters(other) == [["embed.weight", "head.weight"]]
    assert torch.equal(run(other, IDS), expected)
    assert torch.equal(run(copied, IDS), expected)


def test_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no device for"):
        dispatch_model(tied(), {"embed": "cpu"})
    with pytest.raises(ConfigError, match="name a folder"):
        dispatch_model(tied(), {"": "disk"})
    with pytest.raises(ConfigError, match="no such device"):
        dispatch_model(tied(), {"": "gpu"})
    (tmp_path / "index.json").write_text("[]")
    with pytest.raises(ConfigError, match="JSON object"):
        disk_offload(tied(), tmp_path)


def test_tied_weights_in_two_places(tmp_path: Path) -> None:
    places = {**SPREAD, "head": "disk"}
    with pytest.warns(UserWarning, match="tied weights to different devices"):
        model = dispatch_model(tied(), places, offload_dir=tmp_path)
    assert model.head.weight is model.embed.weight  # it stays for one, so the other uses it too
    assert torch.equal(run(model, IDS), run(tied(), IDS))


def test_several_devices_get_their_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On devices that only pretend to be there; an operation between two of them raises."""
    # Tensors that pretend have a class of their own, so no stand-in can be made of them.
    monkeypatch.setattr("shardwise.big_models.offload.absent", lambda old, _: torch.empty_like(old, device="meta"))
    with FakeTensorMode():
        places = {"": "cuda:0", "blocks.1": "cuda:1", "blocks.2": "cpu", "norm": "cuda:1"}
        model = dispatch_model(Tied().eval(), places)
        ids = torch.zeros(5, dtype=torch.long)
        seen: dict[str, set[str]] = {}
        names = {id(module): name for name, module in model.named_modules()}

        def look(module: nn.Module, _: Any) -> None:
            seen[names[id(module)]] = {str(p.device) for p in module.parameters(recurse=False)}

        for module in model.modules():
            module.register_forward_pre_hook(look)
        output = run(model, ids)
        assert output.device.type == "cpu"  # where the input was
        assert seen["blocks.0.up"] == {"cuda:0"}
        assert seen["blocks.1.up"] == seen["norm"] == {"cuda:1"}
        assert seen["blocks.2.up"] == {"cuda:0"}  # it comes to the main device
        assert model.blocks[2].up.weight.device.type == "meta"
        assert str(model.blocks[2].shift.device) == "cuda:0"
        assert model.head.weight is model.embed.weight
        assert run(model, ids=ids).device.type == "cpu"


def test_a_stand_in_answers_questions_and_refuses_the_rest() -> None:
    model = cpu_offload(tied(), offload_buffers=True)
    weight, shift = model.embed.weight, model.blocks[0].shift
    assert (weight.shape, weight.dtype, weight.numel(), weight.device.type) == ((16, 8), torch.float32, 128, "meta")
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    assert not isinstance(shift, nn.Parameter)
    assert "meta" in repr(shift)
    weight.requires_grad = False
    assert not weight.requires_grad
    assert copy.deepcopy(weight).shape == (16, 8)
    for use in (
        lambda: torch.ones(16, 8).add_(weight),
        lambda: weight.sum(),
        lambda: torch.ones(3, 8) @ weight.T,
        lambda: weight.data.add_(1),
        lambda: weight.detach() * 2,
        lambda: setattr(weight, "data", torch.ones(16, 8)),
        lambda: torch.cat([torch.ones(8), shift]),
        lambda: weight.to("cpu"),
        lambda: nn.functional.embedding(IDS, weight),
    ):
        with pytest.raises(ShardingError, match="is offloaded and not here"):
            use()


def test_skip_keys_and_outputs_with_attributes() -> None:
    from shardwise.big_models.tensors import moved

    class Output(dict[str, Any]):
        label = ""

    value = Output(a=torch.ones(1), b=[torch.ones(1), None, "text"], c=(torch.ones(1),))
    value.label = "kept"
    assert moved(value, torch.device("cpu")) is value
    there = moved(value, torch.device("meta"), frozenset({"c"}))
    assert there.label == "kept"
    assert there["a"].is_meta
    assert there["b"][0].is_meta
    assert there["b"][1:] == [None, "text"]
    assert not there["c"][0].is_meta
    assert not value["a"].is_meta


def test_compiled_models_leave_the_hooks_alone(tmp_path: Path) -> None:
    model = disk_offload(tied(), tmp_path)
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        assert torch.equal(run(compiled, IDS), run(tied(), IDS))
        assert parameter_bytes(model) == 0
    torch.compiler.reset()
