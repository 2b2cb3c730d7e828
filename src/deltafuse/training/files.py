"""Config files: TOML and YAML with the names of the flags."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ..core.errors import OptionError
from ..core.optional import require


def read_config(path: str | Path) -> dict[str, Any]:
    """Flat names and values of a ``.toml``, ``.yaml`` or ``.yml`` file; OptionError names the file and the fault."""
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in (".toml", ".yaml", ".yml"):
        raise OptionError(f"config file '{path}' has suffix '{kind}'. Legal: .toml, .yaml, .yml.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"config file '{path}' cannot be read: {error}") from error
    content = _parse_toml(path, text) if kind == ".toml" else _parse_yaml(path, text)
    if not isinstance(content, dict):
        raise OptionError(f"config file '{path}' holds a {type(content).__name__}; it must hold names and values.")
    return {str(name): value for name, value in content.items()}


def _parse_toml(path: Path, text: str) -> Any:
    parser = require("tomllib" if sys.version_info >= (3, 11) else "tomli", extra="train")
    try:
        return parser.loads(text)
    except ValueError as error:
        raise OptionError(f"config file '{path}' is not TOML: {error}") from error


def _parse_yaml(path: Path, text: str) -> Any:
    yaml = require("yaml", extra="train", purpose="a YAML config file")
    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise OptionError(f"config file '{path}' is not YAML: {' '.join(str(error).split())}") from error


def to_toml(values: dict[str, Any]) -> str:
    """Flat values as TOML text that :func:`read_config` reads back unchanged."""
    return "".join(f"{name} = {_toml_value(value)}\n" for name, value in values.items())


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return _toml_string(value)
    return "[" + ", ".join(_toml_value(item) for item in value) + "]"


def _toml_string(value: str) -> str:
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    plain = "".join(escapes.get(c, c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}") for c in value)
    return f'"{plain}"'
