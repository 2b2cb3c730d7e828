"""Seeded bugs: each must be caught by the comparison with the reference that every example goes through.

A mutant is a kernel's source with one piece of text replaced, loaded as a module of its own in the kernel's place.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import KernelInterface

from deltafuse.backends.triton import products
from deltafuse.backends.triton.launch import forget
from deltafuse.primitives.examples import Example, Sizes, examples

from .support import faults, implementation, needs_kernels, split_early

pytestmark = needs_kernels
PACKAGE = "deltafuse.backends.triton.kernels"
SMALL = Sizes(lead=(2, 9), inner=72, out=40, rank=3)
SPLIT = Sizes(lead=(1, 130), inner=264, out=136, rank=2)


@dataclass(frozen=True)
class Mutant:
    """``text`` of kernels/<file>.py becomes ``instead``; an example of ``primitive`` must notice.

    split: reductions are split at this size. fused: products run in the fused kernel even on a CPU.
    """

    bug: str
    file: str
    text: str
    instead: str
    primitive: str
    split: bool = False
    fused: bool = False


MUTANTS = (
    Mutant(
        "tail mask of the reduction dropped", "passes", "cols_ok = (k + rk) < stop\n",
        "cols_ok = (k + rk) < stop + BK\n", "lowrank_linear",
    ),
    Mutant(
        "last block of K skipped", "passes", "for k in range(split * per_split, stop, BK):",
        "for k in range(split * per_split, stop - BK, BK):", "lowrank_linear",
    ),
    Mutant(
        "strides of A swapped", "passes", "rr[:, None] * a_rows + (k + rk)[None, :] * a_cols",
        "rr[:, None] * a_cols + (k + rk)[None, :] * a_rows", "lowrank_linear",
    ),
    Mutant("scale applied twice", "passes", "    acc *= alpha\n", "    acc *= alpha * alpha\n", "lowrank_linear"),
    Mutant("up_gain dropped in backward", "passes", "if HAS_UP_GAIN:", "if HAS_UP_GAIN and False:", "lowrank_linear"),
    Mutant(
        "last chunk of rows lost", "passes", "for other in range(0, chunks):", "for other in range(0, chunks - 1):",
        "lowrank_linear", split=True,
    ),
    Mutant(
        "last share of K lost", "passes", "for other in range(0, splits):", "for other in range(0, splits - 1):",
        "lowrank_linear", split=True,
    ),
    Mutant(
        "bias added before the gain", "gain", "out += tl.load(bias_ptr + rn, cols_ok, 0.0).to(tl.float32)[None, :]",
        "out += (tl.load(bias_ptr + rn, cols_ok, 0.0) * tl.load(gain_ptr + rn, cols_ok, 0.0)).to(tl.float32)[None, :]",
        "lowrank_linear",
    ),
    Mutant(
        "bias added before the gain, fused", "gemm", "        acc += _load_vector(bias_ptr, rn, N)[None, :]\n",
        "        acc += (_load_vector(bias_ptr, rn, N) * _load_vector(gain_ptr, rn, N))[None, :]\n",
        "lowrank_linear", fused=True,
    ),
    Mutant(
        "scale applied twice, fused", "gemm", "    up = up.to(tl.float32) * scale\n",
        "    up = up.to(tl.float32) * scale * scale\n", "lowrank_linear", fused=True,
    ),
    Mutant("scale applied twice in a merge", "merge", "out *= number\n", "out *= number * number\n", "lowrank_merge"),
    Mutant("last rank lost in a merge", "merge", "ok = rr < r\n", "ok = rr < r - 1\n", "lowrank_merge"),
    Mutant(
        "last chunk of a gain's gradient lost", "scale", "(other < chunks)[:, None]", "(other < chunks - 1)[:, None]",
        "channel_scale", split=True,
    ),
    Mutant("indices of a Khatri-Rao product swapped", "khatri_rao", "(c // q)", "(c % p)", "khatri_rao"),
)  # fmt: skip


def source_of(file: str) -> str:
    found = importlib.util.find_spec(f"{PACKAGE}.{file}")
    assert found is not None, f"no kernels/{file}.py: the mutant needs its new place"
    assert found.origin is not None
    return Path(found.origin).read_text()


_loaded: list[ModuleType] = []
"""Kept: launches know kernels by identity, which must not be used twice."""


def load(mutant: Mutant, folder: Path) -> ModuleType:
    """The mutated file as a module beside the original."""
    source = source_of(mutant.file)
    assert mutant.text in source, f"kernels/{mutant.file}.py has no {mutant.text!r} any more: seed this bug anew"
    path = folder / f"{mutant.file}_mutant.py"
    path.write_text(source.replace(mutant.text, mutant.instead))
    spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    _loaded.append(module)
    return module


def put(mutated: ModuleType, original: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """Kernels of ``mutated`` in the place of ``original``'s, there and wherever they were imported.

    Launch functions stay the original's: operations hold on to them.
    """
    kernels = {key: value for key, value in vars(original).items() if isinstance(value, KernelInterface)}
    for name, module in list(sys.modules.items()):
        if name.startswith("deltafuse.backends.triton."):
            for key, value in list(vars(module).items()):
                if any(value is kernel for kernel in kernels.values()) and hasattr(mutated, key):
                    patch.setattr(module, key, getattr(mutated, key))


def noticing(mutant: Mutant, function: Callable[..., Any]) -> Iterator[Example]:
    """Examples whose comparison with the reference fails now."""
    return (case for case in examples(mutant.primitive) if wrong(mutant, function, case))


def wrong(mutant: Mutant, function: Callable[..., Any], case: Example) -> str:
    sizes = SPLIT if mutant.split else SMALL
    try:
        return faults(function, case, sizes, torch.float16 if mutant.fused else torch.float32)
    except Exception as error:  # a mutant may go as far as crashing
        return repr(error)


@pytest.mark.parametrize("mutant", [pytest.param(item, id=f"{item.file}: {item.bug}") for item in MUTANTS])
def test_seeded_bugs_are_caught(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function = implementation(mutant.primitive)
    original, mutated = importlib.import_module(f"{PACKAGE}.{mutant.file}"), load(mutant, tmp_path)
    if mutant.fused:
        monkeypatch.setattr(products, "FORCED", True)
    with split_early() if mutant.split else nullcontext():
        with monkeypatch.context() as patch:
            put(mutated, original, patch)
            forget()
            case = next(noticing(mutant, function), None)
        forget()
        assert case is not None, "nothing notices this bug"
        assert not wrong(mutant, function, case), "the kernel fails without the bug"
