"""The product with an epilogue against float64 products of the same inputs."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device or Triton's interpreter", allow_module_level=True)

from deltafuse.backends.triton.kernels import gemm as kernels  # noqa: E402
from deltafuse.backends.triton.kernels.gemm import Config, configs, default_config, gemm  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}
# the interpreter's products of bfloat16 are not products
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
SMALL = Config(32, 32, 32, group_m=2, warps=4, stages=2, tma=False)
SMALL_TMA = Config(64, 64, 32, group_m=2, warps=4, stages=2)


@pytest.fixture(autouse=True)
def _full_precision():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def tma(monkeypatch):
    """The interpreter runs the TMA kernel too, once told that its device has such a unit."""
    if INTERPRETED:
        monkeypatch.setattr(kernels, "device_facts", lambda device: ((9, 0), 2))
    elif torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("needs a device with TMA")


def draw(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(hash((shape, seed)) % 2**31)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def problem(M, N, K, r, dtype, forward, h_dtype=None, up_dtype=torch.float32):
    b = draw(*((N, K) if forward else (K, N)), dtype=dtype, seed=1)
    up = draw(*((N, r) if forward else (r, N)), dtype=up_dtype, seed=2)
    return draw(M, K, dtype=dtype), b, draw(M, r, dtype=h_dtype or dtype, seed=3), up


def expected(a, b, forward, bias=None, gain=None, h=None, up=None, scale=1.0):
    a, b = a.double(), b.double()
    y = a @ (b.T if forward else b)
    if gain is not None:
        y = y * gain.double()
    if h is not None:
        up = up.double()
        y = y + scale * h.double() @ (up.T if forward else up)
    return y if bias is None else y + bias.double()


def check(a, b, forward, config=None, **epilogue):
    y = gemm(a, b, transposed_b=forward, config=config, **epilogue)
    right = expected(a, b, forward, **epilogue)
    assert y.dtype == a.dtype
    assert ((y.double() - right).norm() / right.norm()).item() < TOLERANCE[a.dtype]
    return y


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", list(itertools.product((False, True), repeat=3)))
def test_every_epilogue(parts, dtype, forward):
    M, N, K, r = 45, 50, 70, 5
    a, b, h, up = problem(M, N, K, r, dtype, forward)
    with_bias, with_gain, with_rank = parts
    epilogue = {}
    if with_bias:
        epilogue["bias"] = draw(N, dtype=torch.float16, seed=4)
    if with_gain:
        epilogue["gain"] = draw(N, dtype=torch.float32, seed=5)
    if with_rank:
        epilogue |= {"h": h, "up": up, "scale": 0.5}
    check(a, b, forward, SMALL, **epilogue)


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("r", [1, 16, 40, 100])
@pytest.mark.parametrize("h_dtype", [torch.float32, torch.float16])
def test_ranks(r, h_dtype, forward):
    a, b, h, up = problem(40, 48, 32, r, torch.float16, forward, h_dtype, torch.float16)
    check(a, b, forward, SMALL, h=h, up=up, scale=0.25)


@pytest.mark.parametrize("forward", [True, False])
def test_a_small_delta_survives(forward):
    """The delta alone: where the base product is zero, rank-space digits are all that is left."""
    a, b, h, up = problem(40, 48, 32, 8, torch.float32, forward)
    check(torch.zeros_like(a), b, forward, SMALL, h=h, up=up, scale=1e-3)


@pytest.mark.parametrize("forward", [True, False])
def test_strides(forward):
    M, N, K, r = 33, 40, 36, 5
    _, b, h, up = problem(M, N, K, r, torch.float32, forward)
    wide = draw(M, 2 * K, dtype=torch.float32)
    for a in (wide[:, :K], wide[:, ::2], draw(K, M, dtype=torch.float32).T):
        check(a, b, forward, SMALL, h=h.T.contiguous().T, up=up.T.contiguous().T)
    check(wide[:, :K], b.T.contiguous().T, forward, SMALL)


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("r", [0, 16, 40])
@pytest.mark.parametrize("flatten", [False, True])
def test_tma_kernel(tma, flatten, r, forward):
    M, N, K = 150, 136, 72
    a, b, h, up = problem(M, N, K, max(r, 1), torch.float16, forward)
    epilogue = {"bias": draw(N, dtype=torch.float32, seed=4), "gain": draw(N, dtype=torch.float32, seed=5)}
    if r:
        epilogue |= {"h": h, "up": up, "scale": 0.5}
    config = Config(64, 64, 32, group_m=2, warps=4, stages=2, subtile=r != 40, flatten=flatten)
    check(a, b, forward, config, **epilogue)


def test_tma_kernel_writes_rows_tma_cannot(tma):
    a, b, h, up = problem(70, 41, 64, 5, torch.float16, True)
    check(a, b, True, SMALL_TMA, h=h, up=up)


def test_strides_tma_cannot_take_go_to_the_pointer_kernel(tma):
    a, b, *_ = problem(20, 24, 33, 1, torch.float16, True)
    check(a, b, True, SMALL_TMA)


def test_out_and_empty():
    a, b, h, up = problem(20, 24, 16, 4, torch.float32, True)
    wide = torch.full((20, 30), 7.0, device=DEVICE)
    y = gemm(a, b, transposed_b=True, h=h, up=up, config=SMALL, out=wide[:, :24])
    assert y.data_ptr() == wide.data_ptr()
    assert (wide[:, 24:] == 7).all()
    torch.testing.assert_close(y.double(), expected(a, b, True, h=h, up=up), rtol=1e-4, atol=1e-4)
    assert gemm(a[:0], b, transposed_b=True).shape == (0, 24)
    bias = draw(24, dtype=torch.float32)
    no_sum = gemm(a[:, :0], b[:, :0], transposed_b=True, bias=bias, config=SMALL)
    torch.testing.assert_close(no_sum, bias.expand(20, 24))
    with pytest.raises(ValueError, match="do not multiply"):
        gemm(a, b, transposed_b=False)


def test_defaults_suit_the_problem():
    a, b, h, up = problem(17, 24, 40, 3, torch.float32, False)
    check(a, b, False, h=h, up=up)
    hopper = (torch.bfloat16, (9, 0))
    assert default_config(16384, 4096, 4096, *hopper).block_n == 256
    assert default_config(64, 4096, 4096, *hopper).block_m == 64
    assert not default_config(4096, 4095, 4096, *hopper).tma
    assert not default_config(4096, 4096, 4096, torch.float32, (9, 0)).tma
    assert not any(c.tma for c in configs(4096, 4096, 4096, torch.bfloat16, (8, 0)))
    assert all(c.block_m <= 64 for c in configs(16, 4096, 4096, *hopper))
