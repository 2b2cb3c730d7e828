"""Training-step time and memory of adapters on a transformer stack, next to the frozen model and lycoris-lora.

Model: blocks of attention and MLP (q, k, v, o, up, down; d and 4 d), bf16, frozen; forward + backward with a gradient
for the input. Each arm is checked before it is timed: finite, non-zero gradients for every adapter tensor, and a
compiled arm's gradients equal its eager twin's. Arms are interleaved in rounds and shuffled; the table shows medians,
the JSON every round.

    deltafuse bench steps --out steps.json                 # on a CUDA machine
    deltafuse bench steps --device cpu --small             # a smoke run
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.errors import OptionError, unknown_name
from .provenance import provenance

ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"algo": "lora"},
    "lora+dora": {"algo": "lora", "dora_wd": True},
    "loha": {"algo": "loha"},
    "lokr f8": {"algo": "lokr", "factor": 8},
    "glora": {"algo": "glora"},
    "dylora": {"algo": "dylora"},
    "ia3": {"algo": "ia3"},
    "diag-oft": {"algo": "diag-oft"},
    "oft (input)": {"algo": "oft"},
    "boft": {"algo": "boft"},
    "tlora": {"algo": "tlora", "use_data_init": False},
    "full": {"algo": "full"},
}
PEER_MODES: dict[str, dict[str, Any]] = {"default": {}, "bypass": {"bypass_mode": True}}
GRADIENT_TOLERANCE = 0.1
"""Relative, per tensor: bf16 rounding through the blocks stays under it, a lost or halved gradient does not."""
PEER_LACKS = {"oft (input)"}


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, hidden: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        h = self.n1(x)
        q, k, v = (layer(h).view(batch, tokens, -1, self.head).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.n2(x))))


@dataclass
class Arm:
    """One thing timed: a package (None: the frozen model), an adapter, a mode, eager or compiled."""

    name: str
    package: str | None
    options: dict[str, Any] = field(default_factory=dict)
    compiled: bool = False
    samples: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    peak_mb: float = 0.0
    device_ms: float = 0.0
    launches: float = 0.0
    error: str = ""


@dataclass
class Shape:
    width: int = 3072
    hidden: int = 12288
    head: int = 128
    blocks: int = 4
    batch: int = 2
    tokens: int = 2048
    rank: int = 16
    alpha: float = 8.0


class Runner:
    """One arm ready to run: the model, its adapter and a step."""

    def __init__(self, arm: Arm, shape: Shape, device: str) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            blocks = [Block(shape.width, shape.hidden, shape.head) for _ in range(shape.blocks)]
        self.model = nn.Sequential(*blocks).to(device, torch.bfloat16).requires_grad_(False)
        self.adapter = self._adapt(arm, shape, device)
        self.parameters = [] if self.adapter is None else [p for p in self.adapter.parameters() if p.requires_grad]
        if arm.compiled:
            for block in self.model:
                block.compile()
        self.x = torch.randn(
            shape.batch, shape.tokens, shape.width, device=device, dtype=torch.bfloat16, requires_grad=True
        )

    def _adapt(self, arm: Arm, shape: Shape, device: str) -> Any:
        if arm.package is None:
            return None
        package = importlib.import_module(arm.package)
        network = package.create_lycoris(
            self.model, 1.0, linear_dim=shape.rank, linear_alpha=shape.alpha, preset="full", **arm.options
        )
        network.apply_to()
        network.to(device, torch.bfloat16)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(torch.randn_like(parameter) * 1e-3)
        return network

    def step(self) -> None:
        self.model(self.x).float().square().mean().backward()

    def clear(self) -> None:
        self.x.grad = None
        for parameter in self.parameters:
            parameter.grad = None

    def check(self) -> None:
        """Gradients of every adapter tensor finite and non-zero, within the steps that drawing each block may take."""
        for _ in range(16):
            for _ in range(4):
                self.step()
            bad = [p for p in self.parameters if p.grad is None or not torch.isfinite(p.grad).all()]
            dead = [p for p in self.parameters if p.grad is not None and not p.grad.any()]
            if not bad and not dead:
                break
        self.clear()
        if bad or dead:
            raise RuntimeError(f"{len(bad)} missing or non-finite and {len(dead)} zero gradients")


def compare_with_eager(runner: Runner, arm: Arm, shape: Shape, device: str) -> None:
    """One step of a compiled arm and of its eager twin from one seed: a gradient that compiling lost is an error."""
    twin = Runner(replace(arm, compiled=False), shape, device)
    for module in twin.model.modules() if twin.adapter is None else twin.adapter.modules():
        if hasattr(module, "draw_on_device"):  # a compiled graph draws there; from one seed the twin must too
            module.draw_on_device = True
    for one in (runner, twin):
        torch.manual_seed(1)
        one.step()
    pairs = zip([runner.x, *runner.parameters], [twin.x, *twin.parameters], strict=True)
    errors = [relative_error(a.grad, b.grad) for a, b in pairs]
    runner.clear()
    if max(errors) > GRADIENT_TOLERANCE:
        raise RuntimeError(f"compiled gradients differ from eager's by {max(errors):.2g} at the worst tensor")


def relative_error(value: Tensor | None, wanted: Tensor | None) -> float:
    """|value - wanted| / |wanted| over all elements; a gradient only one side has counts as 1."""
    if value is None or wanted is None:
        return 0.0 if value is wanted else 1.0
    norm = wanted.double().norm()
    return float((value.double() - wanted.double()).norm() / norm) if norm else float(value.any())


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(runner: Runner, arm: Arm, steps: int, device: str) -> None:
    """One round: wall and host milliseconds a step, and the peak over the resident memory."""
    synchronize(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    for _ in range(steps):
        runner.step()
        runner.clear()
    host = time.perf_counter()
    synchronize(device)
    arm.samples.append((time.perf_counter() - start) / steps * 1e3)
    arm.host.append((host - start) / steps * 1e3)
    if device == "cuda":
        arm.peak_mb = (torch.cuda.max_memory_allocated() - before) / 2**20


PROFILED = 3


def profile_device(runner: Runner, arm: Arm) -> None:
    """Device milliseconds and kernels of a step, from the profiler: what is left when the host is never waited for."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(PROFILED):
            runner.step()
            runner.clear()
        torch.cuda.synchronize()
    rows = [item for item in found.key_averages() if item.self_device_time_total > 0]
    arm.device_ms = sum(item.self_device_time_total for item in rows) / PROFILED / 1e3
    arm.launches = sum(item.count for item in rows) / PROFILED


