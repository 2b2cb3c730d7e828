"""The functional API gives lycoris-lora's numbers for the same tensors."""

from __future__ import annotations

import importlib

import lycoris.functional as theirs
import pytest
import torch

import deltafuse.functional as ours
from lycoris_api.target import relative_error

WEIGHTS = {
    "linear": (24, 40),
    "odd": (15, 21),
    "conv1d": (24, 10, 3),
    "conv2d": (24, 10, 3, 3),
    "conv3d": (12, 6, 1, 3, 2),
}
INPUTS = {2: (3, 5), 3: (2, 9), 4: (2, 7, 6), 5: (2, 3, 5, 4)}


def both(name: str):
    return importlib.import_module(f"deltafuse.functional.{name}"), importlib.import_module(
        f"lycoris.functional.{name}"
    )


def weight_of(kind: str) -> torch.Tensor:
    return torch.randn(WEIGHTS[kind], generator=torch.Generator().manual_seed(1)) * 0.3


def input_of(weight: torch.Tensor) -> torch.Tensor:
    batch, *rest = INPUTS[weight.dim()]
    shape = (batch, *rest, weight.shape[1]) if weight.dim() == 2 else (batch, weight.shape[1], *rest)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def generated(weight: torch.Tensor, name: str, *args, **options):
    """The two generators' results, which have to be the same tensors; then random values of those shapes."""
    mine, peer = both(name)
    pair = []
    for module in (mine, peer):
        torch.manual_seed(6)
        pair.append(module.weight_gen(weight, *args, **options))
    assert len(pair[0]) == len(pair[1])
    for first, second in zip(*pair, strict=True):
        assert (first is None) == (second is None)
        assert first is None or torch.equal(first, second)
    generator = torch.Generator().manual_seed(3)
    return [None if value is None else torch.randn(value.shape, generator=generator) * 0.4 for value in pair[1]]


def check(name: str, function: str, *args, **options) -> None:
    mine, peer = both(name)
    first, second = getattr(mine, function)(*args, **options), getattr(peer, function)(*args, **options)
    assert first.dtype == second.dtype
    assert relative_error(first, second) < 2e-5


@pytest.mark.parametrize("kind", list(WEIGHTS))
def test_locon(kind):
    weight = weight_of(kind)
    factors = generated(weight, "locon", 3, True)
    check("locon", "diff_weight", *factors, gamma=0.7)
    extra = {} if weight.dim() == 2 else {"padding": 1}
    check("locon", "bypass_forward_diff", input_of(weight), None, *factors, gamma=0.7, extra_args=extra)


@pytest.mark.parametrize("kind", list(WEIGHTS))
def test_loha(kind):
    weight = weight_of(kind)
    factors = generated(weight, "loha", 3, True)
    gamma = torch.tensor(0.7)
    check("loha", "diff_weight", *factors, gamma=gamma)
    extra = {} if weight.dim() == 2 else {"padding": 1}
    check("loha", "bypass_forward_diff", input_of(weight), None, *factors, gamma=gamma, extra_args=extra)


@pytest.mark.parametrize("kind", list(WEIGHTS))
@pytest.mark.parametrize("options", [{}, {"factor": 3}, {"decompose_both": True, "factor": 12}], ids=str)
def test_lokr(kind, options):
    """Tucker factors are left out: lycoris-lora reads their rank off the wrong axis (rule 1)."""
    weight = weight_of(kind)
    factors = generated(weight, "lokr", 1, False, **options)
    check("lokr", "diff_weight", *factors, gamma=2.0)
    check("lokr", "kron_weight", *factors, scale=0.4)
    extra = {} if weight.dim() == 2 else {"padding": 1}
    check("lokr", "bypass_forward_diff", input_of(weight), None, *factors, gamma=2.0, extra_args=extra)


@pytest.mark.parametrize("kind", list(WEIGHTS))
@pytest.mark.parametrize("constraint", [None, 0.9])
@pytest.mark.parametrize("rescale", [False, True])
def test_diag_oft(kind, constraint, rescale):
    weight = weight_of(kind)
    factors = generated(weight, "diag_oft", 4, rescale)
    check("diag_oft", "diff_weight", weight, *factors, constraint=constraint)
    org_out = (
        torch.randn(3, 24 if kind != "odd" else 15) if weight.dim() == 2 else torch.randn(2, weight.shape[0], 5, 4)
    )
    transpose = weight.dim() > 2
    if rescale and weight.dim() != org_out.dim():
        return
    check("diag_oft", "bypass_forward_diff", None, org_out, *factors, constraint=constraint, need_transpose=transpose)


@pytest.mark.parametrize("kind", ["linear", "conv1d", "conv2d", "conv3d"])
@pytest.mark.parametrize("scale", [1, 0.3])
def test_boft(kind, scale):
    weight = weight_of(kind)
    blocks = generated(weight, "boft", 6, rescale=True)[0]
    check("boft", "diff_weight", weight, blocks, None, constraint=0.9, scale=scale)
    org_out = torch.randn(3, 5, 24) if weight.dim() == 2 else torch.randn(2, weight.shape[0], 5, 4)
    check("boft", "bypass_forward_diff", org_out, blocks, None, need_transpose=weight.dim() > 2, scale=scale)


@pytest.mark.parametrize("dimension", [1, 7, 24, 97, 128, 320, 360, 768, 1024, 11008])
@pytest.mark.parametrize("factor", [-1, 1, 2, 3, 4, 8, 12, 64])
def test_factorizations(dimension, factor):
    assert tuple(ours.factorization(dimension, factor)) == tuple(theirs.factorization(dimension, factor))
    assert tuple(ours.power2factorization(dimension, factor)) == tuple(theirs.power2factorization(dimension, factor))


def test_general_helpers():
    core, left, right = torch.randn(3, 4, 3, 2), torch.randn(3, 6), torch.randn(4, 5)
    assert relative_error(ours.rebuild_tucker(core, left, right), theirs.rebuild_tucker(core, left, right)) < 1e-5
    assert relative_error(ours.tucker_weight(left, right, core), theirs.tucker_weight(left, right, core)) < 1e-5
    up, down = left.T.reshape(6, 3, 1, 1), right.reshape(4, 5, 1, 1)
    assert (
        relative_error(ours.tucker_weight_from_conv(up, down, core), theirs.tucker_weight_from_conv(up, down, core))
        < 1e-5
    )
    weight = torch.randn(6, 5, 3, 2)
    for on_out, shape in ((True, (6, 1, 1, 1)), (False, (1, 5, 1, 1))):
        magnitude = torch.rand(shape) + 2
        for strength in (1, 0.4):
            pair = [package.weight_decompose(weight, magnitude, strength, on_out) for package in (ours, theirs)]
            assert relative_error(*pair) < 1e-5
    magnitude = torch.rand(1, 5, 1, 1) + 2
    pair = [package.apply_dora_scale(weight, weight.flip(0), magnitude, 0.4) for package in (ours, theirs)]
    assert relative_error(*pair) < 1e-5
