"""`gather_for_metrics`: each sample once. Numbers in the names are those of reports in Accelerate's tracker."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from shardwise.accelerator import DataLoaderConfiguration
from shardwise.accelerator.loaders import skip_first_batches
from tests.accelerator.loops import accelerating
from tests.ranks import RankPools


class Stream(IterableDataset[int]):
    """Numbers; its length is not known."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return iter(range(self.length))


def numbered(length: int, size: int, kind: str = "plain", drop_last: bool = False) -> DataLoader[Any]:
    if kind == "stream":
        return DataLoader(Stream(length), batch_size=size, drop_last=drop_last)
    data: Any = list(range(length))
    if kind == "batch_sampler":
        return DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), size, drop_last))
    return DataLoader(data, batch_size=size, drop_last=drop_last)


def gathered(length: int, size: int, kind: str, config: dict[str, Any], drop_last: bool = False) -> list[int]:
    with accelerating(cpu=True, dataloader_config=DataLoaderConfiguration(**config)) as accelerator:
        found: list[int] = []
        for batch in accelerator.prepare(numbered(length, size, kind, drop_last)):
            found += accelerator.gather_for_metrics(batch).tolist()
        assert accelerator.gradient_state.remainder == -1, "outside of a loop nothing is known"
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_226_952_every_sample_counts_once(ranks: RankPools, size: int) -> None:
    cases = [(length, kind, config) for length in (1, 8, 9, 13, 16) for kind, config in KINDS]
    for found in ranks(size).run(several, cases):
        for (length, kind, config), got in zip(cases, found, strict=True):
            assert sorted(got) == list(range(length)), (length, kind, config)


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("plain", {"split_batches": True}),
    ("plain", {"dispatch_batches": True}),
    ("batch_sampler", {}),
    ("stream", {"dispatch_batches": True}),
    ("stream", {"dispatch_batches": False}),
]


def several(cases: list[tuple[int, str, dict[str, Any]]]) -> list[list[int]]:
    # Six samples divide among one, two and three processes where batches are split.
    return [gathered(length, 6 if "split_batches" in config else 4, kind, config) for length, kind, config in cases]


def test_3693_a_loader_that_drops_its_last_batch_says_nothing_of_lengths(ranks: RankPools) -> None:
    for found in ranks(2).run(drops):
        assert found == (list(range(8)), "")


