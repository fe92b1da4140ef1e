"""Runs the peer's test scripts with this library in the peer's place; each process writes what passed as JSON.

shardwise launch --nproc 2 tests/peer/run.py RESULT
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.peer import alias

# The parts of upstream's distributed loop that upstream runs on two GPUs.
LOOP = (
    "test_default_ensures_even_batch_sizes",
    "test_can_disable_even_batches",
    "test_can_join_uneven_inputs",
    "test_join_can_override_even_batches",
    "test_join_can_override_for_mixed_type_dataloaders",
    "test_join_raises_warning_for_iterable_when_overriding_even_batches",
    "test_pickle_accelerator",
)
METRICS = (
    "test_gather_for_metrics_with_iterable_dataset",
    "test_gather_for_metrics_with_non_tensor_objects_iterable_dataset",
)
SYNC = ("test_gradient_accumulation", "test_gradient_accumulation_with_opt_and_scheduler")


def cases(ranks: int) -> dict[str, Callable[[], Any]]:
    """What is run: the four scripts as they are, and the parts of them that upstream itself runs on GPUs only."""
    scripts = {n: alias.script(n) for n in ("test_script", "test_ops", "test_sync")}
    metrics, loop = alias.script("external_deps.test_metrics"), alias.script("test_distributed_data_loop")
    scripts["test_metrics"] = metrics
    found: dict[str, Callable[[], Any]] = {f"{n}.main": module.main for n, module in scripts.items()}
    found.update({f"test_metrics.{name}": getattr(metrics, name) for name in METRICS})
    if ranks != 2:
        return found
    for name in SYNC:
        for split, dispatch, each in itertools.product((False, True), repeat=3):
            label = f"test_sync.{name}[split={split},dispatch={dispatch},each={each}]"
            test = getattr(scripts["test_sync"], name)
            found[label] = functools.partial(test, split, dispatch, each)
    found.update({f"test_distributed_data_loop.{name}": getattr(loop, name) for name in LOOP})
    for name in ("test_stateful_dataloader", "test_stateful_dataloader_save_state"):
        found[f"test_distributed_data_loop.{name}"] = functools.partial(_with_accelerator, loop, name)
    found["test_distributed_data_loop.test_data_loader"] = functools.partial(_orders, loop)
    return found


def _with_accelerator(loop: ModuleType, name: str) -> None:
    getattr(loop, name)(loop.create_accelerator())


def _orders(loop: ModuleType) -> None:
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    accelerator, dataset = loop.create_accelerator(), loop.DummyDataset()
    random = BatchSampler(RandomSampler(dataset), batch_size=loop.BATCH_SIZE, drop_last=False)
    for options in (
        {"shuffle": False, "batch_size": loop.BATCH_SIZE},
        {"shuffle": True, "batch_size": loop.BATCH_SIZE},
        {"batch_sampler": random},
        {"sampler": random, "batch_size": None, "collate_fn": loop.default_collate},
    ):
        loop.test_data_loader(DataLoader(dataset, **options), accelerator)


def main(result: str) -> None:
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    passed: dict[str, str] = {}
    for name, case in cases(ranks).items():
        from shardwise.state import PartialState

        log = io.StringIO()
        try:
            with contextlib.redirect_stdout(log):
                PartialState._reset_state()
                case()
            passed[name] = ""
        except BaseException as error:  # an assertion, or a SystemExit of a script
            passed[name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
    Path(f"{result}.{rank}").write_text(json.dumps(passed, indent=1))


if __name__ == "__main__":
    if alias.install() is None:
        raise SystemExit("the peer is not installed")
    main(sys.argv[1])
