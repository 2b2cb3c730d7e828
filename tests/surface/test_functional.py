"""The functional API against dense formulas in float64, and against the peer's where the peer is right."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
import torch.nn.functional as F

from deltafuse import functional
from deltafuse.core.errors import BackendError, OptionError, ShapeError
from deltafuse.functional import boft, diag_oft, general, locon, loha, lokr

pytest.importorskip("lycoris")
peer = {
    name: importlib.import_module(f"lycoris.functional.{name}")
    for name in ("general", "locon", "loha", "lokr", "diag_oft", "boft")
}
WEIGHTS = [(24, 36), (7, 13), (24, 36, 3), (24, 36, 3, 3), (8, 6, 1, 1), (8, 12, 2, 3, 1)]
GAMMA = 0.37


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def filled(weights, dtype=torch.float64):
    """The same tensors, every one random, so that nothing is hidden behind a zero."""
    return tuple(None if w is None else (torch.randn(w.shape, dtype=torch.float64) * 0.5).to(dtype) for w in weights)


def leaves(weights):
    return [w.requires_grad_() for w in weights if w is not None]


def conv_case(shape, groups=1):
    """(x, options) for a layer with a weight of ``shape``."""
    _, inp, *kernel = shape
    if not kernel:
        return torch.randn(2, 3, inp, dtype=torch.float64), {}
    options = {"stride": 2, "padding": 1, "dilation": (1,) * len(kernel), "groups": groups}
    return torch.randn(2, inp * groups, *[7] * len(kernel), dtype=torch.float64), options


def layer(x, weight, options):
    return F.linear(x, weight) if weight.dim() == 2 else general.FUNC_LIST[weight.dim()](x, weight, **options)


def dense_locon(down, up, mid):
    if mid is None:
        return torch.einsum("or,r...->o...", up.flatten(1), down)
    return torch.einsum("op,pq...,qi->oi...", up.flatten(1), mid, down.flatten(1))


def dense_loha(w1d, w1u, w2d, w2u, t1, t2):
    if t1 is None:
        return torch.einsum("or,r...->o...", w1u, w1d) * torch.einsum("or,r...->o...", w2u, w2d)
    sides = [torch.einsum("pq...,po,qi->oi...", t, u, d) for t, u, d in ((t1, w1u, w1d), (t2, w2u, w2d))]
    return sides[0] * sides[1]


def dense_lokr(w1, w1a, w1b, w2, w2a, w2b, t):
    w1 = w1a @ w1b if w1 is None else w1
    if w2 is None and t is None:
        w2 = torch.einsum("or,r...->o...", w2a, w2b)
    elif w2 is None:
        w2 = torch.einsum("pq...,po,qi->oi...", t, w2a, w2b)
    dense = torch.einsum("lm,kn...->lkmn...", w1, w2)
    return dense.reshape(w1.shape[0] * w2.shape[0], w1.shape[1] * w2.shape[1], *w2.shape[2:])


def lokr_rank(w1, w1a, w1b, w2, w2a, w2b, t):
    return w1b.shape[0] if w1b is not None else w2b.shape[0] if w2b is not None else None


CASES = [
    (module, dense, shape, options)
    for module, dense, choices in [
        (locon, dense_locon, [{"tucker": False}, {"tucker": True}]),
        (loha, dense_loha, [{"tucker": False}, {"tucker": True}]),
        (
            lokr,
            dense_lokr,
            [
                {"factor": 2},
                {"factor": 2, "tucker": False},
                {"factor": 4, "decompose_both": True},
                {"full_matrix": True},
                {"unbalanced_factorization": True},
            ],
        ),
    ]
    for shape in WEIGHTS
    for options in choices
]


def case_scale(module, weights, gamma):
    if module is not lokr:
        return gamma
    rank = lokr_rank(*weights)
    return 1.0 if rank is None else gamma / rank


@pytest.mark.parametrize(("module", "dense", "shape", "options"), CASES)
@pytest.mark.parametrize("rank", [1, 3])
def test_dense_and_bypass_agree_with_the_formula(module, dense, shape, options, rank):
    weight = torch.zeros(shape)
    made = module.weight_gen(weight, rank, **options)
    assert torch.equal(module.diff_weight(*made, gamma=GAMMA), weight)  # a fresh delta is nothing
    weights = filled(made)
    params = leaves(weights)
    expected = dense(*weights) * case_scale(module, weights, GAMMA)
    got = module.diff_weight(*weights, gamma=GAMMA)
    assert got.shape == weight.shape
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), params), torch.autograd.grad(expected.sum(), params))
    x, extra = conv_case(shape)
    y = module.bypass_forward_diff(x, None, *weights, gamma=GAMMA, extra_args=extra)
    torch.testing.assert_close(y, layer(x, dense(*weights) * case_scale(module, weights, GAMMA), extra))


@pytest.mark.parametrize(("module", "dense", "shape", "options"), [c for c in CASES if len(c[2]) == 4])
def test_grouped_convolutions(module, dense, shape, options):
    weights = filled(module.weight_gen(torch.zeros(shape), 2, **options))
    x, extra = conv_case(shape, groups=2)
    y = module.bypass_forward_diff(x, None, *weights, gamma=GAMMA, extra_args=extra)
    torch.testing.assert_close(y, layer(x, dense(*weights) * case_scale(module, weights, GAMMA), extra))


@pytest.mark.parametrize(("module", "dense", "shape", "options"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_like_the_peer(module, dense, shape, options, dtype):
    """Same numbers as the peer's own functions on tensors both can read."""
    name = module.__name__.rpartition(".")[2]
    weights = filled(module.weight_gen(torch.zeros(shape), 3, **options), dtype)
    if module is lokr and weights[6] is not None:
        pytest.skip("the peer reads the rank of a Tucker LoKr off the wrong axis")
    gamma = torch.tensor(GAMMA) if module is loha else GAMMA
    got, theirs = module.diff_weight(*weights, gamma=gamma), peer[name].diff_weight(*weights, gamma=gamma)
    tight = dtype == torch.float32
    assert got.dtype == dtype
    torch.testing.assert_close(got, theirs.to(dtype), rtol=1e-5 if tight else 5e-2, atol=1e-5 if tight else 5e-2)
    x, extra = conv_case(shape)
    y = module.bypass_forward_diff(x.to(dtype), None, *weights, gamma=gamma, extra_args=extra)
    exact = layer(x, dense(*filled_as(weights)) * case_scale(module, weights, GAMMA), extra)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact, rtol=1e-4 if tight else 5e-2, atol=1e-4 if tight else 0.3)


