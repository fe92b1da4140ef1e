"""Pre-train a small GPT-2 on the bytes of Python's standard library.

Gradient accumulation, clipping, a cosine schedule, checkpoints every few steps, and going on from one of them.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

from shardwise import Accelerator, DeepSpeedPlugin
from shardwise.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed, tqdm


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="updates of the weights")
    parser.add_argument("--batch_size", type=int, default=16, help="of all processes together")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--warmup_steps", type=int, default=10)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--context", type=int, default=64, help="bytes that the model sees")
    parser.add_argument("--windows", type=int, default=2000, help="windows of text in the data")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stage", type=int, help="ZeRO stage, if a plugin is to be used")
    parser.add_argument("--deepspeed_config_file", help="a ds_config.json instead of --stage")
    parser.add_argument("--output_dir", default="runs/causal_lm")
    parser.add_argument("--checkpointing_steps", type=int, help="save the state of the run every so many updates")
    parser.add_argument("--resume_from_checkpoint", help="folder of such a state: .../step_40")
    parser.add_argument("--report_to", help="trackers: tensorboard, wandb, ...")
    return parser.parse_args(argv)


def windows_of_text(length: int, count: int) -> list[torch.Tensor]:
    """The first windows of ``length`` bytes in the standard library's top-level modules."""
    text = bytearray()
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += file.read_bytes()
        if len(text) >= length * count:
            break
    ids = torch.frombuffer(text, dtype=torch.uint8).long()
    return list(ids[: length * count].view(-1, length))


def make_accelerator(args: argparse.Namespace) -> Accelerator:
    plugin = None
    if args.stage is not None or args.deepspeed_config_file is not None:
        plugin = DeepSpeedPlugin(
            hf_ds_config=args.deepspeed_config_file, zero_stage=args.stage, gradient_clipping=args.max_grad_norm
        )
    return Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        # Batches are cut in one part for each process: a schedule then advances once an update, on any number of them.
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
        deepspeed_plugin=plugin,
        log_with=args.report_to,
        project_config=ProjectConfiguration(project_dir=args.output_dir),
    )


def train(accelerator: Accelerator, args: argparse.Namespace) -> list[float]:
    """Returns the loss of each update: the mean over its micro-batches and all processes."""
    set_seed(args.seed)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
    accelerator.wait_for_everyone()
    if args.report_to:
        accelerator.init_trackers("causal_lm", config=vars(args))

    loader = DataLoader(
        windows_of_text(args.context, args.windows), batch_size=args.batch_size, shuffle=True, drop_last=True
    )
    sizes = {"n_embd": args.width, "n_layer": args.layers, "n_head": 2, "n_positions": args.context}
    config = GPT2Config(
        vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model = GPT2LMHeadModel(config).to(getattr(torch, args.dtype))

    no_decay = [p for p in model.parameters() if p.ndim < 2]
    decay = [p for p in model.parameters() if p.ndim >= 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate)
    schedule = get_cosine_schedule_with_warmup(optimizer, args.warmup_steps, args.steps)

    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    updates_per_epoch = math.ceil(len(loader) / args.gradient_accumulation_steps)
    update, first_epoch, batches_done = 0, 0, 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        update = int(Path(args.resume_from_checkpoint).name.removeprefix("step_"))
        first_epoch = update // updates_per_epoch
        batches_done = update % updates_per_epoch * args.gradient_accumulation_steps

    losses: list[float] = []
    window: list[torch.Tensor] = []
    for epoch in range(first_epoch, math.ceil(args.steps / updates_per_epoch)):
        model.train()
        loader.set_epoch(epoch)
        batches = loader
        if epoch == first_epoch and batches_done:
            batches = accelerator.skip_first_batches(loader, batches_done)
        for ids in tqdm(batches, desc=f"epoch {epoch}"):
            with accelerator.accumulate(model):
                logits = model(input_ids=ids).logits
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            window.append(loss.detach())
            if not accelerator.sync_gradients:
                continue
            update += 1
            losses.append(accelerator.gather(torch.stack(window)).mean().item())
            window.clear()
            accelerator.log({"loss": losses[-1], "lr": schedule.get_last_lr()[0]}, step=update)
            if update % 10 == 0:
                accelerator.print(f"update {update}/{args.steps} · loss {losses[-1]:.4f}")
            if args.checkpointing_steps and update % args.checkpointing_steps == 0:
                accelerator.save_state(os.path.join(args.output_dir, f"step_{update}"))
            if update >= args.steps:
                break

    accelerator.save_model(model, args.output_dir)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).config.save_pretrained(args.output_dir)
    return losses


if __name__ == "__main__":
    arguments = parse_args()
    this_run = make_accelerator(arguments)
    train(this_run, arguments)
    this_run.end_training()
