"""Key names and shapes of every state_dict, the prefix rule, and saved alpha."""

from __future__ import annotations

import lycoris.modules
import pytest
import torch
from lycoris.functional import factorization, power2factorization
from lycoris.modules import MODULE_LIST, LycorisBaseModule, get_module
from torch import nn

from .cases import CLASS_NAMES, all_cases, both_factors_full
from .support import LAYERS, Case, randomise, saved
from .target import ON_PEER, differs

Shapes = dict[str, tuple[int, ...]]
NAMED = ["LoCon", "Loha", "IA3", "Lokr", "Full", "Norm", "DiagOFT", "ButterflyOFT", "GLoRA", "DyLora", "TLora"]


def expected_shapes(case: Case, weight: torch.Tensor, bias: torch.Tensor | None) -> Shapes:
    options, (out, inner, *kernel) = case.options, weight.shape
    rank, ones = options["lora_dim"], [1] * len(weight.shape[2:])
    tucker = bool(options.get("use_tucker"))
    shapes = _FORMS[case.algo](out, inner, kernel, ones, rank, tucker, options)
    if case.algo == "full" and bias is not None:
        shapes["diff_b"] = tuple(bias.shape)
    if options.get("weight_decompose"):
        shapes["dora_scale"] = (1, inner, *ones) if options.get("wd_on_out") is False else (out, 1, *ones)
    if options.get("rescaled"):
        shapes["rescale"] = (out, 1, *ones)
    return shapes


def _locon(out, inner, kernel, ones, rank, tucker, options) -> Shapes:
    shapes = {"lora_up.weight": (out, rank, *ones), "alpha": ()}
    shapes["lora_down.weight"] = (rank, inner, *(ones if tucker else kernel))
    if tucker:
        shapes["lora_mid.weight"] = (rank, rank, *kernel)
    return shapes


def _loha(out, inner, kernel, ones, rank, tucker, options) -> Shapes:
    area = int(torch.tensor([1, *kernel]).prod())
    left, right = ((rank, out), (rank, inner)) if tucker else ((out, rank), (rank, inner * area))
    shapes = {"alpha": (), "hada_w1_a": left, "hada_w1_b": right, "hada_w2_a": left, "hada_w2_b": right}
    if tucker:
        shapes |= {"hada_t1": (rank, rank, *kernel), "hada_t2": (rank, rank, *kernel)}
    return shapes


def _lokr(out, inner, kernel, ones, rank, tucker, options) -> Shapes:
    factor, full = options.get("factor", -1), bool(options.get("full_matrix"))
    out_l, out_k = factorization(out, factor)
    in_m, in_n = factorization(inner, factor)
    if options.get("unbalanced_factorization"):
        out_l, out_k = out_k, out_l
    shapes: Shapes = {"alpha": ()}
    if options.get("decompose_both") and rank < max(out_l, in_m) / 2 and not full:
        shapes |= {"lokr_w1_a": (out_l, rank), "lokr_w1_b": (rank, in_m)}
    else:
        shapes["lokr_w1"] = (out_l, in_m)
    if full or rank >= max(out_k, in_n) / 2:
        shapes["lokr_w2"] = (out_k, in_n, *kernel)
    elif tucker:
        shapes |= {"lokr_w2_a": (rank, out_k), "lokr_w2_b": (rank, in_n), "lokr_t2": (rank, rank, *kernel)}
    else:
        area = int(torch.tensor([1, *kernel]).prod())
        shapes |= {"lokr_w2_a": (out_k, rank), "lokr_w2_b": (rank, in_n * area)}
    return shapes


def _oft(out, inner, kernel, ones, rank, tucker, options) -> Shapes:
    size, num = factorization(out, rank)
    return {"oft_blocks": (num, size, size), "alpha": ()}


def _boft(out, inner, kernel, ones, rank, tucker, options) -> Shapes:
    size, num = power2factorization(out, rank)
    stages = bin(num - 1).count("1") + 1
    return {"oft_blocks": (stages, num, size, size), "alpha": ()}


