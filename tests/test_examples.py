"""The scripts in examples/accelerate: on 2 ranks, without and with a ds_config, they train as one process does.

One process has the whole batch, two have half of it each. What differs is the order in which gradients are summed, and
all is in float64, so the losses of a few steps agree to 1e-9: rounding is 1e-16 of a gradient, and Adam, which divides
by a gradient's size plus 1e-8, makes at most 1e-8 of a learning rate of it.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.peer import alias
from tests.ranks import RankPools

SCRIPTS = Path(__file__).parents[1] / "examples" / "accelerate"
NAMES = ("causal_lm", "classify", "lora", "gan", "stream")
KINDS = ("plain", "0", "2", "3")
EXACT = {"rtol": 1e-9, "atol": 1e-11}

COMMON = ["--dtype", "float64", "--width", "16"]
# Each trains a few updates; causal_lm and stream cross the end of an epoch.
FLAGS: dict[str, list[str]] = {
    # 15 windows of text are 3 batches, so 2 updates an epoch, of which the second has one micro-batch only.
    "causal_lm": "--steps 5 --windows 15 --context 16 --warmup_steps 2 --checkpointing_steps 1 --max_grad_norm 0.1",
    # 4 updates an epoch; 27 samples to evaluate on are 4 rounds of 8, the last of which repeats 5.
    "classify": "--epochs 2 --steps 6 --train_size 32 --eval_size 27 --learning_rate 0.01",
    "lora": "--steps 4 --no_peft",
    "gan": "--steps 6 --points 40",
    # 5 files of at most 6 samples are 3 batches an epoch.
    "stream": "--steps 7 --files 5 --samples_per_file 6 --length 9 --checkpointing_steps 1",
}  # fmt: skip
WHOLE = {"causal_lm": 4, "classify": 8, "lora": 8, "gan": 8, "stream": 8}  # samples of all processes together
OF_ALL = {"causal_lm"}  # whose --batch_size is that of all processes together


@functools.cache
def load(name: str, library: str = "shardwise") -> ModuleType:
    """A script as a module, with its imports of ``shardwise`` changed to another library."""
    path = SCRIPTS / f"{name}.py"
    lines = path.read_text().splitlines(keepends=True)
    text = "".join(line.replace("from shardwise", f"from {library}", 1) for line in lines)
    spec = importlib.util.spec_from_loader(f"{name}_with_{library}", loader=None, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    exec(compile(text, str(path), "exec"), vars(module))
    return module


def run(name: str, flags: list[str], library: str = "shardwise") -> Any:
    """What the script's ``train`` returns; afterwards nothing is left of the run."""
    script = load(name, library)
    args = script.parse_args(flags)
    accelerator = script.make_accelerator(args)
    try:
        return script.train(accelerator, args)
    finally:
        for tracker in accelerator.trackers:
            tracker.finish()
        accelerator.free_memory()


