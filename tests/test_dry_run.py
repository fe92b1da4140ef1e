"""The engine itself on fake tensors: a step of rank 3 of 512 of a 7B model, in the memory of a laptop.

The tests start this file as a script, because the fake process group would stay in the test process.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

RANK, WORLD = 3, 512
GB = 10**9
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Shape:
    """Of Llama 2 7B: 6,738,415,616 parameters."""

    vocabulary: int = 32000
    width: int = 4096
    hidden: int = 11008
    layers: int = 32
    heads: int = 32
    length: int = 2048


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q, self.k, self.v, self.o = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)
        self.norm1, self.norm2 = Norm(shape.width), Norm(shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """The shape of Llama without its rotary embedding, which has no parameters."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class Run:
    """One engine; ``shard`` and ``second`` are the sizes of the groups of MiCS and hpZ."""

    stage: int
    precision: str
    gas: int = 1
    steps: int = 1
    shard: int = WORLD
    second: int = 1

    def config(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage, "zero_hpz_partition_size": self.second}
        if self.shard != WORLD:
            zero["mics_shard_size"] = self.shard
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.gas,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": zero,
            "steps_per_print": 1,
        }
        if self.precision != "fp32":
            config[self.precision] = {"enabled": True}
        return config

    def formula(self, params: int) -> dict[str, float]:
        """Bytes on one rank by the ZeRO paper's section 3.1, written out by hand. 16-bit gradients of several
        micro-steps add up in fp32."""
        size = BYTES[self.precision]
        held = 4 if self.gas > 1 else size
        state = 8 if self.precision == "fp32" else 12
        return {
            "parameters": params * size / (self.shard if self.stage == 3 else 1),
            "gradients": params * held / (self.shard if self.stage >= 2 else 1),
            "optimizer": params * state / (self.shard if self.stage >= 1 else 1),
        }

    def on_top(self, params: int) -> float:
        """Bytes of parameters beyond the formula that stage 3 was asked to keep: the norms' weights, which are below
        the persistence threshold, on every rank; with hpZ a second copy of the others among ``second`` ranks."""
        if self.stage < 3:
            return 0
        small = (2 * Shape().layers + 1) * Shape().width
        second = (params - small) / self.second if self.second > 1 else 0
        return BYTES[self.precision] * (small + second)


def dry_run(run: Run) -> dict[str, Any]:
    """The memory reports after each step and, once the optimizer has its state, before it."""
    import shardwise

    model = Llama(Shape())
    engine, optimizer, _, _ = shardwise.initialize(model=model, config=run.config())
    assert optimizer is not None
    tokens = torch.zeros(1, Shape().length, dtype=torch.long)
    reports = []
    for step in range(run.steps):
        for _ in range(run.gas):
            loss = engine(tokens)
            engine.backward(loss)
            before = engine.memory_report()
            engine.step()
        reports += [engine.memory_report()] if step == 0 else [before, engine.memory_report()]
    found = {
        "params": sum(p.numel() for p in model.parameters()),
        "reports": reports,
        "steps": engine.global_steps,
        "skipped": engine.skipped_steps,
        "fake": all(isinstance(p, FakeTensor) for p in [*model.parameters(), *optimizer.param_groups[0]["params"]]),
    }
    engine.destroy()
    return {**found, "peak": peak_bytes()}


def peak_bytes() -> int:
    """The most memory that this process had. (``ru_maxrss`` begins, on Linux, with that of the parent.)"""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    warnings.simplefilter("error", RuntimeWarning)
    dist.init_process_group("fake", rank=RANK, world_size=WORLD, store=FakeStore())
    for arguments in json.loads(sys.argv[1]):
        with FakeTensorMode():
            print(json.dumps(dry_run(Run(**arguments))), flush=True)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """A process for each row of ``RUNS``, all started at once; by name."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    folder = tmp_path_factory.mktemp("dry_run")
    found = {}
    for name, runs in RUNS.items():
        command = [sys.executable, __file__, json.dumps([asdict(run) for run in runs])]
        with (folder / name).open("w") as errors:
            found[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
    yield found, folder
    for process in found.values():
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def check(runs: list[Run], lines: list[str]) -> None:
    for run, line in zip(runs, lines, strict=True):
        found = json.loads(line)
        assert found["params"] == 6_738_415_616, run
        assert found["fake"], run
        assert (found["steps"], found["skipped"]) == (run.steps, 0), run
        assert found["peak"] < GB, (run, found["peak"] / GB)
        formula = run.formula(found["params"])
        expected = {**formula, "parameters": formula["parameters"] + run.on_top(found["params"])}
        for report in found["reports"]:
            for name, wanted in expected.items():  # 0.1 %: padding
                assert abs(report[name] / wanted - 1) < 0.001, (run, name, report[name], wanted)
            assert report["total"] == sum(report[name] for name in expected), run
            if run.second == 1:
                assert abs(report["total"] / sum(formula.values()) - 1) < 0.02, (run, report, formula)
            if run.gas == 1 or run.precision == "fp32":
                assert abs(report["formula"] / sum(formula.values()) - 1) < 0.001, (run, report, formula)


# Every stage in every precision, and with one and with several micro-steps.
RUNS = {
    "fp32": [Run(0, "fp32", gas=2), Run(1, "fp32"), Run(2, "fp32"), Run(3, "fp32", gas=2)],
    "bf16": [Run(0, "bf16"), Run(1, "bf16", gas=2), Run(2, "bf16", gas=2), Run(3, "bf16", steps=2)],
    "fp16": [Run(0, "fp16"), Run(1, "fp16"), Run(2, "fp16"), Run(3, "fp16", gas=2)],
    "hybrid": [Run(3, "bf16", second=8), Run(3, "bf16", shard=8), Run(1, "bf16", shard=8)],
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", RUNS)
def test_a_step_of_rank_3_of_512_of_a_7b_model_fits_into_1_gb(processes, name):
    started, folder = processes
    output, _ = started[name].communicate()
    assert started[name].returncode == 0, (folder / name).read_text()[-4000:]
    check(RUNS[name], output.splitlines())


if __name__ == "__main__":
    main()
