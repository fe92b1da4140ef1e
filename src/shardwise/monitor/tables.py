"""Tables for people, in log messages."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence


def size(count: float) -> str:
    """A number of bytes, in a unit that suits it."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(count) >= 1024 and len(units) > 1:
        count /= 1024
        units.pop(0)
    return f"{count:,.0f} B" if units[0] == "B" else f"{count:,.2f} {units[0]}"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, width: int = 120) -> str:
    """A table as text: coloured when stderr, where messages go, is a terminal.

    Args:
        title: above it.
        columns: the headings; one that starts with ``>`` is aligned to the right.
        rows: the cells.
        width: of the whole, in characters, where stderr is no terminal.
    """
    from rich.console import Console  # loaded where a table is asked for
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        shown.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(Text(str(cell)) for cell in row))
    terminal = sys.stderr.isatty()
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, no_color=not terminal, width=None if terminal else width)
    console.print(shown)
    return "\n".join([title, *(line.rstrip() for line in out.getvalue().rstrip().splitlines())])