def flags_of(name: str, processes: int, folder: Path, kind: str = "plain") -> list[str]:
    share = 1 if name in OF_ALL else processes
    flags = [*COMMON, *FLAGS[name].split(), "--batch_size", str(WHOLE[name] // share), "--output_dir", str(folder)]
    if kind in ("0", "2"):
        flags += ["--stage", kind]
    elif kind == "3":
        # At its default threshold every parameter of models as small as these would stay whole.
        config: dict[str, Any] = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
        config["train_micro_batch_size_per_gpu"] = "auto"
        if name == "causal_lm":
            config["gradient_clipping"] = "auto"
        path = folder.parent / f"{folder.name}.json"
        path.write_text(json.dumps(config))
        flags += ["--deepspeed_config_file", str(path)]
    return flags


# In the middle of an epoch, and at the end of one.
PLACES = [("causal_lm", 3), ("causal_lm", 2), ("stream", 4), ("stream", 3)]

Started = Callable[..., tuple[Any, Path]]


@pytest.fixture(scope="module")
def started(ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Started:
    """``started(name, processes, kind)`` is what a script returns and its output folder; each is run once."""

    @functools.cache
    def start(name: str, processes: int, kind: str = "plain") -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp(name) / "out"
        flags = flags_of(name, processes, folder, kind)
        if processes == 1:
            return run(name, flags), folder
        first, *others = ranks(processes).run(run, name, flags)
        assert all(other == first for other in others)  # each process knows the loss of all
        return first, folder

    return start


def losses_of(name: str, found: Any) -> torch.Tensor:
    return torch.tensor(found[0] if name in ("classify", "stream") else found, dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_train_as_one(started: Started, name: str, kind: str) -> None:
    (alone, _), (found, _) = started(name, 1), started(name, 2, kind)
    losses = losses_of(name, alone)
    torch.testing.assert_close(losses_of(name, found), losses, **EXACT)
    assert len(losses) == int(FLAGS[name].split()[FLAGS[name].split().index("--steps") + 1])
    assert len(set(losses.flatten().tolist())) == losses.numel()  # it moves


@pytest.mark.parametrize("kind", KINDS)
def test_each_sample_counts_once_in_metrics(started: Started, kind: str) -> None:
    (_, alone), (_, found) = started("classify", 1)[0], started("classify", 2, kind)[0]
    assert len(found) == 2
    for mine, wanted in zip(found, alone, strict=True):
        assert mine["samples"] == 27
        assert (mine["accuracy"], mine["f1"]) == (wanted["accuracy"], wanted["f1"])
        assert mine["loss"] == pytest.approx(wanted["loss"], rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "file"), [("causal_lm", "model"), ("lora", "adapters")])
def test_what_is_saved_is_that_of_one_process(started: Started, name: str, file: str, kind: str) -> None:
    wanted, found = (load_file(started(name, *of)[1] / f"{file}.safetensors") for of in ((1,), (2, kind)))
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        # Elements whose gradient is nothing but rounding move by up to 1e-8 of the learning rate, 1e-2, a step.
        torch.testing.assert_close(found[key], value, rtol=1e-8, atol=1e-8)
    if name == "lora":
        assert len(found) == 2 * 2 * 2  # two matrices for each of two projections of two layers


def test_the_streams_strings_are_those_of_one_process(started: Started) -> None:
    (_, alone), (_, found) = started("stream", 1)[0], started("stream", 2)[0]
    assert found == alone
    assert all(len(names) == WHOLE["stream"] for names in found)


@pytest.mark.parametrize("kind", ["plain", "2", "3"])
@pytest.mark.parametrize(("name", "at"), PLACES)
def test_a_resumed_run_goes_on(
    ranks: RankPools, started: Started, tmp_path: Path, name: str, at: int, kind: str
) -> None:
    whole, folder = started(name, 2, kind)
    again = ["--resume_from_checkpoint", str(folder / f"step_{at}")]
    found = ranks(2).run(run, name, flags_of(name, 2, tmp_path / "out", kind) + again)[0]
    # The same processes compute the same from the same state.
    torch.testing.assert_close(losses_of(name, found), losses_of(name, whole)[at:], rtol=1e-12, atol=0)
    if name == "stream":
        assert found[1] == whole[1][at:]


@pytest.mark.parametrize(("name", "at"), PLACES)
def test_a_run_goes_on_with_fewer_processes(started: Started, tmp_path: Path, name: str, at: int) -> None:
    whole, folder = started(name, 2)
    again = ["--resume_from_checkpoint", str(folder / f"step_{at}")]
    found = run(name, flags_of(name, 1, tmp_path / "out") + again)
    torch.testing.assert_close(losses_of(name, found), losses_of(name, whole)[at:], **EXACT)


def test_the_tracker_has_each_loss(ranks: RankPools, started: Started, tmp_path: Path) -> None:
    flags = [*flags_of("causal_lm", 2, tmp_path / "out"), "--report_to", "csv"]
    losses = ranks(2).run(run, "causal_lm", flags)[0]
    header, *rows = (tmp_path / "out" / "causal_lm" / "metrics.csv").read_text().splitlines()
    assert header.split(",")[:3] == ["step", "loss", "lr"]
    assert [float(row.split(",")[1]) for row in rows] == losses == started("causal_lm", 2)[0]


# -- the scripts are those of upstream --


@pytest.mark.parametrize("name", NAMES)
def test_only_the_import_says_whose_it_is(name: str) -> None:
    lines = (SCRIPTS / f"{name}.py").read_text().splitlines()
    found = [line for line in lines if "shardwise" in line.lower()]
    assert len(found) == 2
    assert all(line.startswith("from shardwise") for line in found)
    assert len(lines) <= 150


# In a process of its own: upstream sets variables, and transformers would go on to use it.
PEER = """
import json, sys
from pathlib import Path
from tests.test_examples import NAMES, flags_of, losses_of, run
found = {n: losses_of(n, run(n, flags_of(n, 1, Path(sys.argv[1]) / n), "accelerate")).tolist() for n in NAMES}
Path(sys.argv[2]).write_text(json.dumps(found))
"""


def test_upstream_gives_the_losses(started: Started, tmp_path: Path) -> None:
    peer = alias.folder()
    if peer is None:
        pytest.skip("the peer is not installed")
    result, root = tmp_path / "result.json", Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(peer.parent)])}
    command = [sys.executable, "-c", PEER, str(tmp_path), str(result)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for name, losses in json.loads(result.read_text()).items():
        wanted = losses_of(name, started(name, 1)[0])
        torch.testing.assert_close(torch.tensor(losses, dtype=torch.float64), wanted, **EXACT)
