"""Train a generator and a discriminator against each other: two models, two optimizers, one loop.

The data are points on eight spots around a circle.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardwise import Accelerator, DeepSpeedPlugin
from shardwise.utils import DataLoaderConfiguration, set_seed, tqdm

LATENT = 8


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="updates of each model")
    parser.add_argument("--batch_size", type=int, default=64, help="of each process")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--points", type=int, default=4096, help="in the data")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stage", type=int, help="ZeRO stage, if a plugin is to be used")
    parser.add_argument("--deepspeed_config_file", help="a ds_config.json instead of --stage")
    parser.add_argument("--output_dir", help="folder for the trained generator")
    return parser.parse_args(argv)


def layers(inputs: int, outputs: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, outputs),
    )


def points_and_noise(count: int, seed: int, dtype: torch.dtype) -> TensorDataset:
    """Points, and the noise of each: it comes with the data, so that any number of processes draws the same."""
    dice = torch.Generator().manual_seed(seed)
    angle = 2 * math.pi * torch.randint(8, (count,), generator=dice) / 8
    spots = torch.stack([angle.cos(), angle.sin()], dim=1)
    points = spots + 0.05 * torch.randn(count, 2, generator=dice)
    noise = torch.randn(count, 2, LATENT, generator=dice)  # of the discriminator's step and of the generator's
    return TensorDataset(points.to(dtype), noise.to(dtype))


def make_accelerator(args: argparse.Namespace) -> Accelerator:
    plugin = None
    if args.stage is not None or args.deepspeed_config_file is not None:
        plugin = DeepSpeedPlugin(hf_ds_config=args.deepspeed_config_file, zero_stage=args.stage)
    return Accelerator(deepspeed_plugin=plugin, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))


def train(accelerator: Accelerator, args: argparse.Namespace) -> list[tuple[float, float]]:
    """Returns the losses of discriminator and generator at each step: the means over all processes."""
    set_seed(args.seed)
    dtype = getattr(torch, args.dtype)
    data = points_and_noise(args.points, args.seed + 1, dtype)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, drop_last=True)
    generator = layers(LATENT, 2, args.width).to(dtype)
    discriminator = layers(2, 1, args.width).to(dtype)
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=args.learning_rate, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=args.learning_rate, betas=(0.5, 0.999))

    generator, discriminator, g_optimizer, d_optimizer, loader = accelerator.prepare(
        generator, discriminator, g_optimizer, d_optimizer, loader
    )

    losses: list[tuple[float, float]] = []
    while len(losses) < args.steps:
        for real, noise in tqdm(loader):
            ones, zeros = torch.ones_like(real[:, :1]), torch.zeros_like(real[:, :1])

            # The discriminator: real points are 1, generated ones 0.
            fake = generator(noise[:, 0]).detach()
            d_loss = F.binary_cross_entropy_with_logits(discriminator(real), ones)
            d_loss = d_loss + F.binary_cross_entropy_with_logits(discriminator(fake), zeros)
            d_optimizer.zero_grad()
            accelerator.backward(d_loss)
            d_optimizer.step()

            # The generator: its points should be taken for real. What this leaves in the discriminator's gradients
            # is dropped above.
            g_loss = F.binary_cross_entropy_with_logits(discriminator(generator(noise[:, 1])), ones)
            g_optimizer.zero_grad()
            accelerator.backward(g_loss)
            g_optimizer.step()

            both = accelerator.gather(torch.stack([d_loss.detach(), g_loss.detach()])[None]).mean(0)
            losses.append((both[0].item(), both[1].item()))
            if len(losses) % 50 == 0:
                accelerator.print(
                    f"step {len(losses)}/{args.steps} · discriminator {both[0]:.4f} · generator {both[1]:.4f}"
                )
            if len(losses) >= args.steps:
                break

    if args.output_dir:
        accelerator.save_model(generator, args.output_dir)
    return losses


if __name__ == "__main__":
    arguments = parse_args()
    this_run = make_accelerator(arguments)
    train(this_run, arguments)
    this_run.end_training()
