"""One module on one layer: hooks, stacking, reversible merges, norms, dropout, PEFT-wrapped and quantized layers."""

from __future__ import annotations

import lycoris.modules as modules
import pytest
import torch
from torch import nn

from .oracle import merged_weight
from .support import STRENGTHS, delta_of, functional_op, randomise, saved
from .target import ON_PEER, agrees, differs, relative_error

ADDITIVE = ("LoConModule", "LohaModule", "LokrModule", "GLoRAModule")
ALGO = {"LoConModule": "locon", "LohaModule": "loha", "LokrModule": "lokr", "GLoRAModule": "glora"} | {
    "DiagOFTModule": "diag-oft",
    "ButterflyOFTModule": "boft",
    "IA3Module": "ia3",
}


def linear() -> tuple[nn.Linear, torch.Tensor]:
    torch.manual_seed(1)
    return nn.Linear(40, 24).requires_grad_(False), torch.randn(3, 5, 40)


def adapter(name: str, layer: nn.Module, strength: float = 1.0, seed: int = 3, dim: int = 2, **options) -> nn.Module:
    dim = 6 if "OFT" in name else dim
    torch.manual_seed(seed)
    return randomise(getattr(modules, name)("x", layer, strength, dim, 3.0, **options), seed).eval()


# -------------------------------------------------------------------------------------------------------------- hooks
@pytest.mark.parametrize("name", list(ALGO))
def test_apply_and_restore(name):
    layer, x = linear()
    base = layer(x)
    module = adapter(name, layer, 0.3)
    expected = module(x)
    module.apply_to()
    torch.testing.assert_close(layer(x), expected)
    assert relative_error(layer(x), base) > 1e-3
    module.restore()
    assert torch.equal(layer(x), base)
    module.restore()
    assert torch.equal(layer(x), base)


def test_full_apply_and_restore():
    layer, x = linear()
    base, weight = layer(x), layer.weight.detach().clone()
    module = randomise(modules.FullModule("x", layer, 1.0)).eval()
    expected = module(x)
    module.apply_to()
    torch.testing.assert_close(layer(x), expected, atol=1e-6, rtol=1e-5)
    module.restore()
    assert torch.equal(layer(x), base)
    assert torch.equal(layer.weight, weight)


@pytest.mark.parametrize("leaving", [0, 1, 2])
def test_three_on_one_layer(leaving):
    layer, x = linear()
    base = layer(x)
    stack = [adapter(name, layer, 0.5 + index, index) for index, name in enumerate(ADDITIVE[:3])]
    deltas = [(module(x) - base).detach() for module in stack]
    for module in stack:
        module.apply_to()
    assert relative_error(layer(x) - base, sum(deltas)) < 1e-5
    stack.pop(leaving).restore()
    deltas.pop(leaving)
    assert relative_error(layer(x) - base, sum(deltas)) < 1e-5
    for module in stack:
        module.restore()
    assert torch.equal(layer(x), base)


def test_a_hooked_layer_follows_its_weight():
    """A base weight changed after apply_to is what the next forward uses (rule 12)."""
    layer, x = linear()
    module = adapter("LoConModule", layer)
    delta = (module(x) - layer(x)).detach()
    module.apply_to()
    with torch.no_grad():
        layer.weight.mul_(1.5)
    expected = nn.functional.linear(x, layer.weight, layer.bias) + delta
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------------------------------------------------ merging
@pytest.mark.parametrize("name", ["LoConModule", "GLoRAModule", "DiagOFTModule", "ButterflyOFTModule"])
def test_onfly_merge(name):
    layer, x = linear()
    base, weight = layer(x), layer.weight.detach().clone()
    module = adapter(name, layer)
    expected = module(x)
    module.onfly_merge()
    torch.testing.assert_close(layer(x), expected.detach(), atol=1e-5, rtol=1e-5)
    module.onfly_restore()

    def ours() -> None:
        assert torch.equal(layer.weight, weight)
        assert torch.equal(layer(x), base)

    differs(7, peer=lambda: None, ours=ours)


