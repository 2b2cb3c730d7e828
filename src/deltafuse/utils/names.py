"""Names of UNet layers in the two families of checkpoints: diffusers, and the original (CompVis, SGM) layout."""

from __future__ import annotations

import re
from collections.abc import Callable

_RESNET_PARTS = {
    "conv1": "in_layers_2",
    "conv2": "out_layers_3",
    "norm1": "in_layers_0",
    "norm2": "out_layers_0",
    "time_emb_proj": "emb_layers_1",
    "conv_shortcut": "skip_connection",
}


def _part(kind: str, name: str) -> str:
    return _RESNET_PARTS.get(name, name) if kind == "resnets" else name


def _slot(kind: str) -> int:
    """Within one original block, index 0 is the residual block and 1 the attention."""
    return 1 if kind == "attentions" else 0


def _down(block: str, kind: str, layer: str, rest: str) -> str:
    return f"input_blocks_{1 + int(block) * 3 + int(layer)}_{_slot(kind)}_{_part(kind, rest)}"


def _middle(kind: str, layer: str, rest: str) -> str:
    position = 1 if kind == "attentions" else int(layer) * 2
    return f"middle_block_{position}_{_part(kind, rest)}"


def _up(block: str, kind: str, layer: str, rest: str) -> str:
    return f"output_blocks_{int(block) * 3 + int(layer)}_{_slot(kind)}_{_part(kind, rest)}"


_RULES: tuple[tuple[re.Pattern[str], Callable[..., str]], ...] = (
    (re.compile(r"conv_in(.*)"), lambda rest: f"input_blocks_0_0{rest}"),
    (re.compile(r"conv_out(.*)"), lambda rest: f"out_2{rest}"),
    (re.compile(r"time_embedding_linear_(\d+)(.*)"), lambda n, rest: f"time_embed_{int(n) * 2 - 2}{rest}"),
    (re.compile(r"down_blocks_(\d+)_(attentions|resnets)_(\d+)_(.+)"), _down),
    (re.compile(r"mid_block_(attentions|resnets)_(\d+)_(.+)"), _middle),
    (re.compile(r"up_blocks_(\d+)_(attentions|resnets)_(\d+)_(.+)"), _up),
    (re.compile(r"down_blocks_(\d+)_downsamplers_0_conv"), lambda n: f"input_blocks_{3 + int(n) * 3}_0_op"),
    (re.compile(r"up_blocks_(\d+)_upsamplers_0_conv"), lambda n: f"output_blocks_{2 + int(n) * 3}_2_conv"),
)

_PREFIX = "lora_unet_"


def convert_diffusers_name_to_compvis(key: str) -> str:
    """``lora_unet_`` + a diffusers UNet layer, in the original layout; any other name comes back unchanged.

    Example: ``lora_unet_down_blocks_1_attentions_0_proj_in`` -> ``lora_unet_input_blocks_4_1_proj_in``.
    """
    if not key.startswith(_PREFIX):
        return key
    for pattern, rename in _RULES:
        found = pattern.match(key, len(_PREFIX))
        if found:
            return _PREFIX + rename(*found.groups())
    return key
