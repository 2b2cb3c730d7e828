"""Kernels compiled without a GPU: exactly what the operations would launch, for a compute capability of choice.

Every example of every operation runs forward and backward on tensors without memory, at the sizes of real layers. Each
launch stops where Triton would compile: the signature it bound, the arguments it specialized and the options are kept,
then compiled for the target. ``python -m deltafuse.backends.triton.ahead --capability 90`` prints registers, spills and
shared memory of each kernel. Needs the assembler that Triton ships, no driver, and TRITON_INTERPRET unset.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from ...core.verdict import Verdict
from ...primitives.examples import Draw, Sizes, examples, leaves, outputs_of
from ...primitives.shapes import layer, name
from ..registry import backends
from . import OPERATIONS, interpreted, tuning
from .launch import Ready, _plainly, forget

CAPABILITIES = (90, 80)
SIZES = (
    layer(4096, 3072, 3072, 16), layer(4096, 640, 640, 4), layer(4096, 3072, 3072, 64),
    layer(4096, 3072, 3072, 128), layer(4096, 3072, 3072, 256),
)  # fmt: skip
QUICK = SIZES[:1]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory a program may ask for, by capability."""
_PROCESSORS = {80: 108, 90: 132}
_MESSAGE = 2000
_META = torch.device("meta")
_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_PRODUCTS = re.compile(r"\b(tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma)")


def available() -> Verdict:
    """Whether this process can compile ahead of time."""
    if interpreted():
        return Verdict(False, "TRITON_INTERPRET is set: kernels are Python functions here")
    absent = [tool for tool in ("ptxas", "cuobjdump") if not (_TOOLS / tool).exists()]
    return Verdict(not absent, f"Triton ships no {' and '.join(absent)} here" if absent else "Triton's own assembler")


@dataclass(frozen=True)
class Launch:
    """What one launch would compile. where: the first example that launches it."""

    kernel: Any
    capability: int
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]
    where: str

    @property
    def config(self) -> str:
        """Constants, warps and stages in one line; pointers that are absent are left out."""
        names = self.kernel.arg_names
        named = {names[path[0]]: value for path, value in self.constants.items() if value is not None}
        constants = " ".join(f"{key}={_short(value)}" for key, value in named.items() if key.isupper())
        return f"{constants} w{self.options['num_warps']} s{self.options['num_stages']}"

    @property
    def options_on(self) -> int:
        """How much of the kernel this launch switches on: arguments given and flags set."""
        return sum(kind != "constexpr" for kind in self.signature.values()) + sum(
            value is True for value in self.constants.values()
        )

    @property
    def key(self) -> str:
        return repr(
            (self.kernel.__name__, self.capability, self.signature, self.constants, self.attributes, self.options)
        )


