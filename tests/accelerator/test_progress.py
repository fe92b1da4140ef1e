"""Progress bars: the loop is the same, the bar is where somebody looks."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils.data import DataLoader, IterableDataset

from shardwise import ConfigError
from shardwise.accelerator import progress as module
from shardwise.accelerator.progress import Bars, progress


class Place:
    def __init__(self, is_main_process: bool = True) -> None:
        self.is_main_process = is_main_process


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Console:
    monkeypatch.setattr(module, "PAUSE", 0.0)  # every step is drawn
    return Console(file=io.StringIO(), force_terminal=True, width=120, _environ={})


def drawn(screen: Console) -> list[str]:
    """What was drawn, line by line, without colours and the movements of the cursor."""
    assert isinstance(screen.file, io.StringIO)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.file.getvalue())
    return [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]


def stopped(screen: Console) -> bool:
    """The cursor, which a bar hides, is shown again."""
    assert isinstance(screen.file, io.StringIO)
    text = screen.file.getvalue()
    return text.count("\x1b[?25l") == text.count("\x1b[?25h")


def test_a_bar_counts(screen: Console) -> None:
    bars = Bars(Place(), screen)
    bar = bars.over([10, 20, 30], description="train [fast]")
    seen = []
    for i in bar:
        seen.append(i)
        bar.show(loss=torch.tensor(0.5), lr=1e-4, name="x", many=torch.zeros(2))
    lines = drawn(screen)
    assert seen == [10, 20, 30] and len(bar) == 3
    assert "train [fast]" in lines[0] and "0/3" in lines[0]
    assert any("2/3" in line and "loss 0.5 · lr 0.0001 · name x · many of the shape (2,)" in line for line in lines)
    assert "3/3" in lines[-1] and re.search(r"\d/s", lines[-1]) and stopped(screen)


def test_a_loop_without_a_length(screen: Console) -> None:
    bars = Bars(Place(), screen)
    assert [int(i) for i in bars.over(DataLoader(Stream(), batch_size=None))] == [0, 1, 2]
    assert "3/?" in drawn(screen)[-1]
    assert list(bars.over((i for i in "ab"), total=2)) == ["a", "b"]
    assert "2/2" in drawn(screen)[-1]
    with pytest.raises(ConfigError, match="total must not be negative"):
        bars.over([], total=-1)


def test_loops_that_are_left_early_stop_the_bar(screen: Console) -> None:
    bars = Bars(Place(), screen)
    for i in bars.over(range(9), description="a"):
        if i == 2:
            break
    assert "2/9" in drawn(screen)[-1] and stopped(screen)
    with pytest.raises(ZeroDivisionError):
        for i in bars.over(range(9), description="b"):
            1 / (3 - i)
    assert "3/9" in drawn(screen)[-1] and stopped(screen) and bars.is_outermost()


def failing() -> Iterator[int]:
    yield 1
    raise OSError("disk")


def test_an_error_of_the_loader_stops_the_bar(screen: Console) -> None:
    bars = Bars(Place(), screen)
    with pytest.raises(OSError, match="disk"):
        list(bars.over(failing()))
    assert stopped(screen) and bars.is_outermost()


def test_loops_in_loops(screen: Console) -> None:
    bars = Bars(Place(), screen)
    for epoch in bars.over(range(2), description="epoch"):
        for i in bars.over(range(4), description="step"):
            assert not stopped(screen)
            if epoch and i == 2:
                break
        assert not bars.is_outermost()
    lines = drawn(screen)
    assert any("step" in line and "3/4" in line for line in lines)
    assert "epoch" in lines[-1] and "2/2" in lines[-1], "the inner bar is gone"
    assert stopped(screen)


def test_the_iterator_of_the_loop_is_closed(screen: Console) -> None:
    closed = []

    def numbers() -> Iterator[int]:
        try:
            yield from range(5)
        finally:
            closed.append(True)

    for _ in Bars(Place(), screen).over(numbers()):
        break
    assert closed == [True]


@pytest.mark.parametrize("why", ["other rank", "disabled", "pipe", "piped in a CI with colours"])
def test_it_is_quiet(
    why: str, screen: Console, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, options = Place(why != "other rank"), {"disable": True} if why == "disabled" else {}
    bars = Bars(place, None if "pipe" in why else screen)
    if "CI" in why:
        monkeypatch.setenv("FORCE_COLOR", "1")
    bar = progress(range(3), processes=place, bars=bars, **options)  # type: ignore[arg-type]
    for _ in bar:
        bar.show(loss=Unread())
    assert list(bar) == [0, 1, 2] and drawn(screen) == []
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
    assert type(iter(bar)) is type(iter(range(3))), "nothing stands between the loop and what it loops over"
    assert list(progress([1, 2], processes=place)) == [1, 2]


class Unread:
    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was read")


def test_at_most_ten_drawings_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=120, _environ={})
    bars = Bars(Place(), screen)
    begin = time.monotonic()
    for _ in bars.over(range(20_000), description="fast"):
        pass
    seconds = time.monotonic() - begin
    # One when it begins, the last, and the one of stopping.
    assert sum("fast" in line for line in drawn(screen)) <= seconds / module.PAUSE + 4
