"""The LyCORIS entry points: create a network on a model, or read one from a file."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .algorithms import algorithm_names, get_algorithm
from .network import files
from .network.create import apply_notes, build_from_tensors, network_arguments, rules_for
from .network.network import LycorisNetwork
from .network.options import ALIASES
from .utils.preset import resolve_preset

network_module_dict = {name: get_algorithm(main).module_class for name, main in algorithm_names().items()}
deprecated_arg_dict = {"disable_conv_cp": "use_tucker", **{key: ALIASES[key] for key in ("use_cp", "use_conv_cp")}}
deprecated_arg_dict["constrain"] = "constraint"


def create_lycoris(
    module: nn.Module,
    multiplier: float = 1.0,
    linear_dim: int | None = 4,
    linear_alpha: Any = 1,
    warn_on_unmatched: bool = True,
    **kwargs: Any,
) -> LycorisNetwork:
    """A network of adapters on ``module``; call ``apply_to()`` to put it in force.

    linear_dim, linear_alpha: rank and alpha of linear layers and 1x1 convolutions (conv_dim, conv_alpha for larger
    kernels). algo: see ``list_algorithms()``. preset: a name, a TOML path or a mapping. All other options of the
    algorithm go by name. Raises OptionError for an unknown or idle option, TargetError where no layer matches,
    ShapeError where a dimension has no legal block.
    """
    arguments, rest = network_arguments(linear_dim, linear_alpha, kwargs, frozenset())
    rules = rules_for(resolve_preset(rest.get("preset", "full")), "preset" in rest)
    return LycorisNetwork(module, multiplier=multiplier, warn_on_unmatched=warn_on_unmatched, rules=rules, **arguments)


def create_lycoris_from_weights(
    multiplier: float, file: Any, module: nn.Module, weights_sd: dict[str, Tensor] | None = None, **kwargs: Any
) -> tuple[LycorisNetwork, dict[str, Tensor]]:
    """(network, tensors) of an adapter file on ``module``; rank, alpha and options are read from the tensors.

    ``strict=False`` lets entries without a layer pass. Raises CheckpointError where the file does not fit.
    """
    tensors, metadata = (weights_sd, {}) if weights_sd is not None else files.read_file(file)
    network = LycorisNetwork(module, multiplier=multiplier, init_only=True)
    build_from_tensors(network, module, tensors, str(file or "weights_sd"), bool(kwargs.pop("strict", True)))
    apply_notes(network, metadata)
    network.set_multiplier(multiplier)
    network._kept = (files.split_kept(tensors)[1], metadata)
    return network, tensors


__all__ = [
    "LycorisNetwork",
    "create_lycoris",
    "create_lycoris_from_weights",
    "deprecated_arg_dict",
    "network_module_dict",
]
