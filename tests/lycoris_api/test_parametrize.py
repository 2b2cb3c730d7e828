"""``parametrize``: the adapter as a torch parametrization of any weight-like parameter."""

from __future__ import annotations

import lycoris.modules as modules
import pytest
import torch
from torch import nn

from .oracle import merged_weight
from .support import randomise, saved
from .target import ON_PEER, relative_error

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


def parametrized_error(algo: str, shape: tuple[int, ...], strength: float) -> float:
    """Distance of the parametrized tensor's delta from the reference."""
    torch.manual_seed(3)
    owner = Owner(shape)
    base = owner.table.detach().clone()
    module = getattr(modules, CLASSES[algo]).parametrize(owner, "table", strength, 6 if "oft" in algo else 2, 3.0)
    torch.testing.assert_close(owner.table.detach(), base)
    randomise(module.eval())
    expected = merged_weight(algo, saved(module), base, strength) - base.double()
    owner.table.square().sum().backward()
    grads = [parameter.grad for parameter in module.parameters() if parameter.requires_grad]
    assert grads
    assert all(grad is not None and torch.isfinite(grad).all() for grad in grads)
    return relative_error(owner.table - base, expected)


SHAPES = {"square": (24, 24), "matrix": (24, 15), "3-D": (24, 10, 3), "4-D": (24, 10, 3, 2), "5-D": (24, 6, 1, 2, 3)}


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("algo", list(CLASSES))
@pytest.mark.parametrize("strength", [1.0, 0.3])
def test_parametrized_weight(algo, shape, strength):
    """The tensor that torch hands out is W'. lycoris-lora exchanges the two sizes of anything not square (rule 28)."""
    if not ON_PEER:
        assert parametrized_error(algo, SHAPES[shape], strength) < 2e-5
    elif shape == "square":
        error = parametrized_error(algo, SHAPES[shape], strength)
        assert (error > 1e-3) if algo in SCALED_TWICE else (error < 2e-5), "semantics.md rule 1"
    else:
        with pytest.raises((AssertionError, RuntimeError, ValueError, TypeError)):
            assert parametrized_error(algo, SHAPES[shape], strength) < 2e-5


def test_parametrized_layer_forward():
    torch.manual_seed(4)
    layer = nn.Linear(24, 24)
    x = torch.randn(2, 6, 24)
    base = layer(x).detach()
    module = modules.LoConModule.parametrize(layer, "weight", 1.0, 3, 2.0)
    randomise(module)
    delta = merged_weight("locon", saved(module), torch.zeros(24, 24), 1.0)
    assert relative_error(layer(x) - base, x.double() @ delta.T) < 2e-5


def test_full_as_a_parametrization():
    """lycoris-lora refuses it; here the parameter is the sum of both."""
    layer = nn.Linear(15, 24)
    base = layer.weight.detach().clone()
    if ON_PEER:
        with pytest.raises(RuntimeError, match=r"(?i)full"):
            modules.FullModule.parametrize(layer, "weight")
        return
    module = randomise(modules.FullModule.parametrize(layer, "weight", 0.3))
    assert relative_error(layer.weight - base, 0.3 * saved(module)["diff"]) < 2e-5
