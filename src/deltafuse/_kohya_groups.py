"""Optimizer groups of a kohya network: one per model, with the LoRA+ split of the up factors where asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .core.errors import OptionError
from .logging import logger

Groups = tuple[list[dict[str, Any]], list[str]]


def parameter_groups(adapters: Iterable[Any], name: str, lr: float | None, ratio: float | None) -> Groups:
    """(groups, descriptions). With ``ratio`` the up factors ("lora_up") learn at lr * ratio, described as "plus".

    A learning rate of 0 or None trains nothing: that group is left out.
    """
    plain: list[Any] = []
    plus: list[Any] = []
    for adapter in adapters:
        for key, parameter in adapter.named_parameters():
            (plus if ratio is not None and "lora_up" in key else plain).append(parameter)
    if not lr:
        if plain or plus:
            logger.info("%s: learning rate %s, its adapters are not trained", name, lr)
        return [], []
    groups: list[dict[str, Any]] = []
    descriptions = []
    if plain:
        groups.append({"params": plain, "lr": lr})
        descriptions.append(name)
    if plus and ratio is not None:
        groups.append({"params": plus, "lr": lr * ratio})
        descriptions.append(f"{name} plus")
    return groups, descriptions


def rates_per_encoder(rates: Any, count: int, fallback: float | None) -> list[float | None]:
    """One learning rate per text encoder from a number, a list, or nothing (the general rate)."""
    if rates is None or (isinstance(rates, Sequence) and not isinstance(rates, str) and len(rates) == 0):
        return [fallback] * count
    if not isinstance(rates, Sequence) or isinstance(rates, str):
        return [float(rates)] * count
    if len(rates) == 1:
        return [float(rates[0])] * count
    if len(rates) < count:
        raise OptionError(f"{len(rates)} text encoder learning rates for {count} text encoders: give one, or one each")
    return [None if rate is None else float(rate) for rate in rates[:count]]
