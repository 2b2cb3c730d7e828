"""Helpers that scripts call directly: option parsing, hashes, extraction from two models, merging a file."""

from __future__ import annotations

from .extract import extract_conv, extract_diff, extract_linear, make_sparse
from .general import default, product, str_bool
from .hashes import load_bytes_in_safetensors, precalculate_safetensors_hashes, safetensors_data_hash
from .merging import merge
from .names import convert_diffusers_name_to_compvis

__all__ = [
    "convert_diffusers_name_to_compvis",
    "default",
    "extract_conv",
    "extract_diff",
    "extract_linear",
    "load_bytes_in_safetensors",
    "make_sparse",
    "merge",
    "precalculate_safetensors_hashes",
    "product",
    "safetensors_data_hash",
    "str_bool",
]
