"""Example calls of every primitive: what self-tests, `deltafuse verify`, benchmarks and the test suite all run.

A primitive's file registers one example for each combination of options that changes what is computed. An example
builds random arguments for given sizes; it never runs anything itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """lead: leading shape of x, whose product is M. inner: K. out: N. rank: r. factor: LoKr's wanted block count."""

    lead: tuple[int, ...] = (2, 17)
    inner: int = 40
    out: int = 56
    rank: int = 5
    factor: int = 4

    @property
    def rows(self) -> int:
        total = 1
        for side in self.lead:
            total *= side
        return total


def generator_on(device: torch.device, seed: int) -> torch.Generator:
    """A generator of its own, so that drawing leaves the global random state alone."""
    return torch.Generator(device=device).manual_seed(seed)


@dataclass
class Draw:
    """Random tensors of one dtype and device.

    factors: dtype of adapter parameters, float32 unless said otherwise. local: draw on the device itself, which is fast
    at any size; without it every device gets the CPU's numbers.
    """

    dtype: torch.dtype
    device: torch.device
    factors: torch.dtype = torch.float32
    seed: int = 0
    local: bool = False
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = generator_on(self.device if self.local else torch.device("cpu"), self.seed)

    def _make(self, shape: tuple[int, ...], scale: float, dtype: torch.dtype, grad: bool) -> Tensor:
        wide = torch.randn(shape, generator=self.generator, dtype=torch.float32, device=self.generator.device) * scale
        return wide.to(dtype).to(self.device).requires_grad_(grad)

    def data(self, *shape: int, scale: float = 1.0, grad: bool = True) -> Tensor:
        """An activation (or, with grad=False, a frozen tensor) in the layer's dtype."""
        return self._make(shape, scale, self.dtype, grad)

    def weight(self, out: int, inner: int) -> Tensor:
        """A frozen base weight (out, inner) that keeps the size of what it multiplies."""
        return self._make((out, inner), inner**-0.5, self.dtype, False)

    def factor(self, *shape: int, scale: float = 0.1, grad: bool = True) -> Tensor:
        """An adapter parameter."""
        return self._make(shape, scale, self.factors, grad)

    def positive(self, *shape: int, grad: bool = True) -> Tensor:
        """A float32 vector within 0.5 to 1.5, as gains are."""
        wide = torch.rand(shape, generator=self.generator, device=self.generator.device) + 0.5
        return wide.to(self.device).requires_grad_(grad)

    def mask(self, *shape: int) -> Tensor:
        """Zeros and ones in float32."""
        drawn = torch.rand(shape, generator=self.generator, device=self.generator.device)
        return (drawn > 0.4).float().to(self.device)

    def drop_seed(self) -> Tensor:
        """What dropout's mask is made of."""
        drawn = torch.randint(0, 1 << 62, (1,), generator=self.generator, device=self.generator.device)
        return drawn.to(self.device)


Build = Callable[[Sizes, Draw], tuple[Any, ...]]


@dataclass(frozen=True)
class Example:
    """primitive, a label for its options, and the builder of positional arguments."""

    primitive: str
    label: str
    build: Build


_examples: dict[str, dict[str, Example]] = {}


def example(primitive: str, label: str) -> Callable[[Build], Build]:
    """Register the decorated builder as an example call of ``primitive``."""

    def register(build: Build) -> Build:
        _examples.setdefault(primitive, {})[label] = Example(primitive, label, build)
        return build

    return register


def examples(primitive: str | None = None) -> Iterator[Example]:
    """Examples of one primitive, or of all."""
    for name in [primitive] if primitive is not None else list(_examples):
        yield from _examples.get(name, {}).values()


Floor = Callable[[Sizes, int], tuple[float, float]]
"""(sizes, bytes of an activation element) -> (bytes, flops) that forward and backward cannot do without."""
_floors: dict[str, Floor] = {}


def floor(primitive: str) -> Callable[[Floor], Floor]:
    """Register the decorated function as the least traffic and work of ``primitive``, forward and backward together."""

    def register(cost: Floor) -> Floor:
        _floors[primitive] = cost
        return cost

    return register


def floor_of(
    primitive: str, sizes: Sizes, width: int, args: tuple[Any, ...], outputs: list[Tensor]
) -> tuple[float, float]:
    """(bytes, flops) of forward and backward: the registered floor, else each tensor moved once and no flops.

    Moved once: arguments and outputs forward; outputs' gradients, arguments and leaves' gradients backward.
    """
    if primitive in _floors:
        return _floors[primitive](sizes, width)
    inputs = sum(item.numel() * item.element_size() for item in tensors(args))
    wanted = sum(item.numel() * item.element_size() for item in leaves(args))
    results = sum(item.numel() * item.element_size() for item in outputs)
    return float(2 * inputs + 2 * results + wanted), 0.0


# -- running one ------------------------------------------------------------------------------------------------------


def tensors(args: tuple[Any, ...]) -> list[Tensor]:
    """Tensors among (nested) arguments, in order."""
    found: list[Tensor] = []
    for arg in args:
        if isinstance(arg, Tensor):
            found.append(arg)
        elif isinstance(arg, (tuple, list)):
            found += tensors(tuple(arg))
    return found


def leaves(args: tuple[Any, ...]) -> list[Tensor]:
    """Tensors among (nested) arguments that want a gradient, in order."""
    return [item for item in tensors(args) if item.requires_grad]


def widened(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same numbers in float64, as leaves of their own."""

    def wide(arg: Any) -> Any:
        if isinstance(arg, Tensor) and arg.is_floating_point():
            return arg.detach().double().requires_grad_(arg.requires_grad)
        if isinstance(arg, (tuple, list)):
            return tuple(wide(item) for item in arg)
        return arg

    return tuple(wide(arg) for arg in args)


def outputs_of(result: Any) -> list[Tensor]:
    """What a primitive returned, as a list."""
    return list(result) if isinstance(result, (tuple, list)) else [result]


def incoming_for(outputs: list[Tensor], seed: int = 1, local: bool = False) -> list[Tensor]:
    """A random gradient for each output; ``local`` draws on the device, as in :class:`Draw`."""
    device = outputs[0].device if local else torch.device("cpu")
    generator = generator_on(device, seed)
    return [torch.randn(out.shape, generator=generator, device=device).to(out) for out in outputs]


def run(function: Callable[..., Any], args: tuple[Any, ...], seed: int = 1, local: bool = False) -> list[Tensor]:
    """Outputs, then gradients of every leaf, for a random incoming gradient that depends on ``seed`` alone."""
    outputs = outputs_of(function(*args))
    wanted = leaves(args)
    incoming = incoming_for(outputs, seed, local)
    grads = torch.autograd.grad(outputs, wanted, incoming) if wanted else ()
    return [item.detach() for item in (*outputs, *grads)]


def relative_error(value: Tensor, wanted: Tensor) -> float:
    """|value - wanted| / |wanted| in float64; an all-zero ``wanted`` asks for zeros."""
    difference = (value.double() - wanted.double()).norm()
    norm = wanted.double().norm()
    return float(difference / norm) if norm > 0 else float(difference)


ROUNDING = {torch.float64: 1e-14, torch.float32: 6e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}
"""What one rounding to a dtype costs, with a margin."""


def limit(eager: float, dtype: torch.dtype) -> float:
    """The error allowed where eager PyTorch of the same dtype has ``eager``: 1.5 times that and one rounding.

    Where eager's error shows no rounding to the layer's dtype (float32 work inside), none is granted either.
    """
    return 1.5 * eager + (ROUNDING[dtype] if eager > 1e-5 else ROUNDING[torch.float32])
