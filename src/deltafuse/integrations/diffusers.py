"""Pixel-space denoisers and their noise schedulers from diffusers directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.errors import CheckpointError
from ..core.optional import require

DENOISERS = ("UNet2DModel", "DiTTransformer2DModel")
_PIXEL_CHANNELS = (1, 3)


def load_denoiser(source: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    """Denoiser in ``dtype`` and noise scheduler of a model or pipeline directory.

    CheckpointError for a directory that is not one of :data:`DENOISERS` or works on latents.
    """
    root = Path(source).expanduser()
    if not root.is_dir():
        raise CheckpointError(f"model directory '{source}' does not exist.")
    model_dir = _model_dir(root, source)
    config = _read_json(model_dir / "config.json")
    _check_kind(config, source)
    diffusers = require("diffusers", extra="train", purpose="--task image")
    kind = getattr(diffusers, config["_class_name"])
    try:
        model = kind.from_pretrained(str(model_dir), torch_dtype=dtype)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"the weights in '{model_dir}' cannot be read: {error}") from error
    return model, _load_scheduler(diffusers, root, model_dir)


def _model_dir(root: Path, source: str) -> Path:
    """The folder of the denoiser: ``root`` itself, or ``unet`` / ``transformer`` of a pipeline."""
    index = root / "model_index.json"
    if index.is_file():
        parts = _read_json(index)
        latent = [part for part in ("vae", "vqvae", "movq") if parts.get(part, [None])[0]]
        if latent:
            raise CheckpointError(
                f"'{source}' is a latent-space pipeline (it has a '{latent[0]}'); "
                "only pixel-space denoisers are trained."
            )
    for folder in (root, root / "unet", root / "transformer"):
        if (folder / "config.json").is_file():
            return folder
    raise CheckpointError(f"'{source}' has no config.json, neither directly nor in 'unet' or 'transformer'.")


def _check_kind(config: dict[str, Any], source: str) -> None:
    name = config.get("_class_name")
    if name not in DENOISERS:
        raise CheckpointError(f"'{source}' holds a {name}. Legal: {', '.join(DENOISERS)}.")
    channels = config.get("in_channels", 3 if name == "UNet2DModel" else 4)
    if channels not in _PIXEL_CHANNELS:
        raise CheckpointError(
            f"'{source}' takes {channels} channels, so it works on latents; a pixel-space denoiser takes 1 or 3."
        )
    if config.get("class_embed_type") is not None:
        raise CheckpointError(f"'{source}' has class_embed_type '{config['class_embed_type']}'. Legal: none.")


def _load_scheduler(diffusers: Any, root: Path, model_dir: Path) -> Any:
    for folder in (root / "scheduler", root, model_dir):
        path = folder / "scheduler_config.json"
        if path.is_file():
            config = _read_json(path)
            if "FlowMatch" in str(config.get("_class_name")):
                raise CheckpointError(f"'{path}' is a {config['_class_name']}; a noise-prediction scheduler is needed.")
            return diffusers.DDPMScheduler.from_config(config)
    return diffusers.DDPMScheduler()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"'{path}' cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"'{path}' holds a {type(content).__name__}, not an object.")
    return content


def class_count(model: nn.Module) -> int | None:
    """Classes a denoiser is conditioned on; None for an unconditioned one."""
    config: Any = model.config
    if type(model).__name__ == "DiTTransformer2DModel":
        return config.num_embeds_ada_norm
    return config.num_class_embeds


def null_class(model: nn.Module) -> int | None:
    """The label that means "no class", where the model has one."""
    return class_count(model) if type(model).__name__ == "DiTTransformer2DModel" else None
