"""``deltafuse doctor``: what is installed, what can run here, why the rest cannot, and what to install."""

from __future__ import annotations

import json
import os
import platform
import re
from importlib import metadata
from typing import Annotated, Any

import typer

from .tables import print_table

_DISTRIBUTION = "deltafuse"
_DEVELOPER_EXTRAS = ("test", "dev")
_ENVIRONMENT_PREFIXES = ("DELTAFUSE_", "LYCORIS_KERNEL_")
Facts = dict[str, Any]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("doctor", help="Show versions, devices, backends with reasons, and what to install.")(doctor)


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False) -> None:
    """Collect the facts and print them."""
    facts = collect()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        _print(facts)


def collect() -> Facts:
    """All facts as plain data: versions, packages, devices, backends, algorithms, environment, advice."""
    facts: Facts = {
        "versions": _versions(),
        "packages": _packages(),
        "devices": _devices(),
        "backends": _backends(),
        "algorithms": _algorithms(),
        "environment": _environment(),
    }
    facts["advice"] = _advice(facts)
    return facts


def _versions() -> dict[str, str]:
    import torch

    from .. import __version__

    return {
        "deltafuse": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda of torch": torch.version.cuda or "none",
        "platform": platform.platform(),
    }


def _packages() -> list[Facts]:
    """Every optional package that this distribution declares, with the extras that bring it."""
    extras: dict[str, list[str]] = {}
    for requirement in _requirements():
        match = re.match(r"^([A-Za-z0-9._-]+).*extra\s*==\s*['\"]([\w-]+)['\"]", requirement)
        if match and match[2] not in _DEVELOPER_EXTRAS:
            extras.setdefault(match[1], []).append(match[2])
    return [{"name": name, "version": _installed(name), "extras": found} for name, found in sorted(extras.items())]


def _requirements() -> list[str]:
    try:
        return metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[Facts]:
    import torch

    found: list[Facts] = [
        {"device": "cpu", "name": platform.processor() or platform.machine(), "detail": _cpu_detail()},
    ]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        card = torch.cuda.get_device_properties(index)
        detail = f"capability {card.major}.{card.minor}, {card.total_memory / 2**30:.1f} GiB"
        found.append({"device": f"cuda:{index}", "name": card.name, "detail": detail})
    if torch.backends.mps.is_available():
        found.append({"device": "mps", "name": "Apple GPU", "detail": "fp64 is not available on it"})
    return found


def _cpu_detail() -> str:
    import torch

    return f"{torch.get_num_threads()} threads of {os.cpu_count()} cores"


def _backends() -> list[Facts]:
    from .. import available_backends

    return [
        {"name": name, "ok": bool(verdict.ok), "reason": verdict.reason}
        for name, verdict in available_backends().items()
    ]


def _algorithms() -> list[Facts]:
    """What the registry holds, so that an algorithm added from outside shows up beside the built-in ones."""
    from ..algorithms.registry import algorithms

    rows = []
    for name, info in sorted(algorithms().items()):
        origin = info.module_class.__module__
        rows.append(
            {
                "name": name,
                "aliases": list(info.aliases),
                "summary": info.summary,
                "origin": "built in" if origin.split(".")[0] == _DISTRIBUTION else origin,
            }
        )
    return rows


def _environment() -> dict[str, str]:
    return {key: value for key, value in sorted(os.environ.items()) if key.startswith(_ENVIRONMENT_PREFIXES)}


def _advice(facts: Facts) -> list[str]:
    """What to install or correct, one sentence each."""
    return [*_install_advice(facts["packages"]), *_environment_advice(facts["environment"])]


def _install_advice(packages: list[Facts]) -> list[str]:
    missing: dict[str, list[str]] = {}
    for package in packages:
        for extra in package["extras"] if package["version"] is None else ():
            missing.setdefault(extra, []).append(package["name"])
    return [f"pip install 'deltafuse[{extra}]' brings {', '.join(names)}" for extra, names in sorted(missing.items())]


def _environment_advice(environment: dict[str, str]) -> list[str]:
    from ..core.errors import unknown_name
    from ..core.policy import VARIABLES

    strangers = [name for name in environment if name not in VARIABLES]
    return [unknown_name("environment variable", name, VARIABLES, "has no effect") for name in strangers]


def _print(facts: Facts) -> None:
    print_table("Versions", ("what", "version"), list(facts["versions"].items()))
    print_table(
        "Optional packages",
        ("package", "version", "extra"),
        [(p["name"], p["version"] or "not installed", ", ".join(p["extras"])) for p in facts["packages"]],
    )
    print_table("Devices", ("device", "name", "detail"), [list(device.values()) for device in facts["devices"]])
    print_table(
        "Backends",
        ("backend", "runs", "reason"),
        [(b["name"], "yes" if b["ok"] else "no", b["reason"]) for b in facts["backends"]],
    )
    print_table(
        "Algorithms",
        ("algorithm", "also", "origin", "what it is"),
        [(a["name"], ", ".join(a["aliases"]) or "-", a["origin"], a["summary"]) for a in facts["algorithms"]],
    )
    print_table("Environment", ("variable", "value"), list(facts["environment"].items()))
    print_table("What to do", ("advice",), [(line,) for line in facts["advice"]])
