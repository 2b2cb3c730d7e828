"""Make the tables of docs/benchmarks.md from the raw results in benchmarks/results/<card>/steps*.json and ops*.json.

It takes no arguments and rewrites the parts between the markers. Where a card has several files of one kind, later
names win for operations and are added for steps.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
PAGE = ROOT.parent / "docs" / "benchmarks.md"
OP_COLUMNS = ("eager", "compile", "triton")
OP_HEAD = ("primitive, example", "M x N x K, rank, factor", "dtype")
OP_TAIL = ("floor us", "launches", "error")
COLUMNS = ("deltafuse", "deltafuse, compiled", "lycoris default", "lycoris bypass")


def cell(arm: dict[str, Any] | None, frozen: dict[str, Any]) -> str:
    """Wall milliseconds, their ratio to the frozen step, device milliseconds where measured, and peak, or why none."""
    if arm is None:
        return "not run"
    if not arm["samples"]:
        return "fails: " + arm["error"].partition(": ")[2][:60]
    ms = median(arm)
    wall = f"{ms:.1f} ms, {ms / median(frozen):.2f}x"
    device = arm.get("device_ms", 0.0)
    if device:
        wall += f", device {device:.1f}"
    return f"{wall}, {arm['peak_mb']:.0f} MB"


def table(records: list[dict[str, Any]]) -> str:
    """The step table of one card's files, every row shown, an adapter's from the last file that has it; each ratio is
    to the frozen step of its own file."""
    facts, dimensions = records[0]["provenance"], shape(records[0]["shape"])
    frozen = " and ".join(cell(found["frozen"], found["frozen"]) for found in map(by_name, records))
    lines = [
        f"{facts['card']}, torch {facts['torch']}, {dimensions}. Frozen step (one a run): {frozen}.",
        "",
        "| adapter | " + " | ".join(COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    rows: dict[str, str] = {}
    for found in map(by_name, records):
        for name in dict.fromkeys(name.partition(" | ")[0] for name in found if " | " in name):
            cells = (cell(found.get(f"{name} | {key}"), found["frozen"]) for key in COLUMNS)
            rows[name] = f"| {name} | " + " | ".join(cells) + " |"
    lines += rows.values()
    return "\n".join(lines)


def by_name(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Arms by name."""
    return {arm["name"]: arm for arm in record["arms"]}


def median(arm: dict[str, Any]) -> float:
    """Median milliseconds a step."""
    return statistics.median(arm["samples"])


def shape(values: dict[str, Any]) -> str:
    tokens = values["batch"] * values["tokens"]
    return (
        f"bf16, {values['blocks']} blocks of width {values['width']} and {values['hidden']}, {tokens} tokens, "
        f"rank {values['rank']}, alpha {values['alpha']:g}"
    )


def ops_table(records: list[dict[str, Any]]) -> str:
    """The table of single operations of one card: every row shown, also those where we lose and those that failed."""
    facts = records[-1]["provenance"]
    rows = {
        (row["primitive"], row["example"], row["sizes"], row["dtype"]): row for one in records for row in one["rows"]
    }
    arms = list(dict.fromkeys([*OP_COLUMNS, *(name for row in rows.values() for name in row["arms"])]))
    commits = ", ".join(dict.fromkeys(str(one["provenance"]["commit"])[:10] for one in records))
    lines = [
        f"{facts['card']}, torch {facts['torch']}, triton {facts['triton']}, commit {commits}: device us / wall us of"
        " forward and backward together, peak MB. Floor: bytes over copy rate or flops over product rate.",
        "",
        "| " + " | ".join([*OP_HEAD, *arms, *OP_TAIL]) + " |",
        "|---" * (len(arms) + 6) + "|",
    ]
    for row in rows.values():
        cells = [op_cell(row["arms"].get(name)) if not row["note"] else row["note"] for name in arms]
        ours = row["arms"].get("triton") or {}
        launches, error = ours.get("launches"), ours.get("error")
        tail = [
            f"{row['floor_us']:.1f}",
            "-" if launches is None else str(launches),
            "-" if error is None else f"{error:.1e}",
        ]
        head = [f"{row['primitive']}, {row['example']}", op_sizes(row["sizes"]), row["dtype"]]
        lines.append("| " + " | ".join([*head, *cells, *tail]) + " |")
    return "\n".join(lines)


def op_sizes(text: str) -> str:
    """``4096x3072x3072r16f8`` spelled out."""
    sides, _, rest = text.partition("r")
    rank, _, factor = rest.partition("f")
    return f"{sides.replace('x', ' x ')}, {rank}, {factor}"


def op_cell(arm: dict[str, Any] | None) -> str:
    """Device and wall microseconds and peak memory of one arm, or why it has none."""
    if arm is None:
        return "not run"
    if not arm["device_us"]:
        kind, _, reason = arm["note"].partition(": ")
        return ("wrong: " if kind == "WrongResult" else "fails: ") + (reason or kind).replace("|", "/")[:80]
    times = f"{statistics.median(arm['device_us']):.1f} / {statistics.median(arm['wall_us']):.0f}"
    return times if arm["peak_bytes"] is None else f"{times}, {arm['peak_bytes'] / 2**20:.0f} MB"


def between(page: str, name: str, text: str) -> str:
    """``page`` with ``text`` between the markers of ``name``; unchanged where it has none or there is no text."""
    start, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = page.partition(start)
    if not found or not text:
        return page
    return f"{before}{start}\n{text}\n{end}{rest.partition(end)[2]}"


def main() -> None:
    """Rewrite the tables between the markers."""
    folders = sorted(path for path in (ROOT / "results").iterdir() if path.is_dir())
    page = PAGE.read_text()
    for name, make in (("steps", table), ("ops", ops_table)):
        found = [[json.loads(path.read_text()) for path in sorted(card.glob(f"{name}*.json"))] for card in folders]
        page = between(page, name, "\n\n".join(make(records) for records in found if records))
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