@pytest.mark.parametrize("strength", [0.3, -1.0])
def test_precise_merge(strength):
    layer, _ = linear()
    weight = layer.weight.detach().clone()
    module = adapter("LoConModule", layer)
    expected = merged_weight("locon", saved(module), weight, strength)
    module.merge_to(strength, precise=True)
    agrees(lambda: layer.weight - weight, expected - weight.double())
    module.merge_to(-strength, precise=True)
    assert torch.equal(layer.weight, weight)
    assert next(module.parameters()).dtype == torch.float32


def test_precise_merge_of_dora():
    """The precise merge is the merge, DoRA included (rule 14)."""
    layer, _ = linear()
    weight = layer.weight.detach().clone()
    module = adapter("LoConModule", layer, weight_decompose=True)
    expected = merged_weight("locon", saved(module), weight, 1.0) - weight.double()
    module.merge_to(1.0, precise=True)
    agrees(lambda: layer.weight - weight, expected, fault=14)


def test_merge_into_bf16_rounds_once():
    """W and the delta meet in fp32 and are rounded once (rule 7)."""
    layer, _ = linear()
    layer = layer.to(torch.bfloat16)
    weight = layer.weight.detach().clone()
    module = adapter("LoConModule", layer)
    exact = merged_weight("locon", saved(module), weight, 0.3)
    module.merge_to(0.3)
    rounded = exact.to(torch.bfloat16)

    def peer() -> None:
        assert relative_error(layer.weight, exact) < 1e-2

    def ours() -> None:
        off = (layer.weight != rounded).float().mean()
        assert off < 0.005, f"{float(off):.1%} of the weights are not the nearest bf16 number"

    differs(7, peer=peer, ours=ours)


def test_merge_bakes_the_bias_of_full():
    layer, _ = linear()
    module = randomise(modules.FullModule("x", layer, 1.0)).eval()
    tensors = saved(module)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    module.merge_to(0.3)
    agrees(lambda: layer.weight - weight, 0.3 * tensors["diff"])
    agrees(lambda: layer.bias - bias, 0.3 * tensors["diff_b"])


def test_glora_file_with_a_tucker_core():
    """A file that holds ``bm`` loads and acts (rule 40)."""
    torch.manual_seed(1)
    layer, x = nn.Conv2d(10, 24, 3, padding=1).requires_grad_(False), torch.randn(2, 10, 6, 5)
    shapes = {"a1": (10, 3, 1, 1), "a2": (3, 10, 1, 1), "b1": (24, 3, 1, 1), "b2": (3, 10, 1, 1), "bm": (3, 3, 3, 3)}
    tensors = {f"{key}.weight": torch.randn(shape) * 0.3 for key, shape in shapes.items()} | {
        "alpha": torch.tensor(2.0)
    }
    expected = merged_weight("glora", tensors, layer.weight, 1.0) - layer.weight.double()

    def delta() -> torch.Tensor:
        kind, params = modules.get_module({f"x.{key}": value for key, value in tensors.items()}, "x")
        return delta_of(modules.make_module(kind, params, "x", layer).eval(), layer, x)

    agrees(delta, functional_op(layer, x.double(), expected), fault=40)


# --------------------------------------------------------------------------------------------------------------- norms
NORMS = {
    "layernorm": (lambda: nn.LayerNorm(13), (4, 3, 13)),
    "groupnorm": (lambda: nn.GroupNorm(3, 12), (2, 12, 5, 4)),
}


