"""Train a recurrent model on a stream of text that nobody knows the length of, and go on in the middle of it.

The first process reads and sends each other its part. A batch has strings in it: where each sample was found.
"""

from __future__ import annotations

import argparse
import os
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from shardwise import Accelerator, DeepSpeedPlugin
from shardwise.utils import DataLoaderConfiguration, set_seed


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="updates of the weights")
    parser.add_argument("--batch_size", type=int, default=16, help="of each process")
    parser.add_argument("--learning_rate", type=float, default=5e-3)
    parser.add_argument("--files", type=int, default=40, help="of the standard library, that are the stream")
    parser.add_argument("--samples_per_file", type=int, default=50, help="at most")
    parser.add_argument("--length", type=int, default=33, help="bytes of a sample")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stage", type=int, help="ZeRO stage, if a plugin is to be used")
    parser.add_argument("--deepspeed_config_file", help="a ds_config.json instead of --stage")
    parser.add_argument("--use_stateful_dataloader", action="store_true", help="read by torchdata")
    parser.add_argument("--output_dir", default="runs/stream")
    parser.add_argument("--checkpointing_steps", type=int, help="save the state of the run every so many updates")
    parser.add_argument("--resume_from_checkpoint", help="folder of such a state: .../step_40")
    return parser.parse_args(argv)


class Source(IterableDataset):
    """Pieces of source files, the files in another order each epoch."""

    def __init__(self, files: int, per_file: int, length: int) -> None:
        self.paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:files]
        self.per_file, self.length = per_file, length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, str | torch.Tensor]]:
        paths = list(self.paths)
        random.Random(self.epoch).shuffle(paths)
        for path in paths:
            text = path.read_bytes()
            for i in range(min(self.per_file, len(text) // self.length)):
                piece = text[i * self.length : (i + 1) * self.length]
                yield {"ids": torch.tensor(list(piece)), "where": f"{path.name}:{i * self.length}"}


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states, _ = self.recurrent(self.embed(ids))
        return self.head(states)


class Progress:
    """Where the run is; kept with its checkpoints."""

    def __init__(self) -> None:
        self.update = 0
        self.epoch = 0

    def state_dict(self) -> dict[str, int]:
        return {"update": self.update, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.update, self.epoch = state["update"], state["epoch"]


def make_accelerator(args: argparse.Namespace) -> Accelerator:
    plugin = None
    if args.stage is not None or args.deepspeed_config_file is not None:
        plugin = DeepSpeedPlugin(hf_ds_config=args.deepspeed_config_file, zero_stage=args.stage)
    loading = DataLoaderConfiguration(dispatch_batches=True, use_stateful_dataloader=args.use_stateful_dataloader)
    return Accelerator(deepspeed_plugin=plugin, dataloader_config=loading)


def train(accelerator: Accelerator, args: argparse.Namespace) -> tuple[list[float], list[list[str]]]:
    """Returns the loss of each update (the mean over all processes) and where its samples were found."""
    set_seed(args.seed)
    data = Source(args.files, args.samples_per_file, args.length)
    loader = DataLoader(data, batch_size=args.batch_size, drop_last=True)
    model = Recurrent(args.width).to(getattr(torch, args.dtype))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)  # the loader too: it goes on where it was
        accelerator.print(f"going on after update {progress.update}, in epoch {progress.epoch}")

    losses, seen = [], []
    while progress.update < args.steps:
        loader.set_epoch(progress.epoch)
        for batch in loader:
            ids = batch["ids"]
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            progress.update += 1
            losses.append(accelerator.gather(loss.detach()).mean().item())
            seen.append(accelerator.gather_for_metrics(batch["where"]))
            if progress.update % 10 == 0:
                accelerator.print(f"update {progress.update} · loss {losses[-1]:.4f} · last seen {seen[-1][-1]}")
            if args.checkpointing_steps and progress.update % args.checkpointing_steps == 0:
                accelerator.save_state(os.path.join(args.output_dir, f"step_{progress.update}"))
            if progress.update >= args.steps:
                break
        else:
            progress.epoch += 1
    return losses, seen


if __name__ == "__main__":
    arguments = parse_args()
    this_run = make_accelerator(arguments)
    train(this_run, arguments)
    this_run.end_training()
