"""Who may import whom: the rooms of docs/architecture.md, read from the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

import deltafuse
from deltafuse.algorithms import algorithms
from deltafuse.backends.registry import BUILT_IN, PLANNED

ROOT = Path(deltafuse.__file__).parent
FOUNDATION = {"core", "_version"}
ROOMS: dict[str, set[str]] = {
    "core": set(),
    "primitives": {"core"},
    "backends": {"core", "primitives"},
    "deltas": {"core", "primitives"},
    "bases": {"core"},
    "layers": {"core", "primitives", "backends", "deltas", "bases"},
    "algorithms": {"core", "primitives", "deltas", "bases", "layers"},
    "network": {"core", "bases", "layers", "algorithms"},
    "functional": {"core", "primitives", "backends", "deltas"},
}
"""Room -> rooms it may import. Rooms that are not listed are faces and tools on top: they may import any of these, and
none of these may import them."""

ALWAYS = {"torch", "safetensors"}
STANDARD = set(sys.stdlib_module_names)
EXPENSIVE = (
    "accelerate",
    "bitsandbytes",
    "diffusers",
    "gguf",
    "matplotlib",
    "peft",
    "rich",
    "sklearn",
    "tilelang",
    "torchao",
    "transformers",
    "triton",
    "typer",
)


def sources() -> Iterator[tuple[str, Path]]:
    """(room, file) of every module of the package."""
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT).parts[0].removesuffix(".py"), path


@lru_cache(maxsize=512)
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def package_of(path: Path) -> list[str]:
    return ["deltafuse", *path.relative_to(ROOT).parts[:-1]]


def imported(path: Path, nodes: Iterator[ast.AST]) -> set[str]:
    """Absolute names of what ``nodes`` import."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package_of(path)
            stem = parts[: len(parts) - node.level + 1] if node.level else []
            head = ".".join([*stem, *([node.module] if node.module else [])])
            found |= {f"{head}.{alias.name}" if head == "deltafuse" else head for alias in node.names}
    return found


def top_level(module: ast.Module) -> Iterator[ast.AST]:
    """Statements that run at import: not those under ``if TYPE_CHECKING``, nor those in functions."""
    pending: list[ast.AST] = list(module.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        yield node
        pending += list(ast.iter_child_nodes(node))


def rooms_of(names: set[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("deltafuse.")}


@pytest.mark.parametrize("room", list(ROOMS))
def test_a_room_imports_only_what_it_trusts(room: str) -> None:
    files = [path for owner, path in sources() if owner == room]
    assert files
    wrong = {
        f"{path.relative_to(ROOT)} imports {other}"
        for path in files
        for other in rooms_of(imported(path, ast.walk(tree(path)))) - ROOMS[room] - FOUNDATION - {room}
    }
    assert not wrong


def test_the_order_has_no_circle() -> None:
    done: list[str] = []
    left = dict(ROOMS)
    while left:
        ready = [room for room, needs in left.items() if needs <= set(done)]
        assert ready, f"a circle among {sorted(left)}"
        done += ready
        for room in ready:
            del left[room]


def test_rooms_exist() -> None:
    assert set(ROOMS) <= {owner for owner, _ in sources()}


def strings_in(path: Path) -> set[str]:
    """String values of a file."""
    nodes = ast.walk(tree(path))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def identifiers_in(path: Path) -> set[str]:
    return {node.id for node in ast.walk(tree(path)) if isinstance(node, ast.Name)}


def test_algorithms_name_no_backend() -> None:
    """Only the norm writes a plan itself: that PyTorch's own norm runs it."""
    backends = set(BUILT_IN) | set(PLANNED)
    for owner, path in sources():
        if owner in ("algorithms", "deltas"):
            named = backends - {"torch"} if path.name == "norm.py" else backends
            assert not strings_in(path) & named, path


def test_backends_name_no_algorithm() -> None:
    names = {alias for info in algorithms().values() for alias in (info.name, *info.aliases)}
    classes = {info.module_class.__name__ for info in algorithms().values()}
    for owner, path in sources():
        if owner in ("backends", "primitives"):
            assert not strings_in(path) & names, path
            assert not identifiers_in(path) & classes, path


def optional(names: set[str]) -> set[str]:
    roots = {name.split(".")[0] for name in names}
    return roots - ALWAYS - STANDARD - {"deltafuse", "__future__"}


@pytest.mark.parametrize("room", list(ROOMS))
def test_lower_rooms_import_no_optional_package(room: str) -> None:
    """Only a backend's own kernels see the package they are written in: they are imported where they are first used."""
    for owner, path in sources():
        if owner == room:
            own = {"triton"} if path.is_relative_to(ROOT / "backends" / "triton") else set()
            assert not optional(imported(path, ast.walk(tree(path)))) - own, path


def test_no_optional_package_at_the_top_of_a_module() -> None:
    """Tools may import one inside a function; the command line alone is built on typer."""
    allowed = {"cli": {"typer", "click", "rich"}, "training": {"numpy", "tqdm"}, "demo": {"numpy"}}
    common = {"numpy", "tqdm", "tomli"}
    for owner, path in sources():
        if owner in ROOMS:
            continue
        found = optional(imported(path, top_level(tree(path)))) - common - allowed.get(owner, set())
        assert not found, f"{path.relative_to(ROOT)}: {sorted(found)}"


PROBE = """
import sys, time
import torch, safetensors.torch, logging, inspect, difflib
start = time.process_time()
import deltafuse
spent = time.process_time() - start
found = [name for name in {expensive!r} if name in sys.modules and name not in before]
print(spent, found)
"""


def test_importing_the_package_is_cheap_and_brings_nothing_optional() -> None:
    code = "import sys, torch\nbefore = set(sys.modules)\n" + PROBE.format(expensive=EXPENSIVE)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    seconds, found = out.strip().splitlines()[-1].split(" ", 1)
    assert found == "[]"
    assert float(seconds) < 1.0
