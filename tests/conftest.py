"""Fixtures for every test: the pools of ranks, and the checks that a test leaves nothing behind."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

# Before anything imports torch: one thread, the CPU only, and no look-ups on the network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import pytest
import torch

from tests.ranks import RankPools
from tests.ranks.leaks import Snapshot, new_files


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz", type=int, default=500, help="edits of configurations that tests/test_fuzz.py tries")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """``ranks(2).run(fn, *args)`` calls ``fn`` on two ranks and returns what each returned."""
    with RankPools() as pools:
        yield pools


@pytest.fixture(scope="session", autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make an empty folder the working directory, so that a file that a test drops is seen and harmless."""
    before = Path.cwd()
    folder = tmp_path_factory.mktemp("cwd")
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture
def upstream() -> Callable[[str], ModuleType]:
    """Imports a module of DeepSpeed, or skips the test; the variables that its import sets are taken away again."""

    def load(name: str) -> ModuleType:
        before = dict(os.environ)
        try:
            return pytest.importorskip(name, exc_type=ImportError)
        finally:
            for added in os.environ.keys() - before.keys():
                del os.environ[added]
            os.environ.update(before)

    return load


@pytest.fixture(autouse=True)
def no_leaks(scratch: Path) -> Iterator[None]:
    """Fail a test that leaves a process group, a variable, a thread, a file or a default of torch changed."""
    torch.manual_seed(1234)
    random.seed(1234)
    np.random.seed(1234)
    before = Snapshot()
    yield
    leaks = before.leaks()
    leaks += new_files(scratch)
    if leaks:
        pytest.fail("the test left behind:\n  " + "\n  ".join(leaks), pytrace=False)
