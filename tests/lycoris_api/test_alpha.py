"""alpha in every form callers write it, and the scale it gives."""

from __future__ import annotations

import lycoris.modules as modules
import pytest
import torch
from lycoris.modules import get_module, make_module
from torch import nn

from .support import randomise, saved
from .target import ON_PEER, differs

RANK = 6
VALUES = {
    "none": (None, RANK),
    "zero": (0, RANK),
    "int": (4, 4),
    "float": (2.5, 2.5),
    "below-one": (0.25, 0.25),
    "0-d": (torch.tensor(3.0), 3),
    "1-element": (torch.tensor([3.0]), 3),
    "bf16": (torch.tensor(3.0, dtype=torch.bfloat16), 3),
}
CLASSES = ("LoConModule", "LohaModule", "LokrModule", "GLoRAModule", "DyLoraModule", "TLoraModule")


def build(name: str, alpha, **options) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    layer = nn.Linear(39, 62)
    if name == "DyLoraModule":
        options["block_size"] = 2
    return getattr(modules, name)("x", layer, 1.0, RANK, alpha, **options), layer


@pytest.mark.parametrize("value", list(VALUES))
@pytest.mark.parametrize("name", CLASSES)
def test_scale_is_alpha_over_rank(name, value):
    alpha, number = VALUES[value]
    if ON_PEER and value == "1-element":
        pytest.skip("rule 1: lycoris-lora keeps a 1-element alpha as an array")
    module, _ = build(name, alpha)
    assert float(module.scale) == pytest.approx(number / RANK)
    assert float(saved(module)["alpha"]) == pytest.approx(number)


@pytest.mark.parametrize("value", list(VALUES))
@pytest.mark.parametrize("name", ["LoConModule", "LohaModule", "LokrModule", "GLoRAModule"])
def test_delta_is_proportional_to_alpha(name, value):
    alpha, number = VALUES[value]
    if ON_PEER and value == "1-element":
        pytest.skip("rule 1: lycoris-lora keeps a 1-element alpha as an array")
    x = torch.randn(4, 3, 39)
    deltas = []
    for given in (alpha, 2.0):
        module, layer = build(name, given)
        randomise(module)
        deltas.append((module(x) - layer(x)).detach())
    torch.testing.assert_close(deltas[0], deltas[1] * (number / 2.0), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["LoConModule", "LohaModule", "LokrModule"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_alpha_of_a_16_bit_file(name, dtype):
    module, layer = build(name, 4)
    randomise(module)
    file = {f"x.{key}": value.to(dtype) for key, value in saved(module).items()}
    kind, params = get_module(file, "x")
    again = make_module(kind, params, "x", layer)
    assert float(again.scale) == pytest.approx(4 / RANK)


@pytest.mark.parametrize("name", ["LoConModule", "LohaModule", "LokrModule"])
def test_file_without_alpha_has_scale_one(name):
    module, layer = build(name, 4)
    randomise(module)
    file = {f"x.{key}": value for key, value in saved(module).items() if key != "alpha"}

    def scale() -> float:
        kind, params = get_module(file, "x")
        return float(make_module(kind, params, "x", layer).scale)

    def peer() -> None:
        with pytest.raises(TypeError):
            scale()

    def ours() -> None:
        assert scale() == 1.0

    differs(1, peer=peer, ours=ours)
