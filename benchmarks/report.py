"""Make the table of docs/benchmarks.md from the raw results in benchmarks/results/<card>/steps.json.

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
        return "-"
    if not arm["samples"]:
        return "fails: " + arm["error"].partition(": ")[2][:60]
    ms = statistics.median(arm["samples"])
    return f"{ms:.1f} ms, {ms / frozen:.2f}x, {arm['peak_mb']:.0f} MB"


def table(record: dict[str, Any]) -> str:
    """The step table of one results file, every row shown."""
    arms = {arm["name"]: arm for arm in record["arms"]}
    frozen = statistics.median(arms["frozen"]["samples"])
    names = list(dict.fromkeys(name.partition(" | ")[0] for name in arms if " | " in name))
    lines = [
        f"{record['provenance']['card']}, torch {record['provenance']['torch']}, {shape(record['shape'])}. "
        f"Frozen step: {cell(arms['frozen'], frozen)}.",
        "",
        "| adapter | " + " | ".join(COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for name in names:
        lines.append(f"| {name} | " + " | ".join(cell(arms.get(f"{name} | {key}"), frozen) for key in COLUMNS) + " |")
    return "\n".join(lines)


def shape(values: dict[str, Any]) -> str:
    tokens = values["batch"] * values["tokens"]
    return (
        f"bf16, {values['blocks']} blocks of width {values['width']} and {values['hidden']}, {tokens} tokens, "
        f"rank {values['rank']}, alpha {values['alpha']:g}"
    )


def main() -> None:
    """Rewrite the tables between the markers."""
    parts = [table(json.loads(path.read_text())) for path in sorted(ROOT.glob("results/*/steps.json"))]
    before, _, rest = PAGE.read_text().partition(START)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{START}\n" + "\n\n".join(parts) + f"\n{END}{after}")


if __name__ == "__main__":
    main()
