"""Train a byte-level GPT on text, sharded over any number of processes: plain torch and five shardwise lines.

    shardwise launch --nproc 2 examples/train_gpt.py

Batch size, optimizer, schedule, clipping and the ZeRO stage are in ds_config.json. The text is Python's own standard
library, about 12 MB that every machine has, or any file given with --text.
"""

from __future__ import annotations

import argparse
import resource
import sys
import sysconfig
import time
from pathlib import Path

import hjson
import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise  # 1

CONTEXT = 128  # Bytes that the model sees.
WIDTH, LAYERS, HEADS = 192, 4, 3


class Block(nn.Module):
    """Causal attention and a two-layer perceptron, each added to the stream."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        for layer in (self.proj, self.down):
            nn.init.zeros_(layer.weight)  # Every block starts as the identity.

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v, is_causal=True)
        x = x + self.proj(heads.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A decoder over bytes. Gives the mean loss in nats a byte if it gets targets, else logits."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        rotation = rotary(ids.shape[1], WIDTH // HEADS, ids.device)
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, rotation)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def rotary(length: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    frequency = 10_000.0 ** -torch.linspace(0, 1, size // 2, device=device)
    angle = torch.outer(torch.arange(length, device=device), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (part.to(x.dtype) for part in rotation)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def main() -> None:
    args = parse_args()
    config, steps = load_config(args.config, args.steps)
    train, heldout = load_text(args.text)

    torch.manual_seed(0)  # The same initial model on every rank.
    engine, *_ = shardwise.initialize(model=GPT(), config=config)  # 2
    dice = torch.Generator().manual_seed(1_000 + engine.global_rank)  # Other batches on every rank.

    with Report(engine, steps) as report:
        for _ in range(steps):
            for _ in range(engine.gradient_accumulation_steps()):
                starts = torch.randint(len(train) - CONTEXT, (engine.train_micro_batch_size_per_gpu(),), generator=dice)
                inputs, targets = windows(train, starts, engine.device)
                loss = engine(inputs, targets)  # 3
                engine.backward(loss)  # 4
                engine.step()  # 5
            report.step(loss)

    report.heldout(evaluate(engine, heldout))
    report.sample(generate(engine, b"def ", args.sample))
    report.memory()
    engine.destroy()


def windows(text: Tensor, starts: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets of shape [len(starts), CONTEXT]: the targets are the inputs one byte later."""
    ids = text[starts[:, None] + torch.arange(CONTEXT + 1)].long().to(device)
    return ids[:, :-1], ids[:, 1:]


@torch.no_grad()
def evaluate(engine, text: Tensor, batches: int = 32) -> float:
    """Mean loss over evenly spaced windows, every rank taking its share."""
    engine.eval()
    size = engine.train_micro_batch_size_per_gpu()
    starts = torch.linspace(0, len(text) - CONTEXT - 1, batches * size * engine.world_size, dtype=torch.float64).long()
    share = starts[engine.global_rank :: engine.world_size].split(size)
    losses = [engine(*windows(text, part, engine.device)).item() for part in share]
    engine.train()
    return of_all_ranks(engine, sum(losses) / len(losses)).mean().item()


@torch.no_grad()
def generate(engine, prompt: bytes, length: int, temperature: float = 0.8) -> bytes:
    """Continue `prompt`. Every rank draws the same bytes, because stage 3 needs all of them in every forward."""
    engine.eval()
    dice = torch.Generator().manual_seed(0)
    ids = torch.tensor([list(prompt)])
    for _ in range(length):
        logits = engine(ids[:, -CONTEXT:].to(engine.device))[0, -1].float().cpu()
        drawn = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=dice)
        ids = torch.cat([ids, drawn[None]], dim=1)
    engine.train()
    return bytes(ids[0].tolist())


# What follows reads the inputs and prints; nothing of it is about training.


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT from a ds_config.json.")
    parser.add_argument("--config", type=Path, default=Path(__file__).parent / "ds_config.json")
    parser.add_argument("--text", type=Path, help="train on this file instead of Python's standard library")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: the total_num_steps of the config)")
    parser.add_argument("--sample", type=int, default=300, help="bytes to generate at the end")
    return parser.parse_args()


