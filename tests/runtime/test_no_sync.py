"""No host synchronisation in a training step, so that a CUDA graph can capture it.

On a CPU every operation that would make the host wait for a device is refused while the step runs. On a GPU the step
is captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deltafuse.modules.tlora import clear_timestep_mask, set_timestep_mask
from deltafuse.primitives import norms

from .support import Adapted, assert_trains, build, cases, step, takes

WAITING = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::nonzero",
    "aten::is_nonzero",
    "aten::equal",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::allclose",
    "aten::bincount",
    "aten::repeat_interleave.Tensor",
    "aten::linalg_solve_ex.check",
}


class NoWaiting(TorchDispatchMode):
    """Refuses operations whose result the host needs at once."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        name = func._schema.name
        assert name not in WAITING, f"{name} makes the host wait for the device"
        indices = args[1] if name in ("aten::index", "aten::index_put", "aten::index_put_") else ()
        masked = any(isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8) for item in indices)
        assert not masked, "a boolean mask index has a size that only the device knows"
        return func(*args, **(kwargs or {}))


def test_the_mode_sees_what_it_should() -> None:
    with NoWaiting(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        torch.ones(3).sum().item()
    with NoWaiting(), pytest.raises(AssertionError, match="boolean"):
        torch.arange(3)[torch.tensor([True, False, True])]


OPTION_SETS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropouts": {"dropout": 0.3, "rank_dropout": 0.3, "module_dropout": 0.3, "rank_dropout_scale": True},
    "constraint": {"constraint": 0.02, "rescaled": True},
    "scalar": {"use_scalar": True},
    "decomposed": {"weight_decompose": True},
    "decomposed columns": {"weight_decompose": True, "wd_on_out": False, "dropout": 0.3},
    "bypass": {"bypass_mode": True},
    "merged": {"bypass_mode": False},
    "stacked": {"stack": 2},
}
COMMON = {"dropout", "rank_dropout", "module_dropout", "rank_dropout_scale", "bypass_mode", "stack"}


def variants() -> list[tuple[str, str, str]]:
    """(algorithm, layer kind, option set) where the algorithm takes at least one of the options, or they are common."""
    found = []
    for name, kind in cases():
        for label, options in OPTION_SETS.items():
            special = [key for key in options if key not in COMMON]
            legal = not special or any(takes(name, key) for key in special)
            if legal and not (name == "full" and label == "bypass"):
                found.append((name, kind, label))
    return found


def chosen(name: str, kind: str, label: str) -> dict[str, Any]:
    options = OPTION_SETS[label]
    kept = {key: value for key, value in options.items() if key in COMMON or takes(name, key)}
    if kind == "layernorm":
        kept.pop("dropout", None)
    return kept


@pytest.mark.parametrize(("name", "kind", "label"), variants())
def test_a_step_waits_for_nothing(name: str, kind: str, label: str) -> None:
    case = build(name, kind, **chosen(name, kind, label))
    for adapter in case.adapters:
        if hasattr(adapter, "draw_on_device"):  # otherwise a CPU tensor is drawn and read, on any device
            adapter.draw_on_device = True
    x = case.kind.inputs(4)
    for attempt in range(2):
        with NoWaiting():
            result = step(case, x, seed=attempt)
    assert torch.isfinite(result.output).all()


@pytest.mark.parametrize("batch", [1, 4])
def test_timestep_masks_wait_for_nothing(batch: int) -> None:
    case = build("tlora", "linear")
    set_timestep_mask(torch.ones(batch, 4))
    try:
        with NoWaiting():
            result = step(case, case.kind.inputs(4))
    finally:
        clear_timestep_mask()
    assert_trains(result)


def test_changing_the_strength_waits_for_nothing() -> None:
    case = build("locon", "linear")
    with NoWaiting():
        case.set_strength(0.25)
        step(case, case.kind.inputs(4))


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def on_cuda(case: Adapted) -> Adapted:
    case.model.cuda()
    for adapter in case.adapters:
        adapter.cuda()
    return Adapted(case.model, case.adapters, case.kind)


def capture(case: Adapted, call: Any, x: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of one forward and backward into static gradients, after a warm-up on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call(x).square().sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    for leaf in case.leaves:
        leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(x)
        out.square().sum().backward()
    return graph, out


def eager_gradients(case: Adapted, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    out = case.model(x)
    return out.detach(), list(torch.autograd.grad(out.square().sum(), case.leaves))


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize(("name", "kind"), cases())
def test_a_captured_step_equals_eager(name: str, kind: str) -> None:
    case = on_cuda(build(name, kind, **({"block_size": 4} if name == "dylora" else {})))
    x = case.kind.inputs(4).cuda()
    graph, out = capture(case, case.model, x)
    x.copy_(case.kind.inputs(4))
    graph.replay()
    want, grads = eager_gradients(case, x)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    for leaf, grad in zip(case.leaves, grads, strict=True):
        torch.testing.assert_close(leaf.grad, grad, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize("name", ["locon", "lokr", "diag-oft", "glora"])
def test_captured_dropouts_draw_anew(name: str) -> None:
    options = {"dropout": 0.5, "rank_dropout": 0.5, "module_dropout": 0.2}
    case = on_cuda(build(name, "linear", **options))
    x = case.kind.inputs(4).cuda()
    graph, out = capture(case, case.model, x)
    seen = set()
    for _ in range(6):
        graph.replay()
        seen.add(float(out.sum()))
    assert len(seen) > 1


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize("name", ["locon", "lokr", "loha", "diag-oft", "boft", "ia3", "full"])
def test_strength_changes_a_captured_compiled_step(name: str) -> None:
    torch._dynamo.reset()
    case = on_cuda(build(name, "linear"))
    x = case.kind.inputs(4).cuda()
    call = torch.compile(case.model, fullgraph=True)
    graph, out = capture(case, call, x)
    for strength in (1.0, 0.0, -0.5):
        case.set_strength(strength)
        graph.replay()
        want, _ = eager_gradients(case, x)
        torch.testing.assert_close(out, want, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize("axis", [0, 1])
def test_composed_norms_on_a_card_equal_float64(axis: int) -> None:
    """The bfloat16 product with float32 output that only a CUDA device runs, forward and backward."""
    torch.manual_seed(0)
    weight = torch.randn(300, 200, device="cuda").bfloat16()
    up, down = torch.randn(300, 5, device="cuda") * 0.3, torch.randn(5, 200, device="cuda") * 0.3
    leaves = [item.clone().requires_grad_() for item in (up, down)]
    wide = [item.double().requires_grad_() for item in (up, down)]
    norm = norms.norm_compose(weight, *leaves, axis)
    wanted = (weight.double() + wide[0] @ wide[1]).norm(dim=1 - axis)
    weights = torch.randn_like(wanted)
    (norm * weights).sum().backward()
    (wanted * weights).sum().backward()
    torch.testing.assert_close(norm.double(), wanted, rtol=1e-5, atol=0)
    for leaf, exact in zip(leaves, wide, strict=True):
        assert (leaf.grad.double() - exact.grad).norm() < 1e-4 * exact.grad.norm()


def test_two_bfloat16_halves_hold_a_float32_factor() -> None:
    """What that product runs on: the halves' sum keeps the factor to 2^-16, one half alone does not."""
    factor = torch.randn(64, 9)
    halves = norms._split(factor, torch.bfloat16).float()
    assert ((halves[:, :9] + halves[:, 9:] - factor).abs() <= factor.abs() * 2.0**-16).all()
    assert not ((halves[:, :9] - factor).abs() <= factor.abs() * 2.0**-16).all()
