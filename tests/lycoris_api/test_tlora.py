"""T-LoRA: the timestep mask, its groups, the choice of singular vectors and the orthogonality loss."""

from __future__ import annotations

import lycoris
import pytest
import torch
from lycoris import TLoraModule, clear_timestep_mask, compute_timestep_mask, get_timestep_mask, set_timestep_mask
from torch import nn

from .support import randomise
from .target import relative_error

RANK = 5


@pytest.fixture(autouse=True)
def _no_mask_left():
    yield
    for group in (0, 1, 7):
        clear_timestep_mask(group)


@pytest.mark.parametrize(
    ("timestep", "ranks", "options"),
    [
        (0, 16, {}),
        (1000, 1, {}),
        (500, 8, {}),
        (250, 12, {}),
        (999, 1, {}),
        (1000, 4, {"min_rank": 4}),
        (500, 10, {"min_rank": 4}),
        (500, 4, {"alpha": 2.0}),
        (500, 11, {"alpha": 0.5}),
    ],
)
def test_compute_timestep_mask(timestep, ranks, options):
    mask = compute_timestep_mask(timestep, 1000, 16, **options)
    assert mask.shape == (1, 16)
    assert mask.dtype == torch.float32
    assert torch.equal(mask[0, :ranks], torch.ones(ranks))
    assert not mask[0, ranks:].any()


def test_mask_shrinks_with_noise():
    sums = [float(compute_timestep_mask(t, 1000, 16, 2).sum()) for t in range(0, 1001, 50)]
    assert sums == sorted(sums, reverse=True)
    assert (sums[0], sums[-1]) == (16, 2)


def test_mask_storage():
    assert get_timestep_mask() is None
    first, second = torch.ones(1, 4), torch.zeros(1, 4)
    set_timestep_mask(first)
    set_timestep_mask(second, 7)
    assert torch.equal(get_timestep_mask(), first)
    assert torch.equal(get_timestep_mask(7), second)
    clear_timestep_mask()
    assert get_timestep_mask() is None
    assert get_timestep_mask(7) is not None
    clear_timestep_mask(7)
    clear_timestep_mask(7)
    assert get_timestep_mask(7) is None


def build(bypass: bool = False, group: int = 0, layer: nn.Module | None = None, **options):
    torch.manual_seed(2)
    layer = layer or nn.Linear(15, 24)
    module = TLoraModule("x", layer, 1.0, RANK, 3.0, bypass_mode=bypass, mask_group_id=group, **options)
    start = {key: value.detach().clone() for key, value in module.state_dict().items()}
    return randomise(module.eval()), layer, start


def masked_delta(module, start, mask: torch.Tensor) -> torch.Tensor:
    def product(tensors) -> torch.Tensor:
        p, q = tensors["p_layer.weight"].flatten(1), tensors["q_layer.weight"].flatten(1)
        return (p * (tensors["lambda_layer"] * mask)) @ q

    return 3.0 / RANK * (product(module.state_dict()) - product(start))


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("ranks", [1, 3, RANK])
def test_mask_acts_on_the_rank(bypass, ranks):
    module, layer, start = build(bypass)
    mask = compute_timestep_mask(0, 1000, RANK)
    mask[:, ranks:] = 0
    set_timestep_mask(mask)
    x = torch.randn(3, 4, 15)
    expected = x @ masked_delta(module, start, mask).T
    assert relative_error(module(x) - layer(x), expected) < 2e-5
    assert relative_error(module.get_diff_weight(1.0)[0], masked_delta(module, start, mask)) < 2e-5


def test_mask_of_another_group_is_ignored():
    module, layer, _ = build(group=1)
    x = torch.randn(3, 4, 15)
    free = module(x)
    set_timestep_mask(torch.zeros(1, RANK), 0)
    torch.testing.assert_close(module(x), free)
    set_timestep_mask(torch.zeros(1, RANK), 1)
    torch.testing.assert_close(module(x), layer(x), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("width", [3, 9])
def test_mask_of_another_width(width):
    """A wider mask is cut to the rank, a narrower one leaves the further ranks on."""
    module, layer, start = build()
    mask = torch.zeros(1, width)
    mask[:, :2] = 1
    set_timestep_mask(mask)
    full = torch.ones(1, RANK)
    full[:, : min(width, RANK)] = mask[:, :RANK]
    x = torch.randn(3, 4, 15)
    assert relative_error(module(x) - layer(x), x @ masked_delta(module, start, full).T) < 2e-5


@pytest.mark.parametrize("sig_type", ["principal", "last", "middle"])
def test_start_is_taken_from_the_svd(sig_type):
    torch.manual_seed(2)
    layer = nn.Linear(15, 24)
    module = TLoraModule("x", layer, 1.0, RANK, 3.0, sig_type=sig_type)
    values = torch.linalg.svdvals(layer.weight.detach())
    first = {"principal": 0, "last": 15 - RANK, "middle": (15 - RANK) // 2}[sig_type]
    torch.testing.assert_close(module.lambda_layer.detach().flatten(), values[first : first + RANK])
    q, p = module.q_layer.weight.detach(), module.p_layer.weight.detach()
    torch.testing.assert_close(q @ q.T, torch.eye(RANK), atol=1e-5, rtol=0)
    torch.testing.assert_close(p.T @ p, torch.eye(RANK), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        p.T @ layer.weight.detach() @ q.T, torch.diag(values[first : first + RANK]), atol=1e-5, rtol=0
    )


def test_random_start_does_not_read_the_weight():
    layer = nn.Linear(15, 24)
    torch.manual_seed(9)
    first = TLoraModule("x", layer, 1.0, RANK, 3.0, use_data_init=False)
    torch.manual_seed(9)
    with torch.no_grad():
        layer.weight.mul_(5.0)
    second = TLoraModule("x", layer, 1.0, RANK, 3.0, use_data_init=False)
    assert torch.equal(first.q_layer.weight, second.q_layer.weight)


def test_unknown_sig_type():
    with pytest.raises(Exception, match="first"):
        TLoraModule("x", nn.Linear(15, 24), 1.0, RANK, 3.0, sig_type="first")


def test_orthogonality_regularization():
    module, _, _ = build()
    p_loss, q_loss = module.orthogonality_regularization()
    p, q, eye = module.p_layer.weight, module.q_layer.weight, torch.eye(RANK)
    torch.testing.assert_close(p_loss, ((p.T @ p - eye) ** 2).sum())
    torch.testing.assert_close(q_loss, ((q @ q.T - eye) ** 2).sum())
    (p_loss + q_loss).backward()
    assert module.p_layer.weight.grad.abs().sum() > 0
    fresh = TLoraModule("x", nn.Linear(15, 24), 1.0, RANK, 3.0)
    assert max(float(value.detach()) for value in fresh.orthogonality_regularization()) < 1e-8


def test_module_names():
    assert TLoraModule.name == "tlora"
    assert lycoris.modules.TLoraModule is TLoraModule
    assert TLoraModule.weight_list_det == ["lambda_layer"]