def filled_as(weights):
    return tuple(None if w is None else w.double() for w in weights)


@pytest.mark.parametrize("gamma", [2, 0.5, torch.tensor(0.5), torch.tensor([0.5])])
@pytest.mark.parametrize("module", [locon, loha, lokr])
def test_gamma_may_be_a_number_or_a_tensor(module, gamma):
    weights = filled(module.weight_gen(torch.zeros(6, 10), 2))
    one = module.diff_weight(*weights, gamma=1.0)
    torch.testing.assert_close(module.diff_weight(*weights, gamma=gamma), one * float(gamma))
    x = torch.randn(4, 10, dtype=torch.float64)
    torch.testing.assert_close(module.bypass_forward_diff(x, None, *weights, gamma=gamma), x @ one.t() * float(gamma))


def test_lokr_of_two_whole_factors_ignores_alpha():
    weights = filled(lokr.weight_gen(torch.zeros(12, 12), 4, full_matrix=True))
    expected = torch.kron(weights[0], weights[3])
    for gamma in (0, 1, 1e10):
        torch.testing.assert_close(lokr.diff_weight(*weights, gamma=gamma), expected)


def test_lokr_extras():
    w1, w2 = torch.randn(2, 3), torch.randn(4, 5, 3, 3)
    torch.testing.assert_close(lokr.make_kron(w1, w2, 0.5), peer["lokr"].make_kron(w1, w2, 0.5))
    torch.testing.assert_close(lokr.kron_weight(w1, None, None, w2, None, None, scale=2.0), lokr.make_kron(w1, w2, 2.0))
    x = torch.randn(2, 15, 6, 6)
    torch.testing.assert_close(
        lokr.kron_bypass(x, w1, None, None, w2, None, None, None, 2.0, {"padding": "same"}),
        F.conv2d(x, lokr.make_kron(w1, w2, 2.0), padding="same"),
        rtol=1e-4,
        atol=1e-4,
    )


