"""What `shardwise test` runs on every rank: collectives, and a few steps of training beside one process."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise

STEPS, ROWS, WIDTH = 5, 8, 16
# Sums in another order differ by roundings of 2^-24; five steps of Adam leave them far below this.
TOLERANCE = 1e-4

Check = Callable[[], str]


def make_model() -> nn.Module:
    """The same small model in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


def make_data(world: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of all ranks together: `ROWS` rows for each."""
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS * world, WIDTH, generator=random)
    return inputs, inputs.square().mean(1, keepdim=True)


def losses_of_one_process(world: int) -> list[float]:
    """The losses of plain torch on the rows of all ranks."""
    model = make_model()
    inputs, targets = make_data(world)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses_at(stage: int, world: int, rank: int) -> list[float]:
    """The losses of the engine at a ZeRO stage, averaged over the ranks."""
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "adam_w_mode": False}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
    }
    engine, *_ = shardwise.initialize(model=make_model(), config=config)
    inputs, targets = (part[rank * ROWS : (rank + 1) * ROWS].to(engine.device) for part in make_data(world))
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        if world > 1:
            dist.all_reduce(total)
        losses.append(total.item() / world)
    engine.destroy()
    return losses


def main(expected: int) -> int:
    """Run the checks on this rank; rank 0 prints them. Return the exit code, the same on every rank."""
    shardwise.init_distributed()
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    reference = losses_of_one_process(world)

    def processes() -> str:
        return "" if world == expected else f"{world} came together, {expected} were started"

    def gather() -> str:
        mine = torch.tensor([float(rank), 10.0 * rank], device=device)
        parts = [torch.empty_like(mine) for _ in range(world)]
        if world > 1:
            dist.all_gather(parts, mine)
        else:
            parts = [mine]
        right = [[float(r), 10.0 * r] for r in range(world)]
        got = [part.tolist() for part in parts]
        return "" if got == right else f"got {got}, expected {right}"

    def broadcast() -> str:
        value = torch.full((3,), 7.0 if rank == 0 else 0.0, device=device)
        if world > 1:
            dist.broadcast(value, src=0)
        return "" if value.tolist() == [7.0] * 3 else f"rank {rank} got {value.tolist()}, expected sevens"

    def training(stage: int) -> str:
        got = losses_at(stage, world, rank)
        for step, (ours, right) in enumerate(zip(got, reference, strict=True)):
            if not abs(ours - right) <= TOLERANCE * abs(right):
                return f"loss {ours:.6f} in step {step + 1}, one process has {right:.6f}"
        return ""

    checks: dict[str, Check] = {
        f"{world} processes on {device.type}": processes,
        "gather": gather,
        "broadcast": broadcast,
        f"{STEPS} steps at stage 0, losses of one process": lambda: training(0),
        f"{STEPS} steps at stage 3, losses of one process": lambda: training(3),
    }
    failures = 0
    for name, check in checks.items():
        wrong = check()
        count = torch.tensor(float(bool(wrong)), device=device)
        if world > 1:
            dist.all_reduce(count)
        failures += int(count.item() > 0)
        if rank == 0:
            said = "ok" if count.item() == 0 else f"FAILED: {wrong or 'on another rank'}"
            print(f"{name:<46} {said}", flush=True)
        elif wrong:
            print(f"rank {rank}: {name}: {wrong}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank == 0:
        print(f"{failures} of {len(checks)} checks failed" if failures else "ok: this installation trains", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
