"""Make the table of docs/benchmarks.md from the raw results in benchmarks/results/<card>/steps*.json.

It takes no arguments and rewrites the part between the markers.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
PAGE = ROOT.parent / "docs" / "benchmarks.md"
START, END = "<!-- steps: begin -->", "<!-- steps: end -->"
COLUMNS = ("deltafuse", "deltafuse, compiled", "lycoris default", "lycoris bypass")


def cell(arm: dict[str, Any] | None, frozen: float) -> str:
    """Milliseconds, ratio to the frozen step and peak of one arm, or why it has none."""
    if arm is None:
        return "not run"
    if not arm["samples"]:
        return "fails: " + arm["error"].partition(": ")[2][:60]
    ms = median(arm)
    return f"{ms:.1f} ms, {ms / frozen:.2f}x, {arm['peak_mb']:.0f} MB"


def table(records: list[dict[str, Any]]) -> str:
    """The step table of one card's files, every row shown; each ratio is to the frozen step of its own file."""
    facts, dimensions = records[0]["provenance"], shape(records[0]["shape"])
    frozen = " and ".join(cell(found["frozen"], median(found["frozen"])) for found in map(by_name, records))
    lines = [
        f"{facts['card']}, torch {facts['torch']}, {dimensions}. Frozen step (one a run): {frozen}.",
        "",
        "| adapter | " + " | ".join(COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for found in map(by_name, records):
        base = median(found["frozen"])
        for name in dict.fromkeys(name.partition(" | ")[0] for name in found if " | " in name):
            cells = (cell(found.get(f"{name} | {key}"), base) for key in COLUMNS)
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
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


def main() -> None:
    """Rewrite the tables between the markers."""
    folders = sorted(path for path in (ROOT / "results").iterdir() if path.is_dir())
    parts = [table([json.loads(path.read_text()) for path in sorted(card.glob("steps*.json"))]) for card in folders]
    before, _, rest = PAGE.read_text().partition(START)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{START}\n" + "\n\n".join(parts) + f"\n{END}{after}")


if __name__ == "__main__":
    main()
