"""What each rank gets of the batches that one rank has read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shardwise.data.rows import Layout, UnjoinableError, cut, join, layout_of
from shardwise.errors import ConfigError

SliceFn = Callable[..., Any]


@dataclass(frozen=True)
class Round:
    """What the ranks get at once.

    Attributes:
        parts: the batches of each rank, in most rounds one.
        last: there is no other round.
        remainder: samples that no rank repeats, 0 if none is repeated, -1 if that is not known.
        rows: samples of each rank in a last round that repeats some, 0 if that is not known, or not the same for all.
    """

    parts: list[list[Any]]
    last: bool
    remainder: int = 0
    rows: int = 0


@dataclass
class Dealer:
    """Deals batches out to the ranks.

    Args:
        ranks: how many.
        split: cut each batch for all of them; else a round is a batch for each.
        even: complete the last round, so that all ranks run equally many steps.
        drop_last: leave a round out that has no batch for each.
        size: samples of a whole batch, if that is known.
        whole: batches are never joined: what is in them is not known to be samples.
        slice_fn: cuts a batch that all batches of a round were joined to:
            ``slice_fn(batch, slice, process_index=rank, num_processes=ranks)``.
        first_again: gives the first batch of the epoch, where reading began later.
    """

    ranks: int
    split: bool
    even: bool
    drop_last: bool
    size: int | None
    whole: bool = False
    slice_fn: SliceFn | None = None
    first_again: Callable[[], Any] | None = None
    _first: Any = None
    _listed: bool | None = None

    @property
    def turns(self) -> int:
        """Batches of a round."""
        return 1 if self.split else self.ranks

    def deal(self, batches: Iterator[tuple[Any, bool]]) -> Iterator[Round]:
        """Rounds of all batches, each of which comes with whether it is the last."""
        rounds = self._rounds(batches)
        current = next(rounds, None)
        while current is not None:
            read, last = current
            if last and self.drop_last and len(read) < self.turns:
                return
            parts, remainder = self._parts(read, last)
            following = next(rounds, None) if not last and (self.drop_last or not self.even) else None
            if following is not None and following[1]:
                # Some ranks get nothing of that round, and must know now that this one is their last. The others get
                # both at once: nobody then waits for a rank that has stopped.
                if self.drop_last and len(following[0]) < self.turns:
                    following, last = None, True
                elif not self.even:
                    more, _ = self._parts(*following)
                    parts = [a + b for a, b in zip(parts, more, strict=True)]
                    following, last = None, True
            yield Round(parts, last, remainder if last else -1, self._rows(parts) if last and remainder > 0 else 0)
            current = None if last else following or next(rounds, None)

    def _rows(self, parts: list[list[Any]]) -> int:
        layouts = {self._layout(part[-1]) for part in parts if part}
        layout = layouts.pop() if len(layouts) == 1 else None
        return 0 if layout is None else layout.size

    def _rounds(self, batches: Iterator[tuple[Any, bool]]) -> Iterator[tuple[list[Any], bool]]:
        read: list[Any] = []
        for batch, last in batches:
            if self._first is None and self.first_again is None and self.even and not self.drop_last:
                self._first = batch
            read.append(batch)
            if last or len(read) == self.turns:
                yield read, last
                read = []

    def _layout(self, batch: Any) -> Layout | None:
        layout = layout_of(batch, self.size, self._listed)
        if layout is not None and layout.size == self.size:
            self._listed = layout.listed
        return layout

    def _parts(self, read: list[Any], last: bool) -> tuple[list[list[Any]], int]:
        joined = self.slice_fn is not None or self.split
        if not joined and (not last or not self.even):
            return [read[rank : rank + 1] for rank in range(self.ranks)], 0
        if last and self._listed is None:
            self._layout(self._begin())  # a whole batch, which tells how to read a short one
        layouts = [self._layout(batch) for batch in read]
        if joined:
            return self._cut(read, layouts, last)
        if len(read) == self.ranks and len(set(layouts)) == 1:
            return [[batch] for batch in read], 0
        known = [layout for layout in layouts if layout is not None]
        total = sum(layout.size for layout in known) if len(known) == len(read) else -1
        if total > 0 and not self.whole:
            try:
                return self._filled(join(read, known), Layout(total, known[0].listed))
            except UnjoinableError:
                pass  # what follows needs no joining
        missing = self.ranks - len(read)
        parts = [[batch] for batch in read] + [[self._begin()]] * missing
        return parts, total if missing else 0

    def _cut(self, read: list[Any], layouts: list[Layout | None], last: bool) -> tuple[list[list[Any]], int]:
        known = [layout for layout in layouts if layout is not None]
        if len(known) < len(read):
            raise ConfigError(
                "a batch whose tensors differ in their first dimension cannot be cut for several ranks. Use "
                "split_batches=False without slice_fn_for_dispatch, which gives each rank whole batches."
            )
        try:
            batch = join(read, known)
        except UnjoinableError as error:
            raise ConfigError(
                f"slice_fn_for_dispatch cuts the batches of a round joined to one, but they have {error}. Leave it "
                "out: each rank then gets its own batch as it is."
            ) from error
        layout = Layout(sum(k.size for k in known), known[0].listed)
        whole = layout.size % self.ranks == 0
        if last and not whole and not self.even:
            per = self._per_rank(layout)
            bounds = [(min(r * per, layout.size), min((r + 1) * per, layout.size)) for r in range(self.ranks)]
        elif whole or (not last and layout.size >= self.ranks):
            bounds = [(layout.size * r // self.ranks, layout.size * (r + 1) // self.ranks) for r in range(self.ranks)]
        else:
            return self._filled(batch, layout)
        return [[self._slice(batch, layout, *ends, r)] if ends[0] < ends[1] else [] for r, ends in enumerate(bounds)], 0

    def _per_rank(self, layout: Layout) -> int:
        if self.size is None or not self.split:
            return -(-layout.size // self.ranks)
        return self.size // self.ranks

    def _filled(self, batch: Any, layout: Layout) -> tuple[list[list[Any]], int]:
        """Equal parts of a last batch, completed from the first batch of the epoch."""
        per = -(-layout.size // self.ranks)
        missing = per * self.ranks - layout.size
        try:
            complete = self._with_more(batch, layout, self._begin(), missing)
        except UnjoinableError:  # of another length of sequence, for example: its own samples do fit
            complete = self._with_more(batch, layout, batch, missing)
        size = Layout(per * self.ranks, layout.listed)
        parts = [[self._slice(complete, size, r * per, (r + 1) * per, r)] for r in range(self.ranks)]
        return parts, layout.size if missing else 0

    def _with_more(self, batch: Any, layout: Layout, begin: Any, missing: int) -> Any:
        found = self._layout(begin)
        if found is None or not found.size or found.listed != layout.listed:
            raise UnjoinableError("batches of another kind")
        pieces, layouts = [batch], [layout]
        while missing:
            take = min(missing, found.size)
            pieces.append(cut(begin, found, 0, take))
            layouts.append(Layout(take, layout.listed))
            missing -= take
        return join(pieces, layouts)

    def _slice(self, batch: Any, layout: Layout, first: int, end: int, rank: int) -> Any:
        if self.slice_fn is not None:
            return self.slice_fn(batch, slice(first, end), process_index=rank, num_processes=self.ranks)
        return cut(batch, layout, first, end)

    def _begin(self) -> Any:
        if self._first is None and self.first_again is not None:
            self._first = self.first_again()
        return self._first
