"""Where a number comes from: commit, versions, card and its clocks."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("triton", "lycoris-lora", "numpy")
_QUERY = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit", "temperature.gpu", "driver_version")


def provenance(device: torch.device | str, commit: str = "") -> dict[str, Any]:
    """Facts to store beside results. commit: given where the machine has no git history."""
    from .. import __version__

    where = torch.device(device)
    return {
        "card": torch.cuda.get_device_name(where) if where.type == "cuda" else "CPU",
        "commit": commit or _commit(),
        "deltafuse": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        **{name: _version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "clocks": clocks(where),
    }


def _commit() -> str:
    """The commit of this package's sources, with a mark where they were changed since; empty outside a repository."""
    here = Path(__file__).resolve().parents[1]
    head = _output(["git", "-C", str(here), "rev-parse", "--verify", "-q", "HEAD"])
    changed = _output(["git", "-C", str(here), "status", "--porcelain", "--untracked-files=no", "."]) if head else ""
    return f"{head}-changed" if changed else head


def _output(command: list[str]) -> str:
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def clocks(device: torch.device) -> dict[str, str]:
    """What nvidia-smi says about the card now; empty elsewhere."""
    if device.type != "cuda":
        return {}
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    chosen = [f"--id=GPU-{uuid}"] if uuid is not None else []
    try:
        line = _output(["nvidia-smi", *chosen, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"])
    except subprocess.TimeoutExpired:
        return {}
    values = [value.strip() for value in line.splitlines()[0].split(",")] if line else []
    return dict(zip(_QUERY, values, strict=False))
