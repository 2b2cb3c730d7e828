"""Module classes of common models and the presets built from them.

Diffusion models are named by the classes of their blocks, text encoders by their attention and MLP classes. A preset is
looked up by name in :data:`PRESET` (plain mappings) or :data:`BUILTIN_PRESET_CONFIGS` (typed).
"""

from __future__ import annotations

import copy
from typing import Any

from .config_sdk import AlgoOverride, PresetConfig

_DIT_BLOCKS = [
    "HunYuanDiTBlock",  # HunYuanDiT
    "DoubleStreamBlock",  # Flux
    "SingleStreamBlock",  # Flux
    "SingleDiTBlock",  # Stable Diffusion 3.5
    "MMDoubleStreamBlock",  # HunYuanVideo
    "MMSingleStreamBlock",  # HunYuanVideo
    "WanAttentionBlock",  # Wan
    "HunyuanVideoTransformerBlock",  # FramePack
    "HunyuanVideoSingleTransformerBlock",  # FramePack
    "JointTransformerBlock",  # Lumina Image 2
    "FinalLayer",  # Lumina Image 2, Anima
    "QwenImageTransformerBlock",  # Qwen Image
    "LensTransformerBlock",  # Lens
    "Ideogram4TransformerBlock",  # Ideogram 4
    "ZImageTransformerBlock",  # Z-Image
    "AceStepEncoderLayer",  # ACE-Step
    "AceStepDiTLayer",  # ACE-Step
    "TextFusionBlock",  # Krea 2
    "Block",  # Anima
    "PatchEmbed",  # Anima
    "TimestepEmbedding",  # Anima
    "LLMAdapterTransformerBlock",  # Anima
]
_TRANSFORMER_BLOCKS = ["Transformer2DModel", *_DIT_BLOCKS]
_CONV_BLOCKS = ["ResnetBlock2D", "Downsample2D", "Upsample2D"]
_CONV_ENDS = ["conv_in", "conv_out"]
_TIME_EMBEDDING = ["time_embedding.linear_1", "time_embedding.linear_2"]

FULL_UNET_MODULES: list[str] = ["Transformer2DModel", *_CONV_BLOCKS, *_DIT_BLOCKS]

FULL_UNET_NAMES: list[str] = [*_CONV_ENDS, *_TIME_EMBEDDING]

FULL_TEXT_ENCODER_MODULES: list[str] = [
    "CLIPAttention",
    "CLIPSdpaAttention",
    "CLIPMLP",
    "MT5Block",
    "BertLayer",
    "Gemma2Attention",
    "Gemma2FlashAttention2",
    "Gemma2SdpaAttention",
    "Gemma2MLP",
    "Qwen3Attention",
    "Qwen3FlashAttention2",
    "Qwen3SdpaAttention",
    "Qwen3MLP",
]

_TEXT_ATTENTION = [
    "CLIPAttention",
    "CLIPSdpaAttention",
    "BertAttention",
    "MT5LayerSelfAttention",
    "Gemma2Attention",
    "Gemma2FlashAttention2",
    "Gemma2SdpaAttention",
]


def _preset(conv: bool, unet: list[str], unet_names: list[str], text: list[str]) -> PresetConfig:
    """A preset that names block classes for both models and no text encoder paths; the lists are copied."""
    return PresetConfig(
        enable_conv=conv,
        unet_target_module=list(unet),
        unet_target_name=list(unet_names),
        text_encoder_target_module=list(text),
        text_encoder_target_name=[],
    )


def _ia3_preset() -> PresetConfig:
    """Keys and values scale their output; the last linear layer of each MLP scales its input."""
    on_input = {"train_on_input": True}
    return PresetConfig(
        enable_conv=False,
        unet_target_module=[],
        unet_target_name=["to_k", "to_v", "ff.net.2"],
        text_encoder_target_module=[],
        text_encoder_target_name=["k_proj", "v_proj", "mlp.fc2"],
        name_algo_map={
            "mlp.fc2": AlgoOverride(options=dict(on_input)),
            "ff.net.2": AlgoOverride(options=dict(on_input)),
        },
    )


BUILTIN_PRESET_CONFIGS: dict[str, PresetConfig] = {
    "full": _preset(True, FULL_UNET_MODULES, FULL_UNET_NAMES, FULL_TEXT_ENCODER_MODULES),
    "full-lin": _preset(
        False,
        ["Transformer2DModel", "ResnetBlock2D", *_DIT_BLOCKS],
        _TIME_EMBEDDING,
        FULL_TEXT_ENCODER_MODULES,
    ),
    "attn-mlp": _preset(False, _TRANSFORMER_BLOCKS, [], FULL_TEXT_ENCODER_MODULES),
    "attn-only": _preset(False, ["CrossAttention", "SelfAttention"], [], _TEXT_ATTENTION),
    "unet-only": _preset(True, FULL_UNET_MODULES, FULL_UNET_NAMES, []),
    "unet-transformer-only": _preset(False, _TRANSFORMER_BLOCKS, [], []),
    "unet-convblock-only": _preset(True, _CONV_BLOCKS, _CONV_ENDS, []),
    "ia3": _ia3_preset(),
}

PRESET: dict[str, dict[str, Any]] = {name: preset.to_dict() for name, preset in BUILTIN_PRESET_CONFIGS.items()}


def list_builtin_presets() -> dict[str, PresetConfig]:
    """The built-in presets by name, as copies that may be changed freely."""
    return copy.deepcopy(BUILTIN_PRESET_CONFIGS)