def norm_layer(kind: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    make, shape = NORMS[kind]
    layer = randomise(make()).requires_grad_(False)
    return layer, torch.randn(shape) + 0.3


@pytest.mark.parametrize("kind", list(NORMS))
@pytest.mark.parametrize("strength", STRENGTHS)
def test_norm_module(kind, strength):
    layer, x = norm_layer(kind)
    module = randomise(modules.NormModule("x", layer, strength), 9)
    tensors = saved(module)
    twin, _ = norm_layer(kind)
    with torch.no_grad():
        twin.weight.add_(strength * tensors["w_norm"])
        twin.bias.add_(strength * tensors["b_norm"])
    agrees(lambda: module(x) - layer(x), twin(x) - layer(x))
    weight, bias = module.get_merged_weight(strength)
    torch.testing.assert_close(weight.detach(), twin.weight)
    torch.testing.assert_close(bias.detach(), twin.bias)
    diff_weight, diff_bias = module.get_diff_weight(strength)
    torch.testing.assert_close(diff_weight.detach(), strength * tensors["w_norm"])
    torch.testing.assert_close(diff_bias.detach(), strength * tensors["b_norm"])
    module.merge_to(strength)
    torch.testing.assert_close(layer(x), twin(x), atol=1e-5, rtol=1e-5)


ODD_NORMS = {
    "layernorm-2d": (lambda: nn.LayerNorm((5, 13)), (4, 5, 13)),
    "layernorm-nobias": (lambda: nn.LayerNorm(13, bias=False), (4, 3, 13)),
    "rmsnorm": (lambda: nn.RMSNorm(13), (4, 3, 13)),
}


@pytest.mark.parametrize("kind", list(ODD_NORMS))
def test_norms_with_less_or_more_than_a_vector(kind):
    """Train what exists (rule 31)."""
    make, shape = ODD_NORMS[kind]
    layer, x = randomise(make()).requires_grad_(False), torch.randn(shape)

    def output() -> torch.Tensor:
        module = randomise(modules.NormModule("x", layer, 0.3), 9)
        twin = make()
        twin.load_state_dict(layer.state_dict())
        with torch.no_grad():
            twin.weight.add_(0.3 * saved(module)["w_norm"].reshape(twin.weight.shape))
            if getattr(twin, "bias", None) is not None:
                twin.bias.add_(0.3 * saved(module)["b_norm"].reshape(twin.bias.shape))
        nonlocal expected
        expected = twin(x) - layer(x)
        return module(x) - layer(x)

    expected = torch.zeros(())
    if ON_PEER:
        try:
            error = relative_error(output(), expected)
        except (RuntimeError, AttributeError, TypeError, KeyError):
            return
        assert error > 1e-3
        return
    assert relative_error(output(), expected) < 1e-5


# ------------------------------------------------------------------------------------------------------------- dropout
@pytest.mark.parametrize("name", [*ALGO, "NormModule", "FullModule"])
def test_module_dropout_of_one_runs_the_base(name):
    if name == "NormModule":
        layer, x = norm_layer("layernorm")
        module = randomise(modules.NormModule("x", layer, 1.0, 0.0, 1.0), 9)
    elif name == "FullModule":
        layer, x = linear()
        module = randomise(modules.FullModule("x", layer, 1.0, module_dropout=1.0))
    else:
        layer, x = linear()
        module = adapter(name, layer, module_dropout=1.0)
    module.train()
    assert torch.equal(module(x), layer(x))
    module.eval()
    assert relative_error(module(x), layer(x)) > 1e-4


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("name", ["LoConModule", "LohaModule", "LokrModule"])
def test_rank_dropout_acts_in_training_only(name, bypass):
    layer, x = linear()
    module = adapter(name, layer, rank_dropout=0.5, bypass_mode=bypass)
    plain = adapter(name, layer, bypass_mode=bypass)
    assert torch.equal(module(x), plain(x))
    module.train()
    outputs = [module(x).detach() for _ in range(6)]
    acts = any(relative_error(output, outputs[0]) > 1e-3 for output in outputs[1:])
    silent_on_peer = name == "LokrModule" and bypass

    def peer() -> None:
        assert acts is not silent_on_peer

    def ours() -> None:
        assert acts

    differs(22, peer=peer, ours=ours)


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("name", ["LoConModule", "LohaModule", "LokrModule", "GLoRAModule"])
def test_dropout_acts_in_every_form(name, bypass):
    """lycoris-lora drops the delta's output in bypass mode only (rule 22)."""
    layer, x = linear()
    module = adapter(name, layer, dropout=0.5, bypass_mode=bypass).train()
    outputs = [module(x).detach() for _ in range(3)]
    acts = relative_error(outputs[1], outputs[0]) > 1e-3

    def peer() -> None:
        assert acts is bypass

    def ours() -> None:
        assert acts

    differs(22, peer=peer, ours=ours)


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("name", ["LoConModule", "LohaModule"])
def test_rank_dropout_scale_keeps_the_mean(name, bypass):
    """With the scale the mean over masks is the undropped delta, without it 1 - p of it (rules 22 and 45)."""
    layer, _ = linear()
    x = torch.randn(2, 40)
    options = {"dim": 9, "bypass_mode": bypass}  # a rank at which no draw drops everything
    undropped = delta_of(adapter(name, layer, **options), layer, x)
    for scaled, factor in ((True, 1.0), (False, 0.75)):
        module = adapter(name, layer, rank_dropout=0.25, rank_dropout_scale=scaled, **options).train()
        with torch.no_grad():
            mean = torch.stack([module(x) - layer(x) for _ in range(700)])
        mean = mean[torch.isfinite(mean).flatten(1).all(1)].mean(0)
        ratio = float((mean * undropped).sum() / (undropped * undropped).sum())

        def ours(ratio: float = ratio, factor: float = factor) -> None:
            assert ratio == pytest.approx(factor, abs=0.06)

        differs(22, peer=lambda: None, ours=ours)


# ------------------------------------------------------------------------------------------------ wrapped and quantized
def test_peft_layer_is_unwrapped():
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(15, 24))
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0"]))
    layer = wrapped.base_model.model[0]
    module = adapter("LoConModule", layer)
    assert module.org_module == [layer.base_layer]
    assert tuple(module.shape) == (24, 15)


