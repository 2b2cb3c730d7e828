"""The functional API: ``diff_weight`` against ``bypass_forward_diff``, generators, factorizations"""

from __future__ import annotations

import lycoris.functional as functional
import pytest
import torch
import torch.nn.functional as F
from lycoris.functional import boft, diag_oft, general, locon, loha, lokr

from .oracle import cayley
from .target import agrees, differs, relative_error

WEIGHTS = {
    "linear": (24, 40),
    "linear-odd": (15, 21),
    "conv1d": (24, 10, 3),
    "conv2d": (24, 10, 3, 3),
    "conv2d-1x1": (24, 14, 1, 1),
    "conv3d": (12, 6, 1, 3, 2),
}
INPUTS = {2: (3, 5), 3: (2, 9), 4: (2, 7, 6), 5: (2, 3, 5, 4)}
OPS = {2: F.linear, 3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


def weight_of(kind: str) -> torch.Tensor:
    return torch.randn(WEIGHTS[kind], generator=torch.Generator().manual_seed(1)) * 0.3


def input_of(weight: torch.Tensor) -> torch.Tensor:
    batch, *rest = INPUTS[weight.dim()]
    shape = (batch, *rest, weight.shape[1]) if weight.dim() == 2 else (batch, weight.shape[1], *rest)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def geometry(weight: torch.Tensor) -> dict:
    return {} if weight.dim() == 2 else {"padding": 1, "stride": 1}


def filled(weights) -> list:
    generator = torch.Generator().manual_seed(3)
    return [None if w is None else torch.randn(w.shape, generator=generator) * 0.4 for w in weights]


@pytest.mark.parametrize("kind", list(WEIGHTS))
@pytest.mark.parametrize("tucker", [True, False])
def test_locon(kind, tucker):
    weight = weight_of(kind)
    down, up, mid = locon.weight_gen(weight, 3, tucker)
    kernel = weight.shape[2:]
    ones = [1] * len(kernel)
    assert up.abs().max() == 0
    assert down.abs().max() > 0
    assert (mid is not None) == bool(tucker and kernel)
    if mid is not None:
        assert (down.shape, up.shape) == ((3, weight.shape[1], *ones), (weight.shape[0], 3, *ones))
        assert mid.shape == (3, 3, *kernel)
    elif kernel:
        down, up = torch.zeros(3, weight.shape[1], *kernel), torch.zeros(weight.shape[0], 3, *ones)
    down, up, mid = filled((down, up, mid))
    gamma = 2.0 / 3
    delta = locon.diff_weight(down, up, mid, gamma=gamma)
    assert delta.shape == weight.shape
    if mid is None:
        expected = gamma * torch.einsum("or,ri...->oi...", up.flatten(1), down)
    else:
        expected = gamma * torch.einsum("pq...,op,qi->oi...", mid, up.flatten(1), down.flatten(1))
    agrees(lambda: delta, expected)
    x = input_of(weight)
    y = locon.bypass_forward_diff(x, None, down, up, mid, gamma=gamma, extra_args=geometry(weight))
    agrees(lambda: y, OPS[weight.dim()](x, expected, **geometry(weight)))


def test_locon_generator_without_tucker_on_a_convolution():
    """Without Tucker the down factor keeps the kernel, so that up @ down has the weight's shape (rule 28)."""
    weight = weight_of("conv2d")
    down, up, mid = locon.weight_gen(weight, 3, False)

    def peer() -> None:
        assert down.shape == (3, 10)

    def ours() -> None:
        assert mid is None
        assert locon.diff_weight(down, up, mid).shape == weight.shape

    differs(28, peer=peer, ours=ours)


@pytest.mark.parametrize("kind", list(WEIGHTS))
def test_loha(kind):
    weight = weight_of(kind)
    out, inner, *kernel = weight.shape
    for tucker in (True, False):
        weights = loha.weight_gen(weight, 3, tucker)
        w1d, w1u, w2d, w2u, t1, t2 = weights
        if kernel and not tucker:
            continue
        assert (t1 is not None) == (t2 is not None) == bool(kernel)
        if kernel:
            assert w1d.shape == w2d.shape == (3, inner)
            assert w1u.shape == w2u.shape == (3, out)
            assert t1.shape == t2.shape == (3, 3, *kernel)
        else:
            assert w1d.shape == w2d.shape == (3, inner)
            assert w1u.shape == w2u.shape == (out, 3)
        assert loha.diff_weight(*weights, gamma=torch.tensor(1.0)).abs().max() == 0
        w1d, w1u, w2d, w2u, t1, t2 = filled(weights)
        gamma = torch.tensor(2.0 / 3)
        if t1 is None:
            expected = gamma * (w1u @ w1d) * (w2u @ w2d)
        else:
            expected = gamma * general.rebuild_tucker(t1, w1u, w1d) * general.rebuild_tucker(t2, w2u, w2d)
        agrees(lambda e=(w1d, w1u, w2d, w2u, t1, t2), g=gamma: loha.diff_weight(*e, gamma=g), expected)
        x = input_of(weight)
        y = loha.bypass_forward_diff(x, None, w1d, w1u, w2d, w2u, t1, t2, gamma=gamma, extra_args=geometry(weight))
        agrees(lambda y=y: y, OPS[weight.dim()](x, expected, **geometry(weight)))


LOKR = {
    "plain": {"rank": 2},
    "factor": {"rank": 1, "factor": 4},
    "both": {"rank": 1, "factor": 8, "decompose_both": True},
    "unbalanced": {"rank": 1, "unbalanced_factorization": True},
    "no-tucker": {"rank": 1, "tucker": False},
    "large-rank": {"rank": 30},
    "full": {"rank": 2, "full_matrix": True},
}


@pytest.mark.parametrize("kind", list(WEIGHTS))
@pytest.mark.parametrize("form", list(LOKR))
def test_lokr(kind, form):
    weight, options = weight_of(kind), dict(LOKR[form])
    if form == "full" and weight.dim() == 2:
        pytest.skip("covered by test_lokr_full_matrix_linear")
    if weight.dim() > 2 and form not in ("no-tucker", "large-rank", "full") and kind == "conv2d-1x1":
        options["tucker"] = False
    weights = generated_lokr(weight, options)
    assert lokr.diff_weight(*weights, gamma=2.0).abs().max() == 0
    w1, w1a, w1b, w2, w2a, w2b, t2 = weights = filled(weights)
    first = w1 if w1 is not None else w1a @ w1b
    rank = next((b.shape[0] for b in (w1b, w2b) if b is not None), None)
    if w2 is not None:
        second = w2
    elif t2 is not None:
        second = torch.einsum("pq...,po,qi->oi...", t2, w2a, w2b)
    else:
        second = torch.einsum("or,ri...->oi...", w2a, w2b)
    gamma = 2.0
    scale = gamma / rank if rank else 1.0
    expected = scale * torch.einsum("ab,cd...->acbd...", first, second).flatten(0, 1).flatten(1, 2)
    assert expected.shape == weight.shape
    misread_rank = 1 if t2 is not None and w1a is None else None
    agrees(lambda: lokr.diff_weight(*weights, gamma=gamma), expected, fault=misread_rank)
    agrees(lambda: lokr.kron_weight(*weights, scale=scale), expected)
    x, extra = input_of(weight), geometry(weight)
    wanted = OPS[weight.dim()](x, expected, **extra)
    fault = 28 if t2 is not None else None
    agrees(lambda: lokr.bypass_forward_diff(x, None, *weights, gamma=gamma, extra_args=extra), wanted, fault=fault)
    agrees(lambda: lokr.kron_bypass(x, *weights, scale=scale, extra_args=extra), wanted, fault=fault)


def generated_lokr(weight: torch.Tensor, options: dict) -> tuple:
    """lycoris-lora's generator fails where Tucker is on and the layer has no kernel to decompose."""
    if weight.dim() == 2:
        options = options | {"tucker": False}
    return lokr.weight_gen(weight, **options)


def test_lokr_full_matrix_linear():
    """full_matrix holds for linear weights too (rule 45)."""
    weights = lokr.weight_gen(weight_of("linear"), 2, False, full_matrix=True)

    def peer() -> None:
        assert weights[3] is None

    def ours() -> None:
        assert weights[3].shape == (6, 8)
        assert weights[4] is weights[5] is None

    differs(45, peer=peer, ours=ours)


def test_make_kron_broadcasts_over_the_kernel():
    first, second = torch.randn(3, 2), torch.randn(4, 5, 3, 2)
    result = lokr.make_kron(first, second, 0.3)
    assert result.shape == (12, 10, 3, 2)
    for i in range(3):
        for j in range(2):
            block = result[4 * i : 4 * i + 4, 5 * j : 5 * j + 5]
            torch.testing.assert_close(block, 0.3 * first[i, j] * second)


@pytest.mark.parametrize("kind", list(WEIGHTS))
@pytest.mark.parametrize("constraint", [None, 0.9])
@pytest.mark.parametrize("rescale", [False, True])
def test_diag_oft(kind, constraint, rescale):
    weight = weight_of(kind)
    out = weight.shape[0]
    blocks, gain = diag_oft.weight_gen(weight, 4, rescale)
    size, number = general.factorization(out, 4)
    assert blocks.shape == (number, size, size)
    assert (gain is not None) == rescale
    assert blocks.abs().max() == 0
    blocks = filled([blocks])[0]
    if rescale:
        assert gain.shape == (out, *[1] * (weight.dim() - 1))
        gain = 1 + 0.2 * torch.randn(gain.shape, generator=torch.Generator().manual_seed(4))
    rotation = cayley(blocks.double(), constraint or 0.0)
    rotated = (rotation.transpose(1, 2) @ weight.double().reshape(number, size, -1)).reshape(weight.shape)
    expected = (rotated * (gain.double() if rescale else 1.0)) - weight.double()
    agrees(lambda: diag_oft.diff_weight(weight, blocks, gain, constraint=constraint), expected)
    check_output_rotation(diag_oft, weight, (blocks, gain), constraint, expected)


def check_output_rotation(module, weight, weights, constraint, expected) -> None:
    """The bypass acts on the layer's output before the bias, so it equals the op with the delta weight."""
    x, extra, op = input_of(weight), geometry(weight), OPS[weight.dim()]
    org_out = op(x, weight, **extra)
    args = (org_out,) if module is boft else (x, org_out)
    agrees(
        lambda: module.bypass_forward_diff(*args, *weights, constraint=constraint, need_transpose=weight.dim() > 2),
        op(x.double(), expected, **extra),
    )


def test_rotation_matrix():
    blocks = torch.randn(5, 4, 4) * 0.5
    eye = torch.eye(4)
    rotation = diag_oft.get_r(blocks, eye, 0)
    torch.testing.assert_close(rotation @ rotation.transpose(1, 2), eye.expand(5, 4, 4), atol=1e-5, rtol=0)
    agrees(lambda: rotation, cayley(blocks.double(), 0.0))
    agrees(lambda: diag_oft.get_r(blocks, eye, 0.3), cayley(blocks.double(), 0.3))
    agrees(lambda: diag_oft.get_r(blocks), cayley(blocks.double(), 0.0))


@pytest.mark.parametrize("kind", ["linear", "conv1d", "conv2d", "conv3d"])
@pytest.mark.parametrize("scale", [1, 0.3])
def test_boft(kind, scale):
    weight = weight_of(kind)
    out = weight.shape[0]
    blocks, gain = boft.weight_gen(weight, 6)
    size, number = general.power2factorization(out, 6)
    stages = bin(number - 1).count("1") + 1
    assert blocks.shape == (stages, number, size, size)
    assert boft.weight_gen(weight, 6, 1)[0].shape == (1, number, size, size)
    assert boft.weight_gen(weight, 6, 50)[0].shape == (stages, number, size, size)
    blocks = filled([blocks])[0]
    gain = None
    expected = butterfly(blocks, weight, scale) - weight.double()
    agrees(lambda: boft.diff_weight(weight, blocks, gain, constraint=None, scale=scale), expected)
    x, extra, op = input_of(weight), geometry(weight), OPS[weight.dim()]
    org_out = op(x, weight, **extra)
    agrees(
        lambda: boft.bypass_forward_diff(
            org_out, blocks, gain, constraint=None, need_transpose=weight.dim() > 2, scale=scale
        ),
        op(x.double(), expected, **extra),
    )


def butterfly(blocks: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
    from .oracle import merged_weight

    return merged_weight("boft", {"oft_blocks": blocks, "alpha": torch.tensor(0.0)}, weight, scale)


def test_boft_generator_without_rescale():
    """rescale=False gives no rescale tensor (rule 45)."""
    gain = boft.weight_gen(weight_of("linear"), 6, -1, False)[1]

    def peer() -> None:
        assert gain is not None

    def ours() -> None:
        assert gain is None

    differs(45, peer=peer, ours=ours)


FACTORS = {
    127: {-1: (1, 127), 2: (1, 127), 4: (1, 127), 8: (1, 127), 16: (1, 127)},
    128: {-1: (8, 16), 2: (2, 64), 4: (4, 32), 8: (8, 16), 16: (8, 16), 32: (4, 32)},
    250: {-1: (10, 25), 2: (2, 125), 4: (2, 125), 8: (5, 50), 16: (10, 25)},
    360: {-1: (18, 20), 2: (2, 180), 4: (4, 90), 8: (8, 45)},
    512: {-1: (16, 32), 2: (2, 256), 4: (4, 128), 8: (8, 64), 16: (16, 32)},
    1024: {-1: (32, 32), 2: (2, 512), 4: (4, 256), 8: (8, 128), 16: (16, 64), 256: (4, 256)},
    21: {-1: (3, 7), 2: (1, 21)},
}


@pytest.mark.parametrize(("dimension", "table"), FACTORS.items())
def test_factorization(dimension, table):
    for factor, pair in table.items():
        assert tuple(functional.factorization(dimension, factor)) == pair
    assert tuple(functional.factorization(dimension)) == table[-1]


@pytest.mark.parametrize("dimension", [6, 13, 24, 35, 48, 97, 320, 768, 1000])
@pytest.mark.parametrize("factor", [-1, 1, 3, 4, 7, 16])
def test_factorization_properties(dimension, factor):
    small, large = functional.factorization(dimension, factor)
    assert small * large == dimension
    assert small <= large
    if factor > 0 and dimension % factor == 0:
        assert factor in (small, large)
    elif factor > 0:
        assert small <= factor


POWERS = {
    (24, 6): (6, 4), (24, -1): (24, 1), (12, 6): (6, 2), (96, 8): (6, 16), (64, 8): (8, 8), (64, 2): (2, 32),
}  # fmt: skip


@pytest.mark.parametrize(("dimension", "factor", "result"), [(*key, value) for key, value in POWERS.items()])
def test_power2factorization(dimension, factor, result):
    assert tuple(functional.power2factorization(dimension, factor)) == result


@pytest.mark.parametrize(
    ("dimension", "factor"), [(320, 4), (320, 8), (640, 8), (1280, 4), (11008, 8), (15, -1), (21, 6)]
)
def test_power2factorization_without_a_solution(dimension, factor):
    assert tuple(functional.power2factorization(dimension, factor)) == (None, 0)


def test_tucker_helpers_agree():
    core, left, right = torch.randn(3, 4, 3, 2), torch.randn(3, 6), torch.randn(4, 5)
    expected = torch.einsum("pqab,po,qi->oiab", core, left, right)
    torch.testing.assert_close(functional.rebuild_tucker(core, left, right), expected)
    assert general.rebuild_tucker is functional.rebuild_tucker
    torch.testing.assert_close(functional.tucker_weight(left, right, core), expected)
    up, down = left.T.reshape(6, 3, 1, 1), right.reshape(4, 5, 1, 1)
    torch.testing.assert_close(functional.tucker_weight_from_conv(up, down, core), expected)


@pytest.mark.parametrize("kind", ["linear", "conv1d", "conv2d", "conv3d"])
@pytest.mark.parametrize("wd_on_out", [True, False])
def test_weight_decompose(kind, wd_on_out):
    weight = weight_of(kind)
    axis = 0 if wd_on_out else 1
    dims = [dim for dim in range(weight.dim()) if dim != axis]
    norm = torch.linalg.vector_norm(weight, dim=dims, keepdim=True)
    magnitude = norm * (1 + 0.3 * torch.rand(norm.shape))
    agrees(lambda: functional.weight_decompose(weight, magnitude, 1, wd_on_out), weight * magnitude / norm)
    half = weight * (1 + 0.5 * (magnitude / norm - 1))
    agrees(lambda: functional.weight_decompose(weight, magnitude, 0.5, wd_on_out), half)
    agrees(lambda: functional.weight_decompose(weight, magnitude, 0, wd_on_out), weight)


def test_add_scaled():
    base, delta = torch.randn(5, 3), torch.randn(5, 3)
    torch.testing.assert_close(functional.add_scaled(base, delta, 0.3), base + 0.3 * delta)
    torch.testing.assert_close(functional.add_scaled(base, delta), base + delta)


@pytest.mark.parametrize("kind", ["linear", "conv2d"])
def test_apply_dora_scale_is_the_column_form(kind):
    weight, rebuild = weight_of(kind), weight_of(kind).flip(0) * 0.2
    dims = [dim for dim in range(weight.dim()) if dim != 1]
    total = weight + rebuild
    norm = torch.linalg.vector_norm(total, dim=dims, keepdim=True)
    magnitude = norm * 1.2
    for scale in (1.0, 0.3):
        expected = weight + scale * (total * magnitude / norm - weight)
        agrees(lambda s=scale: functional.apply_dora_scale(weight, rebuild, magnitude, s), expected)


def test_function_list():
    expected = [None, None, F.linear, F.conv1d, F.conv2d, F.conv3d]
    assert list(functional.FUNC_LIST) == expected


def gradient_leaves(weights) -> list[torch.Tensor]:
    return [w.requires_grad_() for w in weights if w is not None]


@pytest.mark.parametrize("tucker", [True, False])
def test_loha_gradients_are_the_formula_s(tucker):
    weights = filled(loha.weight_gen(weight_of("conv2d" if tucker else "linear"), 3, tucker))
    leaves = gradient_leaves(weights)
    seed = torch.randn_like(loha.diff_weight(*weights, gamma=torch.tensor(0.7)))
    ours = torch.autograd.grad((loha.diff_weight(*weights, gamma=torch.tensor(0.7)) * seed).sum(), leaves)
    w1d, w1u, w2d, w2u, t1, t2 = weights
    if tucker:
        plain = 0.7 * general.rebuild_tucker(t1, w1u, w1d) * general.rebuild_tucker(t2, w2u, w2d)
    else:
        plain = 0.7 * (w1u @ w1d) * (w2u @ w2d)
    expected = torch.autograd.grad((plain * seed).sum(), leaves)
    assert max(relative_error(a, b) for a, b in zip(ours, expected, strict=True)) < 2e-5


@pytest.mark.parametrize("backend", [None, "torch"])
def test_backend_argument(backend):
    weight = weight_of("linear")
    down, up, _ = filled(locon.weight_gen(weight, 3))
    x = input_of(weight)
    torch.testing.assert_close(
        locon.bypass_forward_diff(x, None, down, up, None, gamma=0.5, backend=backend),
        F.linear(x, locon.diff_weight(down, up, None, gamma=0.5, backend=backend)),
        atol=1e-4,
        rtol=1e-4,
    )
