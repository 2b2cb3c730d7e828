"""How a fused operation reaches autograd, torch.compile and the dispatcher.

One forward and one backward function, tensors in and tensors out, are bound twice: eager calls them inside an
autograd.Function, with nothing in between; a traced graph sees two library operators, ``deltafuse::<name>`` and
``deltafuse::<name>_backward``, with exact fakes and the gradient registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("deltafuse", "FRAGMENT")
_KEY = "CompositeExplicitAutograd"
_ONCE = "a fused operation is differentiable once; deltafuse.use_backend('torch') has second derivatives"
Tensors = tuple[Any, ...]


@dataclass(frozen=True)
class Fused:
    """One operation.

    schema: arguments as a library schema, ``Tensor x, Tensor? bias, float alpha``. outputs: how many tensors forward
    returns; the first ``results`` are the result, a tuple where there are several, and the others are kept for backward
    only. forward(*args) -> tuple of tensors.
    fake: the same with shapes alone. save(args, outputs) -> (tensors or None, plain values) that backward needs.
    saved_schema: backward's arguments in that order. backward(grad, *tensors, *values, needs) -> one gradient, or None,
    for each argument; ``needs`` says which are wanted. With several results backward takes a gradient, or None, of
    each. through: the argument, if any, whose gradient is the incoming one; backward is not asked for it.
    """

    name: str
    schema: str
    outputs: int
    forward: Callable[..., Tensors]
    fake: Callable[..., Tensors]
    save: Callable[[Sequence[Any], Sequence[Tensor]], tuple[Tensors, Tensors]]
    saved_schema: str
    backward: Callable[..., Tensors]
    backward_fake: Callable[..., Tensors]
    results: int = 1
    through: int | None = None


FUSED: dict[str, Fused] = {}
"""Every bound operation by name; filled as the modules of ``ops`` are imported."""
_recording: list[tuple[str, Tensors]] | None = None


@contextmanager
def recorded() -> Iterator[list[tuple[str, Tensors]]]:
    """Eager calls of fused operations inside the block, as (name, arguments). For tests; process-wide."""
    global _recording
    previous, _recording = _recording, []
    try:
        yield _recording
    finally:
        _recording = previous


def bind(fused: Fused) -> Callable[..., Any]:
    """The callable that runs ``fused``: its result, differentiable once."""
    FUSED[fused.name] = fused
    eager = _function(fused)
    traced = _operators(fused)

    def run(*args: Any) -> Any:
        args = tuple(map(_packed, args))
        if torch.compiler.is_compiling():
            return _result(fused, traced(*args))
        if _recording is not None:
            _recording.append((fused.name, args))
        return eager(*args)

    run.__name__ = fused.name
    return run


def _packed(arg: Any) -> Any:
    """Kernels read vectors at unit stride: one that was sliced with a step or expanded is copied first."""
    if isinstance(arg, Tensor) and arg.dim() == 1 and arg.stride(0) != 1:
        return arg.contiguous()
    return arg


def _result(fused: Fused, outputs: Tensors) -> Any:
    return outputs[0] if fused.results == 1 else tuple(outputs[: fused.results])


def _function(fused: Fused) -> Callable[..., Any]:
    class Run(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            outputs = fused.forward(*args)
            tensors, ctx.values = fused.save(args, outputs)
            ctx.save_for_backward(*tensors)
            ctx.set_materialize_grads(False)
            return _result(fused, outputs)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            needs = ctx.needs_input_grad
            if all(grad is None for grad in grads):
                return (None,) * len(needs)
            saved = ctx.saved_tensors
            asked = _without(needs, fused.through)
            with torch.no_grad():
                found = fused.backward(*grads, *saved, *ctx.values, asked)
            found = _filled(found, asked, needs, grads[0])
            return _final(found, (*grads, *saved)) if torch.is_grad_enabled() else found

    Run.__name__ = Run.__qualname__ = fused.name
    return Run.apply


class _Once(torch.autograd.Function):
    """Passes the first ``count`` tensors on; differentiating them raises, with respect to any of the tensors."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(_ONCE)


def _final(grads: Tensors, sources: Tensors) -> Tensors:
    """``grads``, which depend on ``sources``, such that differentiating them raises.

    torch's once_differentiable does this only where the incoming gradient wants one: behind ``y.sum()`` a second
    derivative would silently be missing.
    """
    present = [grad for grad in grads if grad is not None]
    marked = iter(_Once.apply(len(present), *present, *(source for source in sources if source is not None)))
    return tuple(None if grad is None else next(marked) for grad in grads)


def _operators(fused: Fused) -> Callable[..., Tensors]:
    name, back = fused.name, f"{fused.name}_backward"
    single = fused.outputs == 1  # a schema knows no tuple of one
    LIBRARY.define(f"{name}({fused.schema}) -> ({', '.join(['Tensor'] * fused.outputs)})")
    incoming = ", ".join(f"Tensor? grad_{index}" for index in range(fused.results))
    incoming = "Tensor grad" if fused.results == 1 else incoming
    LIBRARY.define(f"{back}({incoming}, {fused.saved_schema}, bool[] needs) -> Tensor[]")

    def forward(*args: Any) -> Any:
        return fused.forward(*args)[0] if single else fused.forward(*args)

    def fake(*args: Any) -> Any:
        return fused.fake(*args)[0] if single else fused.fake(*args)

    def filled(*args: Any) -> list[Tensor]:
        return _whole(args, fused.backward(*args))

    def filled_fake(*args: Any) -> list[Tensor]:
        return _whole(args, fused.backward_fake(*args))

    LIBRARY.impl(name, forward, _KEY)
    LIBRARY.impl(back, filled, _KEY)
    torch.library.register_fake(f"deltafuse::{name}", fake, lib=LIBRARY)
    torch.library.register_fake(f"deltafuse::{back}", filled_fake, lib=LIBRARY)
    run = getattr(torch.ops.deltafuse, name).default
    run_back = getattr(torch.ops.deltafuse, back).default

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        tensors, ctx.values = fused.save(inputs, (output,) if single else output)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *grads: Any) -> Any:
        needs = list(ctx.needs_input_grad)
        grads = grads[: fused.results]
        if all(grad is None for grad in grads):
            return (None,) * len(needs)
        asked = list(_without(needs, fused.through))
        found = run_back(*grads, *ctx.saved_tensors, *ctx.values, asked)
        return _filled(found, asked, needs, grads[0])

    torch.library.register_autograd(f"deltafuse::{name}", backward, setup_context=setup, lib=LIBRARY)
    return (lambda *args: (run(*args),)) if single else run


def _without(needs: Sequence[bool], through: int | None) -> Sequence[bool]:
    return needs if through is None else [need and index != through for index, need in enumerate(needs)]


def _filled(found: Sequence[Any], asked: Sequence[bool], needs: Sequence[bool], grad: Any) -> Tensors:
    """What backward was asked for, and ``grad`` itself where it passes through."""
    return tuple(item if ask else grad if need else None for item, ask, need in zip(found, asked, needs, strict=True))


def _whole(args: Sequence[Any], grads: Sequence[Any]) -> list[Tensor]:
    """Operators return no None: an unwanted gradient is an empty tensor."""
    like = next(arg for arg in args if isinstance(arg, Tensor))
    return [like.new_empty(0) if grad is None else grad for grad in grads]
