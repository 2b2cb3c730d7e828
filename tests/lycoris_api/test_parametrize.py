"""``parametrize``: the adapter as a torch parametrization of any weight-like parameter."""

from __future__ import annotations

import lycoris.modules as modules
import pytest
import torch
from torch import nn

from .oracle import merged_weight
from .support import randomise, saved
from .target import agrees

CLASSES = {"locon": "LoConModule", "loha": "LohaModule", "lokr": "LokrModule", "glora": "GLoRAModule"} | {
    "diag-oft": "DiagOFTModule",
    "boft": "ButterflyOFTModule",
}
SCALED_TWICE = ("loha", "lokr")


class Owner(nn.Module):
    """A module whose parameters no layer class owns."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(shape) * 0.3)


@pytest.mark.parametrize("shape", [(24, 24), (24, 10, 3), (24, 10, 3, 2)], ids=["2-D", "3-D", "4-D"])
@pytest.mark.parametrize("algo", list(CLASSES))
@pytest.mark.parametrize("strength", [1.0, 0.3])
def test_parametrized_weight(algo, shape, strength):
    torch.manual_seed(3)
    owner = Owner(shape)
    base = owner.table.detach().clone()
    dim = 6 if "oft" in algo else 2
    module = getattr(modules, CLASSES[algo]).parametrize(owner, "table", strength, dim, 3.0)
    torch.testing.assert_close(owner.table.detach(), base)
    randomise(module.eval())
    fault = 1 if algo in SCALED_TWICE else None
    agrees(lambda: owner.table - base, merged_weight(algo, saved(module), base, strength) - base.double(), fault=fault)
    owner.table.square().sum().backward()
    grads = [parameter.grad for parameter in module.parameters() if parameter.requires_grad]
    assert grads
    assert all(grad is not None and torch.isfinite(grad).all() for grad in grads)


def test_rectangular_matrix():
    """A parameter of shape (out, in) with out != in."""
    owner = Owner((24, 15))
    base = owner.table.detach().clone()

    def shifted() -> torch.Tensor:
        module = modules.LoConModule.parametrize(owner, "table", 1.0, 3, 2.0)
        randomise(module)
        nonlocal tensors
        tensors = saved(module)
        return owner.table - base

    tensors: dict = {}
    result = None
    try:
        result = shifted()
    except RuntimeError:
        result = None
    from .target import ON_PEER

    if ON_PEER:
        assert result is None  # rule 28: lycoris-lora builds its proxy with the two sizes exchanged
        return
    agrees(lambda: result, merged_weight("locon", tensors, base, 1.0) - base.double())


def test_parametrized_layer_forward():
    torch.manual_seed(4)
    layer = nn.Conv2d(10, 24, 3, padding=1)
    x = torch.randn(2, 10, 6, 5)
    base = layer(x).detach()
    module = modules.LoConModule.parametrize(layer, "weight", 1.0, 3, 2.0)
    randomise(module)
    delta = merged_weight("locon", saved(module), torch.zeros(24, 10, 3, 3), 1.0)
    agrees(lambda: layer(x) - base, nn.functional.conv2d(x.double(), delta, padding=1))


def test_full_cannot_be_a_parametrization():
    with pytest.raises(Exception, match=r"(?i)full"):
        modules.FullModule.parametrize(nn.Linear(15, 24), "weight")
