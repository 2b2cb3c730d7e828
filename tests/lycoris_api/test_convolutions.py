"""Every convolution setting: adapted equals merged in both modes (semantics.md rule 28)."""

from __future__ import annotations

import lycoris.modules
import pytest
import torch
from torch import nn

from .cases import CLASS_NAMES
from .support import functional_op, randomise
from .target import ON_PEER, relative_error

KINDS = {
    "grouped": (lambda: nn.Conv2d(12, 24, 3, padding=1, groups=3), (2, 12, 6, 5)),
    "depthwise": (lambda: nn.Conv1d(24, 24, 3, padding=1, groups=24), (2, 24, 9)),
    "dilated": (lambda: nn.Conv2d(9, 24, 3, padding=2, dilation=2), (2, 9, 9, 8)),
    "dilated-1d": (lambda: nn.Conv1d(9, 24, 3, dilation=3), (2, 9, 14)),
    "same": (lambda: nn.Conv2d(9, 24, (3, 4), padding="same"), (2, 9, 7, 6)),
    "same-dilated": (lambda: nn.Conv1d(9, 24, 4, padding="same", dilation=2), (2, 9, 13)),
    "valid": (lambda: nn.Conv2d(9, 24, 3, padding="valid", stride=2), (2, 9, 7, 8)),
    "reflect": (lambda: nn.Conv2d(9, 24, 3, padding=1, padding_mode="reflect"), (2, 9, 7, 6)),
    "replicate": (lambda: nn.Conv3d(6, 24, (1, 3, 2), padding=(0, 1, 1), padding_mode="replicate"), (2, 6, 3, 5, 4)),
    "circular": (lambda: nn.Conv1d(9, 24, 3, padding=2, padding_mode="circular"), (2, 9, 8)),
    "strided": (lambda: nn.Conv2d(9, 24, 3, stride=(3, 2), padding=(0, 1)), (2, 9, 10, 9)),
    "unbatched": (lambda: nn.Conv2d(9, 24, 3, padding=1), (9, 7, 6)),
}
OPTIONS = {
    "locon": {"lora_dim": 3, "alpha": 2.0},
    "locon-tucker": {"lora_dim": 3, "alpha": 2.0, "use_tucker": True},
    "locon-dora": {"lora_dim": 3, "alpha": 2.0, "weight_decompose": True},
    "loha": {"lora_dim": 3, "alpha": 2.0},
    "lokr": {"lora_dim": 1, "alpha": 3.0},
    "lokr-tucker": {"lora_dim": 1, "alpha": 3.0, "use_tucker": True},
    "diag-oft": {"lora_dim": 6, "alpha": 2.0},
    "boft": {"lora_dim": 6, "alpha": 2.0},
    "glora": {"lora_dim": 3, "alpha": 2.0},
    "dylora": {"lora_dim": 4, "alpha": 3.0, "block_size": 2},
    "ia3": {"lora_dim": 3, "alpha": 2.0},
    "ia3-input": {"lora_dim": 3, "alpha": 2.0, "train_on_input": True},
    "full": {"lora_dim": 3, "alpha": 2.0},
    "tlora": {"lora_dim": 3, "alpha": 2.0},
}


def class_of(form: str):
    name = form if form in CLASS_NAMES else form.rsplit("-", 1)[0]
    return getattr(lycoris.modules, CLASS_NAMES[name])


def build(form: str, kind: str, bypass: bool) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    make, shape = KINDS[kind]
    torch.manual_seed(1)
    layer, x = make().requires_grad_(False), torch.randn(shape)
    more = {"bypass_mode": True} if bypass else {}
    return class_of(form)("lycoris_conv", layer, 1.0, **OPTIONS[form], **more), layer, x


def worst_error(module: nn.Module, layer: nn.Module, x: torch.Tensor) -> float:
    """Largest distance between the adapted and the merged layer's delta over strengths 1 and 0.3."""
    randomise(module).eval()
    errors = []
    for strength in (1.0, 0.3):
        module.multiplier = strength
        weight, bias = module.get_merged_weight(strength, layer.weight.shape, layer.weight.device)
        bias_delta = None if bias is None else bias - layer.bias
        with torch.no_grad():
            expected = functional_op(layer, x, weight - layer.weight, bias_delta)
            errors.append(relative_error(module(x) - layer(x), expected))
    return max(errors)


FORMS = [(form, bypass) for form in OPTIONS for bypass in (False, True) if (form, bypass) != ("full", True)]


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(("form", "bypass"), FORMS)
def test_adapted_equals_merged(form, bypass, kind):
    if ON_PEER:
        if (form, kind, bypass) in RIGHT_ON_PEER:
            assert worst_error(*build(form, kind, bypass)) < 2e-5
        return
    assert worst_error(*build(form, kind, bypass)) < 5e-5, "semantics.md rule 28"


def _right_on_peer() -> set[tuple[str, str, bool]]:
    """What lycoris-lora gets right: zero padding in rebuild mode, and plain geometry in bypass mode without a bias."""
    plain = ("same", "same-dilated", "valid", "strided", "grouped", "depthwise", "dilated", "dilated-1d")
    rebuild = {(form, kind, False) for form in ("locon", "locon-tucker", "locon-dora", "full") for kind in plain}
    bypass = {("locon", kind, True) for kind in ("same", "valid", "strided")}
    return rebuild - {("locon-dora", kind, False) for kind in plain} | bypass


RIGHT_ON_PEER = _right_on_peer()
