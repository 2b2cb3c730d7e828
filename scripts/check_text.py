"""Check text files: no trailing whitespace, a newline at the end, no tabs in Python. Paths come as arguments."""

from __future__ import annotations

import sys
from pathlib import Path


def problems(path: Path) -> list[str]:
    """What is wrong with one file, a line each."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return []
    found = [f"{path}:{n}: trailing whitespace" for n, line in enumerate(text.split("\n"), 1) if line != line.rstrip()]
    if text and not text.endswith("\n"):
        found.append(f"{path}: no newline at the end")
    if path.suffix == ".py" and "\t" in text:
        found.append(f"{path}: tab")
    return found


def main() -> int:
    """Print every problem; 1 where there is any."""
    found = [line for name in sys.argv[1:] for line in problems(Path(name))]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
