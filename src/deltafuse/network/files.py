"""Adapter files: safe reading, atomic writing, metadata, and building a network from one."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from .._version import __version__
from ..core.errors import CheckpointError, nearest

KEPT_PREFIXES = ("bundle_emb.",)
"""Tensors that belong to the user and survive a re-save."""

FORMATS = {
    "kohya": ("lora_unet_", "lora_te_", "lora_te1_", "lora_te2_", "lora_te3_"),
    "PEFT": ("base_model.model.",),
    "diffusers": ("transformer.", "unet.", "text_encoder."),
    "ComfyUI": ("diffusion_model.",),
}


def read_file(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) of a safetensors file, or of a PyTorch file without executing its pickle."""
    file = Path(path)
    if not file.is_file():
        raise CheckpointError(f"there is no file '{path}'{_near_file(file)}")
    if file.suffix == ".safetensors":
        return _read_safetensors(file)
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"'{path}' is not a safe PyTorch weight file: {_first_line(error)}") from error
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise CheckpointError(f"'{path}' does not hold a flat mapping of names to tensors")
    return dict(loaded), {}


def _read_safetensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safetensors.safe_open(file, framework="pt") as handle:
            metadata = dict(handle.metadata() or {})
            names = list(handle.keys())
            return {key: handle.get_tensor(key) for key in names}, metadata
    except Exception as error:
        raise CheckpointError(f"'{file}' is no readable safetensors file: {_first_line(error)}") from error


def write_file(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write atomically: a temporary file in the same folder, then one replace."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    os.close(handle)
    try:
        if file.suffix == ".safetensors":
            safetensors.torch.save_file(dict(tensors), name, dict(metadata))
        else:
            torch.save(dict(tensors), name)
        os.chmod(name, 0o644)
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def prepare(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """CPU copies that share no memory, floating ones in ``dtype``; a scalar that ``dtype`` would round stays wide."""
    ready = {}
    for key, value in tensors.items():
        value = value.detach().to("cpu", copy=True).contiguous()
        if dtype is not None and value.is_floating_point():
            cast = value.to(dtype)
            exact = value.dim() > 0 or torch.equal(cast.to(value.dtype), value)
            value = cast if exact else value
        ready[key] = value
    return ready


def network_metadata(summary: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, str]:
    """Metadata entries, all strings; the user's own win."""
    own = {
        "ss_network_module": "lycoris.kohya",
        "ss_network_dim": str(summary["dim"]),
        "ss_network_alpha": str(summary["alpha"]),
        "ss_network_args": json.dumps({key: str(value) for key, value in summary["options"].items()}),
        "deltafuse_version": __version__,
        "deltafuse_layers": json.dumps(summary["layers"]),
    }
    return {**own, **{str(key): str(value) for key, value in (given or {}).items()}}


def split_kept(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(adapter tensors, tensors that only travel along)."""
    kept = {key: value for key, value in tensors.items() if key.startswith(KEPT_PREFIXES)}
    return {key: value for key, value in tensors.items() if key not in kept}, kept


def unmatched(names: Iterable[str], prefix: str, modules: Iterable[str], source: str) -> CheckpointError:
    """The error for a file's layers that the model lacks, naming the file's convention where it is another."""
    names, modules = sorted(names), list(modules)
    convention = next((kind for kind, starts in FORMATS.items() if names and _begins(f"{names[0]}.", starts)), None)
    shown = ", ".join(f"'{name}'{_close(name, modules)}" for name in names[:8])
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    kind = f" The keys follow the {convention} convention; this reader takes '{prefix}_...'." if convention else ""
    return CheckpointError(f"{source}: {len(names)} entries match no layer of the model: {shown}{more}.{kind}")


def _begins(name: str, starts: Iterable[str]) -> bool:
    """Whether a layer's name opens one of the prefixes, or the other way round where only its first part is known."""
    return any(name.startswith(start) or start.startswith(name) for start in starts)


def _close(name: str, modules: list[str]) -> str:
    close = nearest(name, modules)
    return f" (nearest: '{close}')" if close and close != name else ""


def _near_file(file: Path) -> str:
    if not file.parent.is_dir():
        return f"; the folder '{file.parent}' does not exist"
    close = nearest(file.name, [item.name for item in file.parent.iterdir()])
    return f"; did you mean '{file.parent / close}'?" if close else ""


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
