"""Seeds for all generators, and the first process's random states on all."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from shardwise import ConfigError
from shardwise.accelerator.kinds import RNGType
from shardwise.accelerator.operations import DistributedOperationException
from shardwise.accelerator.process import Processes
from shardwise.accelerator.seeds import set_seed, synchronize_rng_state, synchronize_rng_states
from tests.ranks import RankPools


def drawn() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_a_seed_is_for_all_generators() -> None:
    set_seed(7)
    first = drawn()
    set_seed(np.int64(7), device_specific=True)  # type: ignore[arg-type]
    assert drawn() == first, "a process alone is number 0"
    set_seed(8)
    assert all(a != b for a, b in zip(drawn(), first, strict=True))
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    assert drawn() == first


def test_only_deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    set_seed(1)
    assert asked == []
    set_seed(1, deterministic=True)
    assert asked == [True]


def test_a_seed_that_is_none_seeds_nothing() -> None:
    before = random.getstate(), torch.get_rng_state()
    for seed in (-1, 2**32, 1.5, "7", None):
        with pytest.raises(ConfigError, match="seed: "):
            set_seed(seed)  # type: ignore[arg-type]
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


def test_types_are_checked_before_anything_is_done() -> None:
    synchronize_rng_states(["torch", RNGType.GENERATOR], generator=torch.Generator())
    synchronize_rng_state(RNGType.TORCH)
    for types, match in (
        (["torch", "dice"], "rng_types: `dice` is not known; expected torch, cuda"),
        (["generator"], "needs the argument `generator`"),
        (["npu"], 'rng_types: "npu", but torch finds no such device'),
    ):
        with pytest.raises(ConfigError, match=match):
            synchronize_rng_states(types)
    with pytest.raises(ConfigError, match="rng_type: expected one of torch"):
        synchronize_rng_state()


def seeded() -> tuple[list[float], list[float], list[float]]:
    processes = Processes()
    rank = processes.process_index
    set_seed(3, device_specific=True, processes=processes)
    own = drawn()
    generator = torch.Generator().manual_seed(rank)
    synchronize_rng_states(["torch", "generator"], generator, processes=processes)
    shared = [float(torch.rand(())), float(torch.rand((), generator=generator))]
    with pytest.raises(DistributedOperationException, match="broadcast"):
        # Other kinds of generators on the ranks, as of a CPU and a device, have states of other lengths.
        synchronize_rng_states(["generator"], Odd() if rank else generator, processes=processes)  # type: ignore[arg-type]
    synchronize_rng_state("torch", processes=processes)
    return own, shared, drawn()[2:]


class Odd:
    def get_state(self) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        raise AssertionError("nothing was agreed on")


@pytest.mark.parametrize("size", [2, 3])
def test_processes_draw_their_own_or_the_same(ranks: RankPools, size: int) -> None:
    found = ranks(size).run(seeded)
    for rank, (own, shared, last) in enumerate(found):
        set_seed(3 + rank)
        assert own == drawn()
        assert shared == found[0][1] and last == found[0][2]
    assert found[0][1][1] == float(torch.rand((), generator=torch.Generator().manual_seed(0))), "the first one's"
