"""Small adapted models for every registered algorithm, and the comparisons the runtime suites share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from deltafuse.algorithms import algorithms, get_algorithm

RANK, ALPHA = 4, 2.0


@dataclass(frozen=True)
class Kind:
    """A layer kind: how to make a base layer and an input with ``rows`` as its leading size."""

    name: str
    layer: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]


KINDS = {
    "linear": Kind("linear", lambda: nn.Linear(12, 16), lambda rows: torch.randn(rows, 12)),
    "conv2d": Kind("conv2d", lambda: nn.Conv2d(8, 16, 3, padding=1), lambda rows: torch.randn(rows, 8, 5, 5)),
    "layernorm": Kind("layernorm", lambda: nn.LayerNorm(12), lambda rows: torch.randn(rows, 12)),
}


@dataclass
class Adapted:
    """A base layer with adapters on it, as a model of its own."""

    model: nn.Module
    adapters: list[Any]
    kind: Kind
    leaves: list[nn.Parameter] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.leaves = [item for adapter in self.adapters for item in adapter.parameters() if item.requires_grad]

    def set_strength(self, value: float) -> None:
        for adapter in self.adapters:
            adapter.multiplier = value


class Model(nn.Module):
    """One layer behind a name, so that what is compiled or checkpointed is a model, not the layer itself."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()


def kinds_of(name: str) -> list[str]:
    """The layer kinds of this suite that an algorithm can sit on."""
    supported = get_algorithm(name).module_class.support_module
    return [kind for kind in KINDS if kind in supported]


def takes(name: str, option: str) -> bool:
    """Whether an algorithm declares ``option``."""
    return option in get_algorithm(name).module_class.options


def cases() -> list[tuple[str, str]]:
    """(algorithm, layer kind) for every algorithm in the registry."""
    return [(name, kind) for name in algorithms() for kind in kinds_of(name)]


def disturb(adapter: nn.Module, seed: int = 5, size: float = 0.2) -> None:
    """Move every parameter off its starting value, so that nothing is zero by initialisation."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for item in adapter.parameters():
            item.add_(torch.randn(item.shape, generator=generator).to(item) * size)


def build(
    name: str,
    kind: str,
    *,
    dtype: torch.dtype = torch.float32,
    strength: float = 0.7,
    stack: int = 1,
    seed: int = 3,
    **options: Any,
) -> Adapted:
    """A frozen base layer of ``kind`` with ``stack`` disturbed adapters of algorithm ``name`` on it."""
    torch.manual_seed(seed)
    layer = KINDS[kind].layer().to(dtype).requires_grad_(False)
    cls = get_algorithm(name).module_class
    ranked = {} if kind == "layernorm" else {"lora_dim": RANK, "alpha": 0.0 if takes(name, "constraint") else ALPHA}
    adapters = []
    for index in range(stack):
        adapter = cls(f"layer{index}", layer, strength, **ranked, **options)
        disturb(adapter, seed + index)
        if dtype == torch.float64:
            adapter.to(dtype)
        adapter.apply_to()
        adapter.train()
        adapters.append(adapter)
    return Adapted(Model(layer), adapters, KINDS[kind])


@dataclass(frozen=True)
class Step:
    """What one forward and backward gave."""

    output: Tensor
    grads: tuple[Tensor | None, ...]
    x_grad: Tensor | None


def step(case: Adapted, x: Tensor, call: Callable[[Tensor], Tensor] | None = None, seed: int = 11) -> Step:
    """One forward and backward from a fixed seed with a fixed cotangent; every gradient, x's included."""
    for leaf in case.leaves:
        leaf.grad = None
    x = x.detach().clone().requires_grad_(True)
    torch.manual_seed(seed)
    out = (case.model if call is None else call)(x)
    cotangent = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=out.device).view(out.shape)
    out.backward(cotangent.to(out.dtype))
    grads = tuple(None if leaf.grad is None else leaf.grad.clone() for leaf in case.leaves)
    return Step(out.detach().clone(), grads, None if x.grad is None else x.grad.clone())


def assert_same(one: Step, other: Step, *, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Outputs and all gradients agree; a gradient that is missing on one side is missing on the other."""
    torch.testing.assert_close(one.output, other.output, rtol=rtol, atol=atol)
    torch.testing.assert_close(one.x_grad, other.x_grad, rtol=rtol, atol=atol)
    assert len(one.grads) == len(other.grads)
    for left, right in zip(one.grads, other.grads, strict=True):
        assert (left is None) == (right is None)
        if left is not None:
            torch.testing.assert_close(left, right, rtol=rtol, atol=atol)


def assert_trains(result: Step) -> None:
    """Every leaf has a finite gradient that is not all zero."""
    for grad in result.grads:
        assert grad is not None
        assert torch.isfinite(grad).all()
        assert grad.abs().sum() > 0


class Recorder(TorchDispatchMode):
    """Names and tensor-output shapes of every operation that runs below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[tuple[int, ...], ...]]] = []
        self.fresh: list[tuple[str, tuple[tuple[int, ...], ...]]] = []
        """Only operations whose outputs own their memory: no views, nothing in place."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [item for item in torch.utils._pytree.tree_leaves(out) if isinstance(item, Tensor)]
        call = (func._schema.name, tuple(tuple(item.shape) for item in tensors))
        self.calls.append(call)
        inputs = {id(item) for item in torch.utils._pytree.tree_leaves((args, kwargs))}
        aliases = any(item.alias_info is not None for item in func._schema.returns)
        if not aliases and not any(id(item) in inputs for item in tensors):
            self.fresh.append(call)
        return out

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record the operations of a block."""
    with Recorder() as recorder:
        yield recorder
