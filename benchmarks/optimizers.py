"""Time of an optimizer step by itself, per element, beside torch's fused AdamW.

    python benchmarks/optimizers.py [--numel N] [--tensors N] [--threads N] [--repeat N] [--device cpu|cuda]

Prints a table: nanoseconds an element (the best of the repeats) and the ratio to fused AdamW, measured in turns with
it, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.optim import build_optimizer


@dataclass(frozen=True)
class Section:
    type: str
    params: dict[str, Any] = field(default_factory=dict)


OURS = {
    "AdamW, fused": Section("AdamW", {"weight_decay": 0.01}),
    "Adam, bias_correction false": Section("Adam", {"weight_decay": 0.01, "bias_correction": False}),
    "Lion": Section("Lion", {"lr": 1e-4, "weight_decay": 0.01}),
    "Lamb": Section("Lamb", {"weight_decay": 0.01}),
    "Lamb, eps_inside_sqrt": Section("Lamb", {"weight_decay": 0.01, "eps_inside_sqrt": True}),
    "Adagrad": Section("Adagrad"),
    "SGD": Section("SGD", {"lr": 1e-3}),
    "SGD, momentum": Section("SGD", {"lr": 1e-3, "momentum": 0.9}),
}


class Bench:
    def __init__(self, section: Section, numel: int, tensors: int, device: str) -> None:
        self.params = [torch.nn.Parameter(torch.randn(numel // tensors, device=device)) for _ in range(tensors)]
        self.grads = [torch.randn_like(p) for p in self.params]
        self.optimizer = build_optimizer(section, self.params)
        self.device = device

    def seconds(self) -> float:
        for p, g in zip(self.params, self.grads, strict=True):
            p.grad = g
        return timed(self.optimizer.step, self.device)


def timed(step: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=16 * 1024 * 1024)
    parser.add_argument("--tensors", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    where = f"{args.threads} thread(s)" if args.device == "cpu" else torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, {where}, {args.numel:,} fp32 elements in {args.tensors} tensors")
    print(f"{'optimizer':32}{'ns/element':>12}{'x fused AdamW':>16}")
    for name, section in OURS.items():
        base = Bench(OURS["AdamW, fused"], args.numel, args.tensors, args.device)
        mine = Bench(section, args.numel, args.tensors, args.device)
        times = [(base.seconds(), mine.seconds()) for _ in range(args.repeat + 1)][1:]
        best_base, best = (min(column) for column in zip(*times, strict=True))
        print(f"{name:32}{best / args.numel * 1e9:>12.2f}{best / best_base:>16.2f}")


if __name__ == "__main__":
    main()