def arms(compiled: bool, only: set[str]) -> list[Arm]:
    """Every arm, frozen first."""
    peer = importlib.util.find_spec("lycoris") is not None
    made = [Arm("frozen", None), *([Arm("frozen, compiled", None, compiled=True)] if compiled else [])]
    for name, options in ADAPTERS.items():
        if only and name not in only:
            continue
        made.append(Arm(f"{name} | deltafuse", "deltafuse", options))
        if compiled:
            made.append(Arm(f"{name} | deltafuse, compiled", "deltafuse", options, compiled=True))
        for mode, extra in PEER_MODES.items():
            if peer and name not in PEER_LACKS:
                made.append(Arm(f"{name} | lycoris {mode}", "lycoris", {**options, **extra}))
    return made


def run_arm(arm: Arm, frozen: Arm, shape: Shape, device: str, steps: int, rounds: int) -> None:
    """Check, warm up, then alternate rounds of the arm and of the frozen model, in random order."""
    torch._dynamo.reset()
    runners = [(Runner(arm, shape, device), arm), (Runner(Arm("frozen", None), shape, device), frozen)]
    runners[0][0].check()
    if arm.compiled and arm.package is not None:
        compare_with_eager(runners[0][0], arm, shape, device)
    for _ in range(3):
        for runner, _ in runners:
            runner.step()
            runner.clear()
    for _ in range(rounds):
        random.shuffle(runners)
        for runner, target in runners:
            measure(runner, target, steps, device)
    if device == "cuda":
        for runner, target in runners:
            if target.device_ms == 0:
                profile_device(runner, target)


@dataclass
class Options:
    """A run. compiled: add compiled arms. only: adapters to run, none for all. commit: for machines without git."""

    out: Path = Path("steps.json")
    device: str = "cpu"
    small: bool = False
    compiled: bool = False
    only: tuple[str, ...] = ()
    commit: str = ""
    steps: int = 5
    rounds: int = 5


SMALL = Shape(64, 128, 32, 2, 2, 33, 4, 2.0)


def save(options: Options, shape: Shape, done: list[Arm]) -> None:
    """Raw results so far, so that a run cut short keeps what it measured."""
    facts = provenance(options.device, options.commit)
    record = {"provenance": facts, "shape": asdict(shape), "arms": [asdict(arm) for arm in done]}
    options.out.write_text(json.dumps(record, indent=1) + "\n")


def main(options: Options) -> list[Arm]:
    """Measure every arm, printing a line and saving after each."""
    _check_names(options.only)
    shape = SMALL if options.small else Shape()
    before = torch._inductor.config.fallback_random
    torch._inductor.config.fallback_random = True  # compiled arms draw what their eager twins draw
    try:
        return _run(options, shape)
    finally:
        torch._inductor.config.fallback_random = before


def _check_names(only: tuple[str, ...]) -> None:
    for name in only:
        if name not in ADAPTERS:
            raise OptionError(unknown_name("adapter", name, ADAPTERS, "of the step benchmark"))


def _run(options: Options, shape: Shape) -> list[Arm]:
    reference = Arm("frozen", None)
    done: list[Arm] = []
    for arm in arms(options.compiled, set(options.only)):
        target = reference if arm.name == "frozen" else arm
        try:
            frozen = Arm("frozen", None) if target is reference else reference
            run_arm(target, frozen, shape, options.device, options.steps, options.rounds)
        except Exception as error:
            arm.error = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
        done.append(target)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
        base = statistics.median(reference.samples) if reference.samples else float("nan")
        ms = statistics.median(target.samples) if target.samples else float("nan")
        save(options, shape, done)
        host = statistics.median(target.host) if target.host else float("nan")
        print(
            f"{target.name:34s} {ms:8.2f} ms {ms / base:6.3f}x device {target.device_ms:6.2f} host {host:6.2f} "
            f"peak {target.peak_mb:7.0f} MB {target.error}",
            flush=True,
        )
    return done
