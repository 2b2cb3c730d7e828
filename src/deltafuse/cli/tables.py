"""Tables for the command line: drawn by rich on a terminal, aligned plain text elsewhere or under NO_COLOR."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

Row = Sequence[object]


def is_rich() -> bool:
    """Whether standard output is a terminal that wants colour."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Print ``rows`` under ``columns``; an empty table says "none"."""
    cells = [[str(value) for value in row] for row in rows]
    if is_rich():
        _print_rich(title, columns, cells)
    else:
        print(plain_table(title, columns, cells))


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table as aligned text; the last column is not padded, so that long reasons do not blow up the width."""
    if not rows:
        return f"{title}: none\n"
    widths = [max(len(line[i]) for line in [list(columns), *rows]) for i in range(len(columns))]
    lines = [title]
    for line in [list(columns), *rows]:
        padded = [cell.ljust(width) for cell, width in zip(line[:-1], widths[:-1], strict=True)]
        lines.append("  " + "  ".join([*padded, line[-1]]).rstrip())
    return "\n".join(lines) + "\n"


def _print_rich(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.text import Text

    if not rows:
        Console().print(Text(f"{title}: none"))
        return
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, style="cyan" if index == 0 else "", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)