def rotations(blocks, bound=0.0):
    q = blocks - blocks.transpose(-1, -2)
    if bound and q.norm() > bound:
        q = q * bound / q.norm()
    eye = torch.eye(q.shape[-1], dtype=q.dtype)
    return (eye + q) @ torch.linalg.inv(eye - q)


@pytest.mark.parametrize("constraint", [None, 0, 0.4, 1e3])
@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("shape", [(12, 5), (24, 5, 3, 3), (7, 4)])
def test_diag_oft(shape, rescale, constraint):
    weight = torch.randn(shape, dtype=torch.float64)
    made = diag_oft.weight_gen(weight, 4, rescale)
    assert not diag_oft.diff_weight(weight, *made, constraint=constraint).any()
    blocks, scale = filled(made)
    turn = torch.block_diag(*rotations(blocks, constraint or 0).transpose(-1, -2))
    adapted = torch.einsum("po,o...->p...", turn, weight)
    if rescale:
        adapted = adapted * scale
    got = diag_oft.diff_weight(weight, blocks, scale, constraint=constraint)
    torch.testing.assert_close(got, adapted - weight, rtol=1e-6, atol=1e-6)
    x, extra = conv_case(shape)
    base = layer(x, weight, extra)
    y = diag_oft.bypass_forward_diff(x, base, blocks, scale, constraint=constraint, need_transpose=len(shape) > 2)
    torch.testing.assert_close(y, layer(x, got, extra), rtol=1e-6, atol=1e-6)
    single = peer["diag_oft"].diff_weight(
        weight.float(), blocks.float(), None if scale is None else scale.float(), constraint=constraint
    )
    torch.testing.assert_close(got.float(), single, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("constraint", [None, 0.4])
@pytest.mark.parametrize("scale", [1, 0.3, -0.5])
@pytest.mark.parametrize(("shape", "size"), [((16, 5), 4), ((24, 5, 3, 3), 6), ((6, 4), 6)])
def test_boft(shape, size, scale, constraint):
    weight = torch.randn(shape, dtype=torch.float64)
    made = boft.weight_gen(weight, size, rescale=True)
    assert boft.weight_gen(weight, size, 1)[0].shape[0] == 1
    assert boft.weight_gen(weight, size)[1] is None
    assert not boft.diff_weight(weight, *made, constraint=constraint, scale=scale).any()
    blocks, _ = filled(made)
    got = boft.diff_weight(weight, blocks, None, constraint=constraint, scale=scale)
    theirs = peer["boft"].diff_weight(weight.float(), blocks.float(), None, constraint=constraint, scale=scale)
    torch.testing.assert_close(got.float(), theirs, rtol=1e-3, atol=1e-4)
    x, extra = conv_case(shape)
    base = layer(x, weight, extra)
    y = boft.bypass_forward_diff(base, blocks, None, constraint=constraint, need_transpose=len(shape) > 2, scale=scale)
    torch.testing.assert_close(y, layer(x, got, extra), rtol=1e-6, atol=1e-6)


def test_boft_strength_zero_is_the_base():
    weight = torch.randn(16, 5)
    blocks, vector = filled(boft.weight_gen(weight, 4, rescale=True))
    assert not boft.diff_weight(weight, blocks, vector, scale=0).any()


def test_boft_names_legal_blocks():
    with pytest.raises(ShapeError, match="320, 160, 80, 40, 20, 10"):
        boft.weight_gen(torch.zeros(320, 4), 8)
    with pytest.raises(ShapeError, match="odd"):
        boft.weight_gen(torch.zeros(77, 4), 8)


def test_rotations_refuse_what_does_not_fit():
    with pytest.raises(ShapeError, match="12"):
        diag_oft.diff_weight(torch.randn(10, 3), torch.zeros(3, 4, 4), None)
    with pytest.raises(ShapeError, match="num, s, s"):
        diag_oft.diff_weight(torch.randn(12, 3), torch.zeros(1, 3, 4, 4), None)


def test_get_r():
    blocks = torch.randn(3, 6, 6)
    r = diag_oft.get_r(blocks)
    torch.testing.assert_close(r @ r.transpose(1, 2), torch.eye(6).expand(3, 6, 6), rtol=0, atol=1e-5)
    torch.testing.assert_close(r, peer["diag_oft"].get_r(blocks, None, 0), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(
        diag_oft.get_r(blocks.half().float(), torch.eye(6), 0.3),
        rotations(blocks.half().float(), 0.3),
        rtol=0,
        atol=1e-5,
    )


@pytest.mark.parametrize("dimension", [*range(1, 40), 127, 128, 250, 320, 360, 512, 768, 1000, 1024, 1280, 11008])
def test_factorizations(dimension):
    for factor in (-1, 0, 1, 2, 3, 4, 7, 8, 16, 100, 5000):
        assert general.factorization(dimension, factor) == peer["general"].factorization(dimension, factor)
        if factor:
            theirs = peer["general"].power2factorization(dimension, factor)
            assert general.power2factorization(dimension, factor) == theirs


def test_tucker_products():
    t, wa, wb = torch.randn(3, 4, 2, 2), torch.randn(3, 6), torch.randn(4, 5)
    for name, args in [
        ("rebuild_tucker", (t, wa, wb)),
        ("tucker_weight", (wa, wb, t)),
        ("tucker_weight_from_conv", (torch.randn(6, 3, 1, 1), torch.randn(4, 5, 1, 1), t)),
    ]:
        torch.testing.assert_close(getattr(general, name)(*args), getattr(peer["general"], name)(*args))


@pytest.mark.parametrize("on_out", [True, False])
@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 3, 3)])
@pytest.mark.parametrize("multiplier", [1, 0.3, -1.0, 0])
def test_weight_decompose(shape, on_out, multiplier):
    weight = torch.randn(shape, dtype=torch.float64)
    axis = 0 if on_out else 1
    dims = [d for d in range(len(shape)) if d != axis]
    norm = weight.square().sum(dims, keepdim=True).sqrt()
    magnitude = torch.rand_like(norm) + 0.5
    got = general.weight_decompose(weight, magnitude, multiplier, on_out)
    torch.testing.assert_close(got, weight * (multiplier * (magnitude / norm - 1) + 1))
    torch.testing.assert_close(got, peer["general"].weight_decompose(weight, magnitude, multiplier, on_out))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weight_decompose_starts_at_the_base(dtype):
    weight = (torch.randn(50, 40) * 1e-3).to(dtype)
    magnitude = weight.float().norm(dim=1, keepdim=True)
    got = general.weight_decompose(weight, magnitude)
    ulp = torch.finfo(torch.float32).eps
    assert ((got - weight.float()).abs() <= 2 * ulp * weight.float().abs()).all()
    weight[3] = 0
    assert not general.weight_decompose(weight, weight.float().norm(dim=1, keepdim=True))[3].any()


