"""Train a small BERT to classify sequences, and evaluate it after each epoch.

The task is made up: does a sequence hold more words of the first half of the vocabulary, or of the second?
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification

from shardwise import Accelerator, DeepSpeedPlugin
from shardwise.utils import DataLoaderConfiguration, set_seed, tqdm

PAD, CLS, WORDS = 0, 1, 40


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps", type=int, help="stop after so many updates")
    parser.add_argument("--batch_size", type=int, default=16, help="of each process")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--train_size", type=int, default=1024)
    parser.add_argument("--eval_size", type=int, default=203, help="need not be a multiple of anything")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stage", type=int, help="ZeRO stage, if a plugin is to be used")
    parser.add_argument("--deepspeed_config_file", help="a ds_config.json instead of --stage")
    parser.add_argument("--output_dir", help="folder for the trained weights")
    return parser.parse_args(argv)


class Sequences(Dataset):
    """Sequences of 5 to 16 words; the label says whether most of them are of the second half of the vocabulary."""

    def __init__(self, size: int, seed: int) -> None:
        dice = torch.Generator().manual_seed(seed)
        lengths = 2 * torch.randint(2, 8, (size,), generator=dice) + 1  # odd: there is a majority
        self.words = [torch.randint(2, 2 + WORDS, (int(n),), generator=dice) for n in lengths]

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        words = self.words[i]
        label = ((words >= 2 + WORDS // 2).double().mean() > 0.5).long()
        return {"input_ids": torch.cat([torch.tensor([CLS]), words]), "label": label}


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch as long as its longest sequence."""
    ids = torch.nn.utils.rnn.pad_sequence([s["input_ids"] for s in samples], batch_first=True, padding_value=PAD)
    labels = torch.stack([s["label"] for s in samples])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


def make_accelerator(args: argparse.Namespace) -> Accelerator:
    plugin = None
    if args.stage is not None or args.deepspeed_config_file is not None:
        plugin = DeepSpeedPlugin(hf_ds_config=args.deepspeed_config_file, zero_stage=args.stage)
    return Accelerator(deepspeed_plugin=plugin, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))


def train(accelerator: Accelerator, args: argparse.Namespace) -> tuple[list[float], list[dict[str, float]]]:
    """Returns the loss of each update (the mean over all processes) and what each evaluation found."""
    set_seed(args.seed)
    train_set, eval_set = Sequences(args.train_size, args.seed + 1), Sequences(args.eval_size, args.seed + 2)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, collate_fn=collate, drop_last=True)
    eval_loader = DataLoader(eval_set, args.batch_size, collate_fn=collate)

    sizes = {"hidden_size": args.width, "intermediate_size": 2 * args.width, "num_hidden_layers": args.layers}
    no_dropout = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    config = BertConfig(
        vocab_size=2 + WORDS, num_attention_heads=2, max_position_embeddings=32, num_labels=2, **sizes, **no_dropout
    )
    model = BertForSequenceClassification(config).to(getattr(torch, args.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    # For the batches that one process alone would read; shared by several, it advances once for each of them.
    schedule = LinearLR(optimizer, 1.0, 0.1, total_iters=args.epochs * len(train_loader))

    model, optimizer, train_loader, eval_loader, schedule = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, schedule
    )

    losses, found = [], []
    for epoch in range(args.epochs):
        model.train()
        for batch in tqdm(train_loader, desc=f"epoch {epoch}"):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
            if args.steps and len(losses) >= args.steps:
                break
        found.append(evaluate(accelerator, model, eval_loader))
        shown = " · ".join(f"{name} {value:.4f}" for name, value in found[-1].items())
        accelerator.print(f"epoch {epoch} · train loss {losses[-1]:.4f} · {shown}")
        if args.steps and len(losses) >= args.steps:
            break

    if args.output_dir:
        accelerator.save_model(model, args.output_dir)
    return losses, found


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> dict[str, float]:
    """Loss, accuracy and F1 over the whole set, each sample counted once."""
    model.eval()
    parts = []
    for batch in loader:
        labels = batch.pop("labels")
        logits = model(**batch).logits
        each = F.cross_entropy(logits, labels, reduction="none")
        parts.append(accelerator.gather_for_metrics((each, logits.argmax(-1), labels)))
    each, predicted, labels = (torch.cat(column) for column in zip(*parts, strict=True))
    hits = ((predicted == 1) & (labels == 1)).sum().item()
    positive = (predicted == 1).sum().item() + (labels == 1).sum().item()
    return {
        "loss": each.mean().item(),
        "accuracy": (predicted == labels).float().mean().item(),
        "f1": 2 * hits / max(1, positive),
        "samples": len(labels),
    }


if __name__ == "__main__":
    arguments = parse_args()
    this_run = make_accelerator(arguments)
    train(this_run, arguments)
    this_run.end_training()
