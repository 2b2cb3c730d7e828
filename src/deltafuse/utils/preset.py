"""Presets from TOML files."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from ..config_sdk import PresetConfig, PresetValidationError
from ..core.errors import nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_preset(preset_path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check the preset in a TOML file; a plain mapping as in ``config.PRESET``.

    Raises:
        PresetValidationError: no such file (with the nearest built-in preset), not TOML, or not a legal preset.
    """
    path = Path(preset_path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PresetValidationError(_unreadable(preset_path, error)) from error
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PresetValidationError(f"preset file '{path}' is not valid TOML: {error}") from error
    try:
        return PresetConfig.from_dict(raw).to_dict()
    except PresetValidationError as error:
        raise PresetValidationError(f"preset file '{path}': {error}") from error


def resolve_preset(preset: Any) -> dict[str, Any]:
    """A preset's keys from a built-in name, a TOML path, a mapping or a :class:`PresetConfig`."""
    from ..config import PRESET

    if isinstance(preset, str) and preset in PRESET:
        return PresetConfig.from_dict(PRESET[preset]).to_dict()
    if isinstance(preset, str | os.PathLike):
        return read_preset(preset)
    config = preset if isinstance(preset, PresetConfig) else PresetConfig.from_dict(preset)
    return config.to_dict()


def _unreadable(preset_path: str | os.PathLike[str], error: Exception) -> str:
    from ..config import PRESET

    close = nearest(os.fspath(preset_path), PRESET)
    hint = f" Did you mean the built-in preset '{close}'?" if close else ""
    reason = getattr(error, "strerror", None) or str(error)
    return (
        f"'{preset_path}' is neither a built-in preset nor a readable preset file ({reason}).{hint} "
        f"Built-in presets: {', '.join(PRESET)}."
    )