def test_weight_decompose_names_a_wrong_magnitude():
    with pytest.raises(ShapeError, match="output row"):
        general.weight_decompose(torch.randn(6, 5), torch.ones(5))


def test_legacy_dora_and_add_scaled():
    base, delta, magnitude = torch.randn(6, 5), torch.randn(6, 5) * 0.1, torch.rand(1, 5) + 1
    torch.testing.assert_close(
        general.apply_dora_scale(base, delta, magnitude, 0.7),
        peer["general"].apply_dora_scale(base, delta, magnitude, 0.7),
    )
    torch.testing.assert_close(general.add_scaled(base, delta, 0.3), base + 0.3 * delta)
    assert general.add_scaled(base.bfloat16(), delta.bfloat16()).dtype == torch.bfloat16


def test_gradients_reach_every_factor():
    for module in (locon, loha, lokr):
        weights = filled(
            module.weight_gen(torch.zeros(6, 8), 2, **({"decompose_both": True} if module is lokr else {}))
        )
        present = [w.requires_grad_() for w in weights if w is not None]
        x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)

        def call(x, *values, module=module, weights=weights):
            it = iter(values)
            return module.bypass_forward_diff(x, None, *[None if w is None else next(it) for w in weights], gamma=0.5)

        assert torch.autograd.gradcheck(call, (x, *present))


