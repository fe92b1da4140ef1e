"""`shardwise explain`: what a ds_config.json means, key by key."""

from __future__ import annotations

import io
import json
import math
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from shardwise.config.explain import Row

STYLES = {"honoured": "green", "no effect": "yellow", "refused": "red", "not yet": "magenta"}


def command(
    config: Annotated[Path, typer.Argument(help="A ds_config.json.", show_default=False)],
    world_size: Annotated[int, typer.Option(min=1, help="Ranks that it will run on.")] = 1,
    model: Annotated[
        Path | None,
        typer.Option(help="A Hugging Face config.json, safetensors file or folder of either.", show_default=False),
    ] = None,
    auto: Annotated[
        list[str] | None,
        typer.Option(help='What an "auto" becomes, e.g. optimizer.params.lr=1e-4; repeatable.', show_default=False),
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(min=0.001, help="GiB of one device (default: this machine's, else 80).", show_default=False),
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Also the keys of sections that are not written.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Show what each key of a ds_config.json does: value, where it came from, state; then warnings."""
    _speak_any_text()
    from shardwise.cli.advice import GIB, advise, this_machine
    from shardwise.cli.model_facts import read_model
    from shardwise.config import Config
    from shardwise.config.explain import explain
    from shardwise.errors import ConfigError

    try:
        facts = None if model is None else read_model(model)
        assigned = _assignments(auto or [])
        given = {**(facts.auto() if facts else {}), **assigned}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = Config.load(config, world_size=world_size, auto=given)
        _refuse_unused(assigned, loaded.filled)
    except ConfigError as error:
        if as_json:
            typer.echo(json.dumps({"errors": _problem_lines(error)}, indent=2))
        else:
            typer.echo(f"shardwise explain: {error}", err=True)
        raise typer.Exit(1) from None
    rows = explain(loaded)
    if memory is not None and not math.isfinite(memory):
        typer.echo(f"shardwise explain: --memory: {memory} is no number of GiB", err=True)
        raise typer.Exit(1)
    machine = this_machine(None if memory is None else int(memory * GIB))
    told = [str(w.message) for w in caught] + advise(loaded, machine, facts)
    if as_json:
        typer.echo(json.dumps({"keys": [vars(row) for row in rows], "warnings": told}, indent=2, ensure_ascii=True))
        return
    _print(rows if show_all else [row for row in rows if _worth_a_line(row, rows)], told)


def _problem_lines(error: Exception) -> list[dict[str, str]]:
    lines = str(error).splitlines()
    if len(lines) == 1:
        return [{"path": "", "message": lines[0]}]
    return [dict(zip(("path", "message"), line.strip().split(": ", 1), strict=False)) for line in lines[1:]]


def _assignments(given: list[str]) -> dict[str, object]:
    from shardwise.errors import ConfigError

    values: dict[str, object] = {}
    for item in given:
        path, sign, text = item.partition("=")
        if not sign or not path:
            raise ConfigError(f"--auto: {item!r} is not PATH=VALUE, as in optimizer.params.lr=1e-4")
        try:
            values[path] = json.loads(text)
        except (ValueError, RecursionError):
            values[path] = text
    return values


def _refuse_unused(assigned: dict[str, object], filled: dict[str, Any]) -> None:
    """Nothing that was typed goes without a word."""
    from shardwise.config.names import close_name
    from shardwise.errors import ConfigError

    unused = [path for path in assigned if path not in filled]
    if unused:
        hint = close_name(unused[0], filled) or '; it fills what is "auto" in the file, and nothing else'
        raise ConfigError(f'--auto {unused[0]}: the file has no "auto" there{hint}')


def _speak_any_text() -> None:
    """Names in a configuration may hold what the terminal's encoding does not."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _worth_a_line(row: Row, rows: list[Row]) -> bool:
    """Whether a key is shown without `--all`: it is written, or does something, or belongs to a section that is."""
    section = row.key.rpartition(".")[0]
    if row.origin != "default":
        return True
    if row.state in ("refused", "not yet"):
        return False
    if not section:
        return row.state == "honoured"
    written = any(r.origin in ("file", "auto") and r.key.startswith(f"{section}.") for r in rows)
    return written and row.state == "honoured"


def _print(rows: list[Row], told: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Piped, a line is as long as it needs to be, so that grep finds a key and what it does in one line.
    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else 1000, soft_wrap=not terminal)
    if not terminal:
        widths = [max(len(cell) for cell in column) for column in zip(*map(_cells, rows), strict=True)]
        for row in rows:
            print("  ".join(c.ljust(w) for c, w in zip(_cells(row), widths, strict=True)).rstrip())
    else:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for name in ("key", "value", "from", "state", "what it does"):
            table.add_column(name, overflow="fold")
        for row in rows:
            key, value, origin, state, line = _cells(row)
            table.add_row(key, Text(value), origin, Text(state, style=STYLES[state]), Text(line))
        console.print(table)
    for line in told:
        console.print(Text.assemble(("warning  ", "yellow"), line), soft_wrap=not terminal)


def _cells(row: Row) -> tuple[str, str, str, str, str]:
    return row.key, _shown(row.value), row.origin, row.state, row.line


def _shown(value: Any) -> str:
    if isinstance(value, list) and len(json.dumps(value)) > 40:
        return f"[{len(value)} items]"
    if isinstance(value, int) and not isinstance(value, bool) and value == 2**63 - 1:
        return "2^63 - 1"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"{value:g}" if abs(value) < 1e6 else f"{value:.0f}"
    return json.dumps(value, ensure_ascii=False)
