"""Every module class over every layer kind: all views of one adapter agree with the fp64 reference."""

from __future__ import annotations

import lycoris.modules
import pytest
import torch
from lycoris.modules import get_module, make_module

from .cases import CLASS_NAMES, all_cases, peer_fault
from .oracle import merged_weight
from .support import LAYERS, STRENGTHS, Case, delta_of, functional_op, randomise, saved
from .target import agrees

CASES = all_cases()
NAME = "lycoris_block_0_proj"
METHOD_LAYERS = ("linear", "linear-nobias", "conv1d", "conv2d-nobias", "conv2d-1x1")


class Adapter:
    """An adapter with random values on a fresh layer, and the reference for both."""

    def __init__(self, case: Case, **more) -> None:
        self.case = case
        self.layer = LAYERS[case.layer].build()
        self.x = LAYERS[case.layer].input()
        torch.manual_seed(7)
        self.module = getattr(lycoris.modules, CLASS_NAMES[case.algo])(NAME, self.layer, 1.0, **case.options, **more)
        self.start = saved(self.module)
        randomise(self.module).eval()
        self.tensors = saved(self.module)
        self.base = self.layer.weight.detach().clone()

    def weight(self, strength: float) -> torch.Tensor:
        return merged_weight(self.case.algo, self.tensors, self.base, strength, self.start)

    def weight_delta(self, strength: float) -> torch.Tensor:
        return self.weight(strength) - self.base.double()

    def bias_delta(self, strength: float) -> torch.Tensor | None:
        return strength * self.tensors["diff_b"].double() if "diff_b" in self.tensors else None

    def output_delta(self, strength: float) -> torch.Tensor:
        return functional_op(self.layer, self.x.double(), self.weight_delta(strength), self.bias_delta(strength))

    def merged(self, strength: float) -> torch.Tensor:
        return self.module.get_merged_weight(strength, self.base.shape, self.base.device)[0]

    def strengths(self) -> tuple[float, ...]:
        return (1.0,) if self.case.options.get("rescaled") else STRENGTHS


def ids(case: Case) -> str:
    return case.id


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_forward(case: Case):
    adapter = Adapter(case)
    for strength in adapter.strengths():
        adapter.module.multiplier = strength
        agrees(
            lambda: delta_of(adapter.module, adapter.layer, adapter.x),
            adapter.output_delta(strength),
            fault=peer_fault(case, "forward", strength),
        )


@pytest.mark.parametrize("case", [case for case in CASES if case.algo != "full"], ids=ids)
def test_bypass(case: Case):
    adapter = Adapter(case, bypass_mode=True)
    for strength in adapter.strengths():
        adapter.module.multiplier = strength
        agrees(
            lambda: delta_of(adapter.module, adapter.layer, adapter.x),
            adapter.output_delta(strength),
            fault=peer_fault(case, "bypass", strength),
        )


PLAIN = [
    case
    for case in CASES
    if case.algo != "full" and not case.options.get("weight_decompose") and not case.options.get("rs_lora")
]


@pytest.mark.parametrize("case", [case for case in PLAIN if case.layer in METHOD_LAYERS], ids=ids)
def test_bypass_methods(case: Case):
    """bypass_forward_diff gives the delta's output alone, bypass_forward the adapted output."""
    adapter = Adapter(case)
    for strength in adapter.strengths():
        fault = peer_fault(case, "bypass", strength)
        expected = adapter.output_delta(strength)
        whole = adapter.layer(adapter.x) + expected
        agrees(lambda m=strength: adapter.module.bypass_forward(adapter.x, m), whole, fault=fault)
        if case.algo in ("glora", "ia3") and "nobias" not in case.layer:
            fault = 17  # the base bias enters its delta
        agrees(lambda m=strength: adapter.module.bypass_forward_diff(adapter.x, m), expected, fault=fault)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_merged_weight(case: Case):
    adapter = Adapter(case)
    for strength in adapter.strengths():
        agrees(
            lambda m=strength: adapter.merged(m) - adapter.base,
            adapter.weight_delta(strength),
            fault=peer_fault(case, "merged", strength),
        )


@pytest.mark.parametrize("case", [case for case in CASES if not case.options.get("weight_decompose")], ids=ids)
def test_diff_weight(case: Case):
    adapter = Adapter(case)
    for strength in adapter.strengths():
        agrees(
            lambda m=strength: adapter.module.get_diff_weight(m, adapter.base.shape, adapter.base.device)[0],
            adapter.weight_delta(strength),
            fault=peer_fault(case, "diff", strength),
        )


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_merge_to(case: Case):
    for strength in Adapter(case).strengths():
        check_merge(Adapter(case), strength, peer_fault(case, "merge", strength))


def check_merge(adapter: Adapter, strength: float, fault: int | None) -> None:
    base_output = adapter.layer(adapter.x)
    adapter.module.merge_to(strength)
    agrees(lambda: adapter.layer.weight - adapter.base, adapter.weight_delta(strength), fault=fault)
    agrees(lambda: adapter.layer(adapter.x) - base_output, adapter.output_delta(strength), fault=fault)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_reload_from_state_dict(case: Case):
    adapter = Adapter(case)
    file = {f"{NAME}.{key}": value for key, value in adapter.tensors.items()}
    layer = LAYERS[case.layer].build()

    def rebuilt() -> torch.Tensor:
        kind, params = get_module(file, NAME)
        module = make_module(kind, params, NAME, layer).eval()
        return delta_of(module, layer, adapter.x)

    agrees(rebuilt, adapter.output_delta(1.0), fault=peer_fault(case, "reload", 1.0))


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_fresh_adapter_leaves_the_layer_alone(case: Case):
    """At its start every adapter is the identity, so training begins from the model itself."""
    layer, x = LAYERS[case.layer].build(), LAYERS[case.layer].input()
    module = getattr(lycoris.modules, CLASS_NAMES[case.algo])(NAME, layer, 0.7, **case.options).eval()
    torch.testing.assert_close(module(x), layer(x), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("case", [case for case in CASES if case.layer in ("linear", "conv2d")], ids=ids)
def test_every_parameter_learns(case: Case):
    """One backward from random values leaves a finite, non-zero gradient on every trainable tensor."""
    adapter = Adapter(case)
    adapter.module.train()
    dead = []
    for _ in range(24 if case.algo == "dylora" else 1):
        adapter.module(adapter.x).square().sum().backward()
    for name, parameter in adapter.module.named_parameters():
        if parameter.grad is None or not torch.isfinite(parameter.grad).all() or not parameter.grad.abs().sum() > 0:
            dead.append(name)
    assert not dead, f"no gradient for {dead} (semantics.md rule 24)"
    assert all(parameter.grad is None for parameter in adapter.layer.parameters())


@pytest.mark.parametrize("algo", ["diag-oft", "boft"])
@pytest.mark.parametrize("strength", [0.0, 0.5])
def test_rescale_fades_with_strength(algo, strength):
    """Strength 0 is the base itself, rescale included (semantics.md rule 5); between, forward = merged."""
    adapter = Adapter(Case(algo, "linear-nobias", {"lora_dim": 6, "rescaled": True}))
    adapter.module.multiplier = strength
    if strength == 0:
        fault = 5
        agrees(lambda: adapter.module(adapter.x), adapter.layer(adapter.x), tol=1e-7, fault=fault)
        return
    merged = adapter.module.get_merged_weight(strength)[0]
    agrees(lambda: adapter.module(adapter.x), functional_op(adapter.layer, adapter.x, merged))