def _glora(out, inner, kernel, ones, rank, tucker, options) -> Shapes:
    return {
        "a1.weight": (inner, rank, *ones),
        "a2.weight": (rank, inner, *ones),
        "b1.weight": (out, rank, *ones),
        "b2.weight": (rank, inner, *kernel),
        "alpha": (),
    }


def _dylora(out, inner, kernel, ones, rank, tucker, options) -> Shapes:
    return {"lora_up.weight": (out, rank), "lora_down.weight": (rank, inner, *kernel), "alpha": ()}


def _ia3(out, inner, kernel, ones, rank, tucker, options) -> Shapes:
    channels = inner if options.get("train_on_input") else out
    return {"weight": (1, channels, *ones) if kernel else (channels,), "on_input": ()}


def _full(out, inner, kernel, ones, rank, tucker, options) -> Shapes:
    return {"diff": (out, inner, *kernel)}


def _tlora(out, inner, kernel, ones, rank, tucker, options) -> Shapes:
    return {
        "q_layer.weight": (rank, inner, *ones),
        "p_layer.weight": (out, rank, *ones),
        "lambda_layer": (1, rank),
        "alpha": (),
    }


_FORMS = {
    "locon": _locon,
    "loha": _loha,
    "lokr": _lokr,
    "diag-oft": _oft,
    "boft": _boft,
    "glora": _glora,
    "dylora": _dylora,
    "ia3": _ia3,
    "full": _full,
    "tlora": _tlora,
}


def build(case: Case) -> tuple[nn.Module, nn.Module]:
    layer = LAYERS[case.layer].build()
    return getattr(lycoris.modules, CLASS_NAMES[case.algo])("lycoris_x", layer, 1.0, **case.options), layer


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.id)
def test_keys_and_shapes(case: Case):
    module, layer = build(case)
    shapes = {key: tuple(value.shape) for key, value in saved(module).items()}
    expected = expected_shapes(case, layer.weight, layer.bias)
    if case.algo == "dylora" and layer.weight.dim() > 2:
        _check_dylora_conv(shapes, expected, layer.weight.dim() - 2)
    elif case.algo == "tlora" and not ON_PEER:
        assert {key: shapes[key] for key in expected} == expected  # rule 40 needs the start to travel with the file
    else:
        assert shapes == expected


def _check_dylora_conv(shapes: Shapes, expected: Shapes, spatial: int) -> None:
    up = shapes.pop("lora_up.weight")
    flat = expected.pop("lora_up.weight")
    assert shapes == expected

    def peer() -> None:
        assert up == flat

    def ours() -> None:
        assert up in (flat, flat + (1,) * spatial)

    differs(40, peer=peer, ours=ours)


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.id)
def test_saved_tensors_are_named_alike_by_weight_list(case: Case):
    """Every saved key belongs to the class's weight_list, and get_module finds the class again."""
    module, _ = build(case)
    file = {f"lycoris_x.{key}": value for key, value in saved(module).items()}
    kind, params = get_module(file, "lycoris_x")
    if case.algo == "dylora":  # written as a plain low-rank pair
        assert kind is lycoris.modules.LoConModule
        return
    assert kind is type(module)
    listed = set(kind.weight_list)
    extra = {key.split(".", 1)[1] for key in file} - listed
    assert not extra or (case.algo == "tlora" and not ON_PEER), extra
    assert sum(value is not None for value in params) == len(set(kind.weight_list) & {k.split(".", 1)[1] for k in file})
    assert get_module(file, "lycoris_y") == (None, None)


@pytest.mark.parametrize("algo", ["locon", "loha", "lokr"])
def test_rs_lora_writes_an_alpha_that_plain_readers_agree_with(algo):
    """alpha / sqrt(rank) is trained; the file's alpha over rank is the same number (semantics.md rule 2)."""
    module, _ = build(Case(algo, "linear", {"lora_dim": 2, "alpha": 3.0, "rs_lora": True}))
    assert float(saved(module)["alpha"]) / 2 == pytest.approx(3.0 / 2**0.5)
    assert float(module.scale) == pytest.approx(3.0 / 2**0.5)