def load_config(path: Path, steps: int | None) -> tuple[dict, int]:
    """The configuration and the number of steps; --steps shortens or stretches the config's schedule too."""
    config = hjson.loads(path.read_text())
    schedule = config.get("scheduler", {}).get("params", {})
    if steps and "total_num_steps" in schedule:
        warmup = schedule.get("warmup_num_steps", 0) * steps // schedule["total_num_steps"]
        schedule.update(total_num_steps=steps, warmup_num_steps=max(1, warmup))
    return config, steps or schedule.get("total_num_steps", 600)


def load_text(path: Path | None) -> tuple[Tensor, Tensor]:
    """Bytes to train on and bytes held out: the last 5 % of a file, or every 20th file of the standard library."""
    if path is not None:
        text = path.read_bytes()
        parts = [text[: len(text) * 95 // 100], text[len(text) * 95 // 100 :]]
    else:
        root = Path(sysconfig.get_path("stdlib"))
        skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
        files = [file for file in sorted(root.rglob("*.py")) if not skip & set(file.relative_to(root).parts)]
        texts = [file.read_bytes() for file in files]
        parts = [b"".join(t for i, t in enumerate(texts) if (i % 20 == 0) is out) for out in (False, True)]
    if min(map(len, parts)) <= CONTEXT + 1:
        sys.exit(f"{path or root}: too little text: {sum(map(len, parts)):,} bytes, 5 % of which are held out")
    train, heldout = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return train, heldout


def of_all_ranks(engine, *values: float) -> Tensor:
    """These numbers of every rank, as a tensor of shape [world size, len(values)]."""
    mine = torch.tensor(values, dtype=torch.float64).to(engine.device)
    if engine.world_size == 1:
        return mine[None].cpu()
    rows = [torch.empty_like(mine) for _ in range(engine.world_size)]
    dist.all_gather(rows, mine)
    return torch.stack(rows).cpu()


def peak_rss() -> int:
    """The most memory that this process has had resident, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Report:
    """What a user sees: a bar on a terminal, a line now and then elsewhere; the first rank prints."""

    def __init__(self, engine, steps: int, every: int = 10):
        self.engine, self.steps, self.every, self.done = engine, steps, every, 0
        self.console = Console(quiet=engine.global_rank != 0, soft_wrap=True)
        self.bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task("", total=steps)

    def __enter__(self) -> Report:
        parameters = sum(p.numel() for p in self.engine.module.parameters())
        ranks = self.engine.world_size
        self.console.print(f"{parameters:,} parameters on {ranks} rank{'s' * (ranks > 1)}, {self.steps} steps")
        self.bar.start()
        self.begin = self.last = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def step(self, loss: Tensor) -> None:
        self.done += 1
        self.bar.update(self.task, completed=self.done)
        if self.done % self.every and self.done != self.steps:
            return
        losses, rss = of_all_ranks(self.engine, loss.item(), psutil.Process().memory_info().rss).T
        now = time.monotonic()
        steps = (self.done - 1) % self.every + 1
        speed = steps * self.engine.train_batch_size() * CONTEXT / (now - self.last)
        self.last = now
        memory = " ".join(f"{bytes_ / 1e6:.0f}" for bytes_ in rss)
        line = f"loss {losses.mean():.3f} · {speed:,.0f} tokens/s · {memory} MB"
        self.bar.update(self.task, description=line)
        if self.bar.disable and (self.done % (5 * self.every) == 0 or self.done == self.steps):
            left = (now - self.begin) / self.done * (self.steps - self.done)
            self.console.print(f"step {self.done}/{self.steps} · {line} · {left:.0f} s left", highlight=False)

    def heldout(self, loss: float) -> None:
        seconds = time.monotonic() - self.begin
        self.console.print(f"\nheld-out loss: {loss:.3f} nats a byte, after {seconds:.0f} s", highlight=False)

    def sample(self, text: bytes) -> None:
        self.console.rule("a sample")
        self.console.print(text.decode(errors="replace"), markup=False, highlight=False)

    def memory(self) -> None:
        kinds = ("parameters", "gradients", "optimizer", "total", "formula")
        report = self.engine.memory_report()
        rows = of_all_ranks(self.engine, *(report[kind] for kind in kinds), peak_rss())
        table = Table(title="model states per rank in MB, counted, against the ZeRO formula")
        for name in ("rank", *kinds, "peak RSS"):
            table.add_column(name, justify="right")
        for rank, row in enumerate(rows):
            table.add_row(str(rank), *(f"{value / 1e6:.2f}" for value in row[:-1]), f"{row[-1] / 1e6:.0f}")
        self.console.print(table)


if __name__ == "__main__":
    main()
