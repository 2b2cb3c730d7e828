"""The constructor grid, and the rule of semantics.md that lycoris-lora breaks in a view of a case.

Views: ``forward`` (rebuild mode), ``bypass`` (bypass_mode=True), ``merged`` (get_merged_weight), ``diff``
(get_diff_weight), ``merge`` (merge_to) and ``reload`` (state_dict through get_module and make_module).
"""

from __future__ import annotations

from .support import MAIN_LAYERS, Case

CLASS_NAMES = {
    "locon": "LoConModule",
    "loha": "LohaModule",
    "lokr": "LokrModule",
    "diag-oft": "DiagOFTModule",
    "boft": "ButterflyOFTModule",
    "glora": "GLoRAModule",
    "dylora": "DyLoraModule",
    "ia3": "IA3Module",
    "full": "FullModule",
    "tlora": "TLoraModule",
}
BASE = {"lora_dim": 3, "alpha": 2.0}
DORA_OUT = {"weight_decompose": True}
DORA_IN = {"weight_decompose": True, "wd_on_out": False}
CONVS = ("conv1d", "conv2d", "conv3d", "conv2d-uneven")


def _case(algo: str, layer: str, **options) -> Case:
    dim = {"lora_dim": 2, "alpha": 3.0} if algo == "lokr" else BASE
    return Case(algo, layer, {**dim, **options})


def _low_rank_cases() -> list[Case]:
    cases = []
    for algo in ("locon", "loha", "lokr"):
        cases += [_case(algo, layer) for layer in (*MAIN_LAYERS, "linear-odd")]
        cases += [
            _case(algo, layer, **dora) for layer in ("linear", "conv2d", "conv1d") for dora in (DORA_OUT, DORA_IN)
        ]
        cases += [_case(algo, layer, use_scalar=True) for layer in ("linear", *CONVS[:3])]
        cases += [_case(algo, layer, rs_lora=True) for layer in ("linear", "conv1d")]
        cases += [_case(algo, layer, use_tucker=True) for layer in CONVS]
        cases += [
            _case(algo, "conv2d", use_tucker=True, use_scalar=True),
            _case(algo, "conv2d", use_tucker=True, **DORA_OUT),
        ]
        cases += [_case(algo, layer) for layer in ("conv2d-dilated", "conv2d-grouped")]
    return cases


def _lokr_cases() -> list[Case]:
    return [
        _case("lokr", "linear", factor=4),
        _case("lokr", "linear-odd", factor=2),
        _case("lokr", "linear", factor=4, lora_dim=1, decompose_both=True),
        _case("lokr", "linear", full_matrix=True),
        _case("lokr", "conv2d", full_matrix=True),
        _case("lokr", "linear", full_matrix=True, rs_lora=True),
        _case("lokr", "linear", unbalanced_factorization=True),
        _case("lokr", "conv2d", unbalanced_factorization=True),
        _case("lokr", "linear", factor=8, lora_dim=1, decompose_both=True, use_scalar=True),
    ]


def _rotation_cases() -> list[Case]:
    cases = []
    for algo in ("diag-oft", "boft"):
        cases += [_case(algo, layer, lora_dim=6) for layer in MAIN_LAYERS]
        cases += [_case(algo, layer, lora_dim=6, constraint=0.01) for layer in ("linear", "conv2d-nobias")]
        cases += [_case(algo, layer, lora_dim=6, rescaled=True) for layer in ("linear-nobias", "conv2d-nobias")]
        cases += [_case(algo, "conv2d-nobias", lora_dim=6), _case(algo, "conv2d-grouped", lora_dim=6)]
    return cases


def _other_cases() -> list[Case]:
    cases = [_case("glora", layer) for layer in (*MAIN_LAYERS, "linear-odd", "conv2d-dilated")]
    cases += [_case("glora", "linear", use_scalar=True), _case("glora", "linear-nobias", rs_lora=True)]
    cases += [_case("dylora", layer, lora_dim=6, block_size=2) for layer in ("linear", "linear-nobias", "conv2d")]
    cases += [_case("ia3", layer) for layer in (*MAIN_LAYERS, "linear-odd")]
    cases += [_case("ia3", layer, train_on_input=True) for layer in ("linear", "linear-nobias", "conv2d", "conv1d")]
    cases += [_case("full", layer) for layer in (*MAIN_LAYERS, "linear-odd", "conv2d-dilated", "conv2d-grouped")]
    cases += [_case("tlora", layer) for layer in ("linear", "linear-nobias", "linear-odd", "conv2d-1x1")]
    cases += [_case("tlora", "linear", sig_type="last"), _case("tlora", "linear", sig_type="middle")]
    cases += [_case("tlora", "linear", use_data_init=False)]
    return cases


def all_cases() -> list[Case]:
    return [*_low_rank_cases(), *_lokr_cases(), *_rotation_cases(), *_other_cases()]


def peer_fault(case: Case, view: str, strength: float) -> int | None:
    """The rule lycoris-lora breaks in this view, or None where it is right."""
    if case.options.get("rs_lora") and _ignores_rs(case) and view != "reload":
        return 2 if case.algo == "glora" else 3
    if case.algo == "dylora":
        return _dylora_fault(case, view)
    if view == "reload":
        return _reload_fault(case)
    if view == "bypass":
        return _bypass_fault(case, strength)
    if case.algo in ("loha", "lokr") and view in ("merged", "diff", "merge") and _scale_matters(case):
        return 1
    if case.options.get("weight_decompose") and strength != 1:
        return 5
    if case.options.get("rescaled") and case.algo == "diag-oft" and view == "diff" and strength != 1:
        return 5
    return None


def both_factors_full(case: Case) -> bool:
    return case.algo == "lokr" and bool(case.options.get("full_matrix"))


def _ignores_rs(case: Case) -> bool:
    return case.algo == "glora" or both_factors_full(case)


def _scale_matters(case: Case) -> bool:
    """The second application of the scale (or the dropped scalar) shows unless both are one."""
    return not both_factors_full(case) or bool(case.options.get("use_scalar"))


def _dylora_fault(case: Case, view: str) -> int | None:
    if view == "reload":
        return 40 if case.layer.startswith("conv") else None
    return 1


def _reload_fault(case: Case) -> int | None:
    options = case.options
    if case.algo == "ia3" or options.get("unbalanced_factorization") or options.get("wd_on_out") is False:
        return 40
    if case.algo == "lokr" and (options.get("use_tucker") or case.layer == "conv2d-grouped"):
        return 40
    if case.algo == "tlora" and (options.get("sig_type") or options.get("use_data_init") is False):
        return 40
    return None


def _bypass_fault(case: Case, strength: float) -> int | None:
    has_bias = "nobias" not in case.layer
    if case.options.get("weight_decompose"):
        return 14
    if case.layer == "conv2d-dilated" and case.algo in ("locon", "glora"):
        return 28
    if case.layer == "conv2d-grouped" and case.algo == "lokr":
        return 28
    if case.algo in ("diag-oft", "boft") and has_bias:
        return 18
    if case.algo == "diag-oft" and strength != 1:
        return 5
    if case.algo == "ia3" and has_bias and not case.options.get("train_on_input"):
        return 17
    return None
