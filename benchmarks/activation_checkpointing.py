"""What `activation_checkpointing` saves and costs: the memory kept for the backward pass, the peak, the time, the loss.

    python benchmarks/activation_checkpointing.py            about a minute on 2 cores
    python benchmarks/activation_checkpointing.py --quick    a tiny model, to see that everything runs

Each row is a process of its own. `kept` is counted: every tensor that autograd saves passes a hook, which adds up the
storages (each once, parameters left out). `peak` is the process's largest resident set less what it held before the
first step. Losses and gradient norms must be the same to the last bit, dropout included; the script fails if not.
On a CPU `cpu_checkpointing` has nothing to move: its row shows that it costs nothing there.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import psutil
import torch
from torch import nn
from training.model import GPT, Data
from training.spec import Workload

import shardwise

ROWS: dict[str, dict[str, Any]] = {
    "none": {},
    "half of the blocks": {"activation_checkpointing": {"number_checkpoints": -2}},
    "all blocks": {"activation_checkpointing": {"enabled": True}},
    "all blocks, cpu_checkpointing": {"activation_checkpointing": {"cpu_checkpointing": True}},
}
STEPS = 4


class WithDropout(GPT):
    """Drops the output of each block."""

    def __init__(self, w: Workload) -> None:
        super().__init__(w)
        for block in self.blocks:
            block.down = nn.Sequential(block.down, nn.Dropout(0.1))


class Kept:
    """Adds up the storages that autograd saves."""

    def __init__(self, model: nn.Module) -> None:
        self.own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.storages: dict[int, torch.UntypedStorage] = {}

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.own:
            self.storages[storage.data_ptr()] = storage
        return tensor

    def count(self, forward: Any) -> int:
        with torch.autograd.graph.saved_tensors_hooks(self.note, lambda t: t):
            loss = forward()
        total = sum(s.nbytes() for s in self.storages.values())
        self.storages.clear()
        del loss
        return total


def workload(quick: bool) -> Workload:
    sizes = {"layers": 4, "width": 32, "heads": 2, "length": 16, "vocab": 64, "batch": 2} if quick else {
        "layers": 12, "width": 256, "heads": 8, "length": 256, "vocab": 1024, "batch": 8
    }  # fmt: skip
    return Workload(**sizes)


def run(name: str, stage: int, quick: bool) -> dict[str, Any]:
    """One row, in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    w = workload(quick)
    section = json.loads(json.dumps(ROWS[name]))
    if section.get("activation_checkpointing", {}).get("number_checkpoints"):
        section["activation_checkpointing"]["number_checkpoints"] = w.layers // 2
    model = WithDropout(w)
    config = {
        "train_micro_batch_size_per_gpu": w.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        **section,
    }
    engine, *_ = shardwise.initialize(model=model, config=config)
    data, losses, norms, seconds = Data(w, 0), [], [], []
    before = psutil.Process().memory_info().rss
    for step in range(STEPS):
        torch.manual_seed(step)
        started = time.perf_counter()
        loss = engine(*data.next())
        engine.backward(loss)
        engine.step()
        seconds.append(time.perf_counter() - started)
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    kept = Kept(model).count(lambda: engine(*data.next()))
    return {"losses": losses, "norms": norms, "kept": kept, "peak": peak, "seconds": min(seconds[1:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--stage", type=int, default=0, help="ZeRO stage")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(run(options.row, options.stage, options.quick)))
        return
    found = {}
    for name in ROWS:
        command = [sys.executable, __file__, "--row", name, "--stage", str(options.stage)]
        done = subprocess.run(command + ["--quick"] * options.quick, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    plain = found["none"]
    print(f"{'checkpointed':32} {'kept':>10} {'peak':>10} {'ms/step':>8}  loss and norm")
    for name, row in found.items():
        same = row["losses"] == plain["losses"] and row["norms"] == plain["norms"]
        mib = [f"{row[key] / 2**20:.1f} MiB" for key in ("kept", "peak")]
        print(f"{name:32} {mib[0]:>10} {mib[1]:>10} {row['seconds'] * 1e3:8.0f}  {'the same' if same else 'DIFFER'}")
        if not same:
            sys.exit(f"{name}: {row['losses']} instead of {plain['losses']}")


if __name__ == "__main__":
    main()