@pytest.mark.parametrize("algo", ["glora", "tlora", "dylora"])
def test_raw_alpha(algo):
    options = {"lora_dim": 4, "alpha": 3.0} | ({"block_size": 2} if algo == "dylora" else {})
    module, _ = build(Case(algo, "linear", options))
    assert float(saved(module)["alpha"]) == 3.0


@pytest.mark.parametrize("algo", ["diag-oft", "boft"])
def test_rotation_alpha_is_the_constraint(algo):
    module, layer = build(Case(algo, "linear", {"lora_dim": 6, "alpha": 2.0, "constraint": 0.25}))
    assert float(saved(module)["alpha"]) == 0.25
    assert float(module.constraint) == pytest.approx(0.25 * layer.out_features)


@pytest.mark.parametrize("algo", ["locon", "loha", "lokr", "glora"])
def test_scalar_is_folded_into_the_file(algo):
    """The file holds no scalar; loading it back gives the same weights with the scalar at one (rule 4)."""
    options = {"lora_dim": 2, "alpha": 3.0, "use_scalar": True}
    module, _ = build(Case(algo, "linear", options))
    randomise(module)
    before = module.get_merged_weight(1.0)[0].detach()
    file = saved(module)
    assert not [key for key in file if "scalar" in key]
    again, _ = build(Case(algo, "linear", options))
    again.load_state_dict(file, strict=False)
    assert float(again.scalar.detach()) == 1.0

    def peer() -> None:
        if algo in ("locon", "glora"):
            torch.testing.assert_close(again.get_merged_weight(1.0)[0].detach(), before)

    def ours() -> None:
        torch.testing.assert_close(again.get_merged_weight(1.0)[0].detach(), before)

    differs(4, peer=peer, ours=ours)


@pytest.mark.parametrize(
    ("layer", "keys"),
    [(nn.LayerNorm(13), {"w_norm", "b_norm"}), (nn.GroupNorm(3, 12), {"w_norm", "b_norm"})],
    ids=["layernorm", "groupnorm"],
)
def test_norm_keys(layer, keys):
    module = lycoris.modules.NormModule("lycoris_n", layer, 1.0)
    file = saved(module)
    assert set(file) == keys
    assert all(value.shape == layer.weight.shape for value in file.values())
    kind, _ = get_module({f"lycoris_n.{key}": value for key, value in file.items()}, "lycoris_n")
    assert kind is lycoris.modules.NormModule


def test_module_list_order_is_the_detection_order():
    found = [kind.__name__.removesuffix("Module") for kind in MODULE_LIST]
    assert [name for name in found if name in NAMED] == NAMED
    assert all(issubclass(kind, LycorisBaseModule) for kind in MODULE_LIST)


@pytest.mark.parametrize(
    "case", [Case(algo, "linear", {"lora_dim": 2, "alpha": 3.0}) for algo in ("locon", "loha", "lokr")]
)
def test_algo_check_and_extract(case):
    module, _ = build(case)
    file = {f"a.{key}": value for key, value in saved(module).items()}
    kind = type(module)
    assert kind.algo_check(file, "a")
    assert not kind.algo_check(file, "b")
    taken = kind.extract_state_dict(file, "a")
    assert len(taken) == len(kind.weight_list)
    for key, value in zip(kind.weight_list, taken, strict=True):
        assert (value is None) == (f"a.{key}" not in file)


def test_both_full_lokr_ignores_alpha():
    """Two full matrices have no rank: scale one, whatever alpha says (rule 3)."""
    case = Case("lokr", "linear", {"lora_dim": 2, "alpha": 1e10, "full_matrix": True})
    assert both_factors_full(case)
    module, _ = build(case)
    assert float(module.scale) == 1.0
    randomise(module)
    expected = torch.kron(module.lokr_w1.detach(), module.lokr_w2.detach())
    torch.testing.assert_close(module.get_diff_weight(1.0)[0].detach(), expected)