def drops() -> tuple[list[int], str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shardwise")
    logger.addHandler(handler)
    try:
        found = gathered(11, 4, "plain", {}, drop_last=True)
    finally:
        logger.removeHandler(handler)
    return sorted(found), "".join(text for text in said if "length" in text)


def of_the_last_round(rows: Any) -> Any:
    """What `gather_for_metrics` makes of ``rows(batch)`` in each of the rounds of 7 samples on 2 ranks, 2 each."""
    with accelerating(cpu=True) as accelerator:
        loader = accelerator.prepare(numbered(7, 2))
        return [accelerator.gather_for_metrics(rows(batch)) for batch in loader]


def nested(batch: torch.Tensor) -> Any:
    return {"pair": (batch, batch.float()[:, None].expand(-1, 3)), "list": [batch * 2]}


def test_nested_tensors_are_cut_alike(ranks: RankPools) -> None:
    for first, last in ranks(2).run(of_the_last_round, nested):
        assert first["pair"][0].tolist() == [0, 1, 2, 3] and first["pair"][1].shape == (4, 3)
        assert last["pair"][0].tolist() == [4, 5, 6] and last["pair"][1].shape == (3, 3)
        assert last["list"][0].tolist() == [8, 10, 12] and isinstance(last["pair"], tuple)


def scalars(batch: torch.Tensor) -> torch.Tensor:
    return batch.float().mean()


def test_1674_reduced_values_stay_whole(ranks: RankPools) -> None:
    """A mean of each process is no entry a sample: none is dropped."""
    for first, last in ranks(2).run(of_the_last_round, scalars):
        assert first.tolist() == [0.5, 2.5] and last.tolist() == [4.5, 3.0]


def texts(batch: torch.Tensor) -> list[str]:
    return [f"sample {int(n)}" for n in batch]


def records(batch: torch.Tensor) -> list[dict[str, Any]]:
    return [{"id": int(n), "text": str(int(n)), "none": None} for n in batch]


def ragged(batch: torch.Tensor) -> list[torch.Tensor]:
    return [torch.arange(int(n)) for n in batch]


def test_1383_1925_objects_are_gathered_and_cut(ranks: RankPools) -> None:
    for first, last in ranks(2).run(of_the_last_round, texts):
        assert first + last == [f"sample {n}" for n in range(7)]
    for first, last in ranks(2).run(of_the_last_round, records):
        assert first + last == [{"id": n, "text": str(n), "none": None} for n in range(7)]


def as_objects() -> list[int]:
    with accelerating(cpu=True) as accelerator:
        loader = accelerator.prepare(numbered(7, 2))
        return [
            len(tensor)
            for batch in loader
            for tensor in accelerator.gather_for_metrics(ragged(batch), use_gather_object=True)
        ]


def test_tensors_of_different_lengths_are_gathered_as_objects(ranks: RankPools) -> None:
    assert ranks(2).run(as_objects) == [list(range(7))] * 2


def two_lists(batch: torch.Tensor) -> tuple[list[str], list[str]]:
    return [f"p{int(n)}" for n in batch], [f"r{int(n)}" for n in batch]


def test_2537_lists_in_a_tuple_are_not_taken_for_samples(ranks: RankPools) -> None:
    for first, last in ranks(2).run(of_the_last_round, two_lists):
        assert len(first) == len(last) == 4  # each process's two lists, one after the other
        assert last[0] == ["p4", "p5"] and last[2][0] == "p6"


def empty_here(batch: torch.Tensor) -> list[str]:
    return [f"sample {int(n)}" for n in batch if int(n) in (1, 4, 5)]


def test_a_process_may_have_no_objects(ranks: RankPools) -> None:
    for first, last in ranks(2).run(of_the_last_round, empty_here):
        assert first == ["sample 1"] and last == ["sample 4", "sample 5"]


def around_an_evaluation() -> dict[str, list[Any]]:
    """Evaluation of 5 samples in a training of 7, and a skipped start."""
    with accelerating(cpu=True) as accelerator:
        train, held_out = accelerator.prepare(numbered(7, 2), numbered(5, 2))
        found: dict[str, list[Any]] = {"train": [], "eval": [], "after": [], "skipped": []}
        for batch in train:
            seen: list[int] = []
            for other in held_out:
                seen += accelerator.gather_for_metrics(other).tolist()
            found["eval"].append(sorted(seen))
            found["train"] += accelerator.gather_for_metrics(batch).tolist()
        for _ in held_out:
            break
        # An abandoned loop cuts nothing.
        found["after"] = accelerator.gather_for_metrics(torch.arange(2) + 2 * accelerator.process_index).tolist()
        for batch in skip_first_batches(train, 1):
            found["skipped"] += accelerator.gather_for_metrics(batch).tolist()
    return found


def test_960_4295_evaluation_inside_training_and_a_skipped_start(ranks: RankPools) -> None:
    for found in ranks(2).run(around_an_evaluation):
        assert found["train"] == list(range(7))
        assert found["eval"] == [list(range(5))] * 2
        assert found["after"] == [0, 1, 2, 3] and found["skipped"] == [4, 5, 6]


def test_one_process_gets_its_own_objects() -> None:
    with accelerating(cpu=True) as accelerator:
        for batch in accelerator.prepare(numbered(3, 2)):
            assert accelerator.gather_for_metrics(batch) is batch
            names = texts(batch)
            assert accelerator.gather_for_metrics(names) == names