def _short(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Report:
    """A compiled launch. spills: bytes of local memory a thread; products: whether tensor cores' products are in it."""

    kernel: str
    capability: int
    config: str
    where: str
    registers: int = 0
    spills: int = 0
    shared: int = 0
    products: bool = False
    error: str = ""


# -- recording --------------------------------------------------------------------------------------------------------


class _NoDriver:
    """Stands for a driver: a device per capability."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


class _WithoutMemory(TorchFunctionMode):
    """Random tensors on the meta device, whatever generator they were asked of; every tensor says it is on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_CUDA:
            return True
        kwargs = dict(kwargs or {})
        if "generator" in kwargs:
            del kwargs["generator"]
            kwargs["device"] = _META
        return func(*args, **kwargs)


@dataclass
class Recorder:
    """Launches met so far, each kind once."""

    capability: int
    every_config: bool
    where: str = ""
    launches: dict[str, Launch] = field(default_factory=dict)
    failures: list[Report] = field(default_factory=list)

    def stop(
        self, kernel: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, attrs: Any, _: Any
    ) -> None:
        """In place of JITFunction's compilation; None makes Triton skip the launch as well."""
        launch = Launch(kernel, self.capability, signature, constants, attrs, dict(options.__dict__), self.where)
        self.launches.setdefault(launch.key, launch)

    def configure(self, item: tuning.Tunable, key: Any, launch: Any, args: tuple[Any, ...]) -> Any:
        """In place of a tunable's choice: the heuristic's, and before it every candidate once where all are wanted."""
        if self.every_config:
            for config in item.candidates(key):
                launch(*args, config=config)
        return item.default(key)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Launches of meta tensors inside the block are recorded as if they ran on the capability's device."""
        before = driver._active
        driver.set_active(_NoDriver(self.capability))
        try:
            with ExitStack() as stack:
                stack.enter_context(patch.object(JITFunction, "_do_compile", lambda *args: self.stop(*args)))
                stack.enter_context(patch.object(tuning.Tunable, "config_for", lambda *args: self.configure(*args)))
                for place, attribute, value in self._pretences():
                    stack.enter_context(patch.object(place, attribute, value))
                stack.enter_context(patch.object(Ready, "__call__", lambda ready, *tensors: _plainly(ready, tensors)))
                stack.enter_context(_WithoutMemory())
                forget()
                yield
        finally:
            forget()
            driver._active = before

    def run(self, function: Any, args: tuple[Any, ...]) -> None:
        """Forward and backward of one example."""
        try:
            outputs, wanted = outputs_of(function(*args)), leaves(args)
            if wanted:
                torch.autograd.grad(outputs, wanted, [torch.empty_like(out) for out in outputs])
        except Exception as error:
            message = f"{type(error).__name__}: {error}"[:_MESSAGE]
            self.failures.append(Report("(nothing launched)", self.capability, "", self.where, error=message))

    def _pretences(self) -> Iterator[tuple[Any, str, Any]]:
        """What this package's modules ask about a device, answered for the capability."""
        count = _PROCESSORS.get(self.capability, 128)
        answers = {
            "processors": lambda device: count,
            "device_facts": lambda device: (divmod(self.capability, 10), count),
        }
        yield torch, "is_autocast_enabled", lambda *kind: False  # it knows no meta device
        for key, module in list(sys.modules.items()):
            if key.startswith("deltafuse.backends.triton."):
                for attribute, value in answers.items():
                    if callable(vars(module).get(attribute)):
                        yield module, attribute, value


def record(
    capability: int, sizes: Sequence[Sizes] = SIZES, dtypes: Sequence[torch.dtype] = DTYPES, every_config: bool = True,
    operations: Sequence[str] = (),
) -> tuple[list[Launch], list[Report]]:  # fmt: skip
    """Every different launch of the operations' examples, forward and backward, and what could not run that far."""
    chosen = [key for key in OPERATIONS if not operations or key in operations]
    functions = {key: backends()["triton"].implementation(key) for key in chosen}
    recorder = Recorder(capability, every_config)
    with recorder.active():
        for key, function in functions.items():
            for case in examples(key):
                for size in sizes:
                    for dtype in dtypes:
                        recorder.where = f"{key}[{case.label}] {name(size)} {str(dtype).removeprefix('torch.')}"
                        recorder.run(function, case.build(size, Draw(dtype, _META)))
    return list(recorder.launches.values()), recorder.failures


def fullest(launches: Sequence[Launch]) -> list[Launch]:
    """Of each kernel and capability the one launch with most of its options on."""
    found: dict[tuple[str, int], Launch] = {}
    for launch in sorted(launches, key=lambda item: item.options_on):
        found[launch.kernel.__name__, launch.capability] = launch
    return list(found.values())


# -- compiling --------------------------------------------------------------------------------------------------------


def build(launch: Launch) -> Report:
    """Compile one launch and read what the assembler says about it."""
    about = (launch.kernel.__name__, launch.capability, launch.config, launch.where)
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    target = GPUTarget("cuda", launch.capability, 32)
    try:
        compiled = triton.compile(source, target=target, options=launch.options)
    except Exception as error:
        return Report(*about, error=f"{type(error).__name__}: {error}"[:_MESSAGE])
    registers, spills = _usage(compiled.asm["cubin"])
    products = _PRODUCTS.search(compiled.asm["ttgir"]) is not None
    return Report(*about, registers, spills, compiled.metadata.shared, products)


def _usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack and local memory) a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_TOOLS / "cuobjdump"), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return found["REG"], found.get("STACK", 0) + found.get("LOCAL", 0)


_work: list[Launch] = []


def _build_numbered(index: int) -> Report:
    return build(_work[index])


def build_all(launches: Sequence[Launch], processes: int = 2) -> list[Report]:
    """Reports in order. Workers are forks: launches hold functions that do not travel."""
    _work[:] = launches
    if processes < 2 or len(launches) < 2:
        return [build(launch) for launch in launches]
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        return list(pool.map(_build_numbered, range(len(launches))))


# -- command line -----------------------------------------------------------------------------------------------------


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text else ""


def table(reports: Sequence[Report]) -> str:
    """kernel | config | registers | spills | shared memory."""
    head = ("kernel", "sm", "config", "registers", "spills", "shared", "first met in")
    rows = [
        (
            r.kernel,
            str(r.capability),
            r.config,
            str(r.registers),
            str(r.spills),
            str(r.shared),
            _last_line(r.error) or r.where,
        )
        for r in reports
    ]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head) - 1)]
    lines = [
        " | ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]) for row in [head, *rows]
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or write it as JSON; 1 where a kernel does not compile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, action="append", help="80, 90; may be repeated; both by default")
    parser.add_argument("--operation", action="append", default=[], help="only this operation; may be repeated")
    parser.add_argument("--quick", action="store_true", help="each kernel once: bfloat16, one size, most options on")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the reports here")
    chosen = parser.parse_args(arguments)
    verdict = available()
    if not verdict:
        print(verdict.reason, file=sys.stderr)
        return 2
    sizes, dtypes = (QUICK, DTYPES[:1]) if chosen.quick else (SIZES, DTYPES)
    launches: list[Launch] = []
    reports: list[Report] = []
    for capability in chosen.capability or CAPABILITIES:
        met, failed = record(capability, sizes, dtypes, not chosen.quick, chosen.operation)
        launches += met
        reports += failed
    reports += build_all(fullest(launches) if chosen.quick else launches, chosen.processes)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([asdict(report) for report in reports], indent=1))
    else:
        print(table(reports))
    return int(any(report.error for report in reports))


if __name__ == "__main__":
    sys.exit(main())