class Fp8Linear(nn.Module):
    """The weight-only fp8 layer that is known by its name and its fields."""

    def __init__(self, out_features: int, in_features: int, per_row: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        full = torch.randn(out_features, in_features) * 0.3
        scale = full.abs().amax(1 if per_row else None) / 448.0
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        shaped = scale[:, None] if per_row else scale
        self.weight = nn.Parameter((full / shaped).to(torch.float8_e4m3fn), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(out_features), requires_grad=False)

    def dense(self) -> torch.Tensor:
        scale = self.weight_scale[:, None] if self.weight_scale.dim() == 1 else self.weight_scale
        return self.weight.float() * scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.dense(), self.bias)


@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("name", ["LoConModule", "LohaModule", "LokrModule"])
def test_fp8_linear_runs_in_bypass(name, per_row):
    torch.manual_seed(1)
    layer, x = Fp8Linear(24, 40, per_row), torch.randn(3, 4, 40)
    module = adapter(name, layer)
    assert module.is_quant
    for strength in STRENGTHS:
        module.multiplier = strength
        expected = merged_weight(ALGO[name], saved(module), layer.dense(), strength) - layer.dense().double()
        agrees(lambda: delta_of(module, layer, x), x.double() @ expected.T)


def test_fp8_linear_is_not_merged_silently():
    torch.manual_seed(1)
    layer = Fp8Linear(24, 40)
    before = layer.weight.clone()
    module = adapter("LoConModule", layer)
    with pytest.raises(Exception, match=r"(?i)fp8|float8|8-bit|8 bit"):
        module.merge_to(1.0)
    assert torch.equal(layer.weight.float(), before.float())


def test_fp8_network_is_not_mergeable():
    torch.manual_seed(1)
    from lycoris import LycorisNetwork

    LycorisNetwork.apply_preset({"target_module": ["Fp8Linear", "Linear"], "enable_conv": True})
    model = nn.Sequential(Fp8Linear(24, 40), nn.Linear(24, 7))
    net = LycorisNetwork(model, lora_dim=3, alpha=2.0)
    LycorisNetwork.apply_preset({"target_module": ["Linear", "Conv1d", "Conv2d", "Conv3d", "GroupNorm", "LayerNorm"]})
    assert len(net.loras) == 2
    assert not net.is_mergeable()
    weight = model[1].weight.detach().clone()
    with pytest.raises(Exception, match=r"(?i)fp8|float8|8-bit|8 bit"):
        net.merge_to(1.0)
    assert torch.equal(model[1].weight, weight)


class NoisyLinear(nn.Linear):
    """A subclass whose own forward does more than the product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1.0


def test_linear_subclass_keeps_its_own_forward():
    torch.manual_seed(1)
    layer, x = NoisyLinear(40, 24), torch.randn(3, 40)
    module = adapter("LoConModule", layer)
    expected = merged_weight("locon", saved(module), layer.weight, 1.0) - layer.weight.double()
    agrees(lambda: delta_of(module, layer, x), functional_op(layer, x.double(), expected))
