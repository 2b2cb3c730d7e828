"""Activation checkpointing of both kinds on models from transformers, diffusers and elsewhere."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..core.errors import OptionError


def enable(model: nn.Module, network: Any, kind: str) -> None:
    """Turn on ``kind`` (``non-reentrant``, ``reentrant``; ``none`` does nothing) for ``model``.

    Reentrant checkpointing computes no gradient unless an input needs one, and a frozen base gives none: the floating
    inputs (for token models, the embeddings) are marked so that the adapters inside train.
    """
    if kind == "none":
        return
    check(model, kind)
    reentrant = kind == "reentrant"
    if callable(getattr(model, "gradient_checkpointing_enable", None)):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})  # type: ignore[operator]
    else:
        how = (functools.partial(checkpoint, use_reentrant=True),) if reentrant else ()
        model.enable_gradient_checkpointing(*how)  # type: ignore[operator]
    network.enable_gradient_checkpointing()
    if reentrant:
        _mark_inputs(model)


def check(model: nn.Module, kind: str) -> None:
    """OptionError where ``model`` cannot do ``kind``."""
    offers = ("gradient_checkpointing_enable", "enable_gradient_checkpointing")
    if kind != "none" and not any(callable(getattr(model, name, None)) for name in offers):
        raise OptionError(
            f"option 'gradient_checkpointing' is '{kind}', but {type(model).__name__} offers neither "
            f"'{offers[0]}' nor '{offers[1]}'. Legal here: none."
        )


def _mark_inputs(model: nn.Module) -> None:
    model.register_forward_pre_hook(_mark_arguments, with_kwargs=True)
    embeddings = getattr(model, "get_input_embeddings", None)
    if callable(embeddings):
        embeddings().register_forward_hook(_mark_output)


def _mark(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point() and not value.requires_grad:
        return value.detach().requires_grad_(torch.is_grad_enabled())
    return value


def _mark_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return tuple(_mark(value) for value in args), {key: _mark(value) for key, value in kwargs.items()}


def _mark_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return _mark(output)