@pytest.mark.parametrize("lead", [(), (0,), (1,), (2, 0), (2, 3, 4)])
@pytest.mark.parametrize("module", [locon, loha, lokr])
def test_any_leading_shape(module, lead):
    weights = filled(module.weight_gen(torch.zeros(6, 8), 2))
    x = torch.randn(*lead, 8, dtype=torch.float64)
    y = module.bypass_forward_diff(x, None, *weights)
    torch.testing.assert_close(y, F.linear(x, module.diff_weight(*weights)))


def test_half_precision_rank_space_does_not_overflow():
    down, up = torch.full((1, 64), 100.0).half(), torch.full((4, 1), 1e-3).half()
    y = locon.bypass_forward_diff(torch.full((2, 64), 60.0).half(), None, down, up, None)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.float(), torch.full((2, 4), 384.0), rtol=1e-2, atol=0)


def call_all(backend):
    x, w = torch.randn(3, 8), torch.randn(6, 8)
    low, hada, kron = (m.weight_gen(w, 2) for m in (locon, loha, lokr))
    oft, fly = diag_oft.weight_gen(w, 2), boft.weight_gen(w, 2 + 4)
    return [
        lambda: locon.diff_weight(*low, backend=backend),
        lambda: locon.bypass_forward_diff(x, None, *low, backend=backend),
        lambda: loha.diff_weight(*hada, backend=backend),
        lambda: loha.bypass_forward_diff(x, None, *hada, backend=backend),
        lambda: lokr.diff_weight(*kron, backend=backend),
        lambda: lokr.bypass_forward_diff(x, None, *kron, backend=backend),
        lambda: diag_oft.diff_weight(w, *oft, backend=backend),
        lambda: diag_oft.bypass_forward_diff(None, x @ w.t(), *oft, backend=backend),
        lambda: boft.diff_weight(w, *fly, backend=backend),
        lambda: boft.bypass_forward_diff(x @ w.t(), *fly, backend=backend),
        lambda: general.add_scaled(w, w, backend=backend),
        lambda: general.weight_decompose(w, torch.ones(6, 1), backend=backend),
    ]


@pytest.mark.parametrize("backend", [None, "auto", "torch"])
def test_backends_that_run(backend):
    for call in call_all(backend):
        assert torch.isfinite(call()).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU backend where there is no GPU")
@pytest.mark.parametrize("backend", ["triton", "tilelang"])
def test_a_backend_that_cannot_run_says_why(backend, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # in Triton's interpreter the kernels run anywhere
    for call in call_all(backend):
        with pytest.raises(BackendError, match=backend):
            call()


def test_unknown_names():
    weights = locon.weight_gen(torch.zeros(6, 8), 2)
    with pytest.raises(OptionError, match="triton"):
        locon.diff_weight(*weights, backend="trition")
    conv = locon.weight_gen(torch.zeros(6, 8, 3), 2)
    with pytest.raises(OptionError, match="padding"):
        locon.bypass_forward_diff(torch.randn(1, 8, 9), None, *conv, extra_args={"paddin": 1})
    with pytest.raises(OptionError, match="stride"):
        locon.bypass_forward_diff(torch.randn(1, 8), None, *weights, extra_args={"stride": 1})


@pytest.mark.parametrize("name", sorted(peer))
def test_names_and_parameters_are_the_peers(name):
    ours = importlib.import_module(f"deltafuse.functional.{name}")
    for attr, theirs in vars(peer[name]).items():
        if attr.startswith("_") or not inspect.isfunction(theirs) or theirs.__module__ != peer[name].__name__:
            continue
        got = inspect.signature(getattr(ours, attr)).parameters
        assert list(got) == list(inspect.signature(theirs).parameters), attr
    assert functional.FUNC_LIST == peer["general"].FUNC_LIST
