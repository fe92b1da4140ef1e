"""Fine-tune low-rank adapters of a small Llama whose own weights are frozen.

The task is made up: the sum of two numbers, one character a token. The loss is that of the answer alone. The adapters
are those of peft if that is installed, else the few lines below.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise import Accelerator, DeepSpeedPlugin
from shardwise.utils import DataLoaderConfiguration, set_seed, tqdm

SIGNS = "0123456789+="
IGNORED = -100
ADAPTED = ("q_proj", "v_proj")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="updates of the adapters")
    parser.add_argument("--batch_size", type=int, default=16, help="of each process")
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--rank", type=int, default=4, help="of the adapters")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stage", type=int, help="ZeRO stage, if a plugin is to be used")
    parser.add_argument("--deepspeed_config_file", help="a ds_config.json instead of --stage")
    parser.add_argument("--output_dir", default="runs/lora", help="folder for the trained adapters")
    parser.add_argument("--no_peft", action="store_true", help="the adapters below, also where peft is installed")
    return parser.parse_args(argv)


class LoraLinear(nn.Module):
    """A frozen linear layer, and a product of two thin matrices that is trained beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)  # nothing is added at first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2.0 * self.lora_B(self.lora_A(x))


def with_adapters(model: nn.Module, rank: int, use_peft: bool) -> nn.Module:
    if use_peft:
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError:
            pass
        else:
            return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(ADAPTED)))
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in ADAPTED:
                setattr(parent, name, LoraLinear(child, rank))
    return model


def sums() -> list[dict[str, torch.Tensor]]:
    """``12+34=046``, and the same with everything but the answer left out of the loss."""
    samples = []
    for a in range(0, 100, 3):
        for b in range(0, 100, 3):
            ids = torch.tensor([SIGNS.index(c) for c in f"{a:02}+{b:02}={a + b:03}"])
            labels = ids.clone()
            labels[: len("12+34=")] = IGNORED
            samples.append({"input_ids": ids, "labels": labels})
    return samples


def make_accelerator(args: argparse.Namespace) -> Accelerator:
    plugin = None
    if args.stage is not None or args.deepspeed_config_file is not None:
        plugin = DeepSpeedPlugin(hf_ds_config=args.deepspeed_config_file, zero_stage=args.stage)
    return Accelerator(deepspeed_plugin=plugin, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))


def train(accelerator: Accelerator, args: argparse.Namespace) -> list[float]:
    """Returns the loss of each update: the mean over all processes."""
    set_seed(args.seed)
    sizes = {"hidden_size": args.width, "intermediate_size": 2 * args.width, "num_hidden_layers": args.layers}
    config = LlamaConfig(
        vocab_size=len(SIGNS),
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=0,
        **sizes,
    )
    base = LlamaForCausalLM(config)  # stands for LlamaForCausalLM.from_pretrained(...)
    model = with_adapters(base, args.rank, not args.no_peft).to(getattr(torch, args.dtype))
    trained = [p for p in model.parameters() if p.requires_grad]
    counts = sum(p.numel() for p in trained), sum(p.numel() for p in model.parameters())
    accelerator.print(f"{counts[0]:,} of {counts[1]:,} parameters are trained")

    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate)
    loader = DataLoader(sums(), batch_size=args.batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    losses: list[float] = []
    while len(losses) < args.steps:
        model.train()
        for batch in tqdm(loader):
            logits = model(input_ids=batch["input_ids"]).logits
            targets = batch["labels"][:, 1:].flatten()
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=IGNORED)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
            if len(losses) % 10 == 0:
                accelerator.print(f"update {len(losses)}/{args.steps} · loss {losses[-1]:.4f}")
            if len(losses) >= args.steps:
                break

    weights = accelerator.get_state_dict(model)
    adapters = {name: value for name, value in weights.items() if "lora_" in name}
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
    accelerator.wait_for_everyone()
    accelerator.save(adapters, os.path.join(args.output_dir, "adapters.safetensors"), safe_serialization=True)
    return losses


if __name__ == "__main__":
    arguments = parse_args()
    this_run = make_accelerator(arguments)
    train(this_run, arguments)
    this_run.end_training()
