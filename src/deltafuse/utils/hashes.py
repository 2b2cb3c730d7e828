"""Model hashes of safetensors content."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import safetensors.torch
import torch


def load_bytes_in_safetensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The data section (everything after the header) of the safetensors file that would hold ``tensors``."""
    blob = safetensors.torch.save(dict(tensors))
    return blob[8 + int.from_bytes(blob[:8], "little") :]


def precalculate_safetensors_hashes(state_dict: Mapping[str, torch.Tensor]) -> str:
    """``0x`` + sha256 of the tensors' raw bytes in the mapping's order, one tensor in memory at a time."""
    digest = hashlib.sha256()
    for tensor in state_dict.values():
        digest.update(load_bytes_in_safetensors({"tensor": tensor.detach().cpu().contiguous()}))
    return f"0x{digest.hexdigest()}"


def safetensors_data_hash(state_dict: Mapping[str, torch.Tensor]) -> str:
    """``0x`` + sha256 of the data section as a file stores it, which is what readers of the file recompute."""
    dense = {name: tensor.detach().cpu().contiguous() for name, tensor in state_dict.items()}
    return f"0x{hashlib.sha256(load_bytes_in_safetensors(dense)).hexdigest()}"
