"""Planned = bypass = merged = beside = merged model = saved and reloaded = the oracle's delta, in fp64 to 1e-9."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import deltafuse
from deltafuse.core.errors import ShapeError
from helpers import oracle

from . import table

LIMIT = 1e-9
ALGORITHMS = table.weight_algorithms()


class Holder(nn.Module):
    """A model of one layer called ``layer``."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Check:
    """One algorithm on one layer with one option set; ``bad`` collects everything that differs."""

    def __init__(self, name: str, layer: table.Layer, options: dict[str, Any]) -> None:
        self.name, self.layer, self.options = name, layer, options
        self.base = layer.base()
        self.pristine = copy.deepcopy(self.base)
        self.adapter = table.build(name, self.base, options)
        self.setting = table.setting(name, self.base, options)
        self.x = layer.x()
        self.plain = self.pristine(self.x)
        self.bad: list[str] = []

    def want(self, strength: float) -> Tensor:
        """The oracle's change of the output."""
        weight, bias = oracle.delta(self.adapter, self.pristine.weight, self.setting, strength)
        return oracle.through(self.pristine, weight, bias, self.x)

    def compare(self, what: str, got: Tensor, want: Tensor) -> None:
        distance = float((got - self.plain - want).norm())
        rounding = 1e-14 * float(self.plain.norm())
        if not distance <= LIMIT * float(want.norm()) + rounding:
            self.bad.append(f"{what} {self.options}: {distance / max(float(want.norm()), 1e-30):.2e}")

    @torch.no_grad()
    def hooked(self) -> None:
        """Every form a user can ask for, at every strength; strength 0 is the base bit for bit."""
        wants = {strength: self.want(strength) for strength in table.STRENGTHS}
        for forced in table.spec(self.name).can_force:
            self.adapter.bypass_mode = forced
            self.adapter.apply_to()
            for strength, want in wants.items():
                self.adapter.multiplier = strength
                got = self.base(self.x)
                self.compare(f"bypass_mode={forced} strength={strength}", got, want)
                if strength == 0 and not torch.equal(got, self.plain):
                    self.bad.append(f"strength 0 is not the base {self.options}")
            self.adapter.restore()
        if float(wants[1.0].norm()) < 1e-6 and self.acts():
            self.bad.append(f"the delta vanishes {self.options}")

    def acts(self) -> bool:
        """Whether a delta is expected: a rotation of blocks of one channel is none."""
        return getattr(self.adapter, "block_size", 2) > 1

    @torch.no_grad()
    def beside(self) -> None:
        """On top of another adapter that adds nothing."""
        below = table.build("locon", self.base, stirred=False)
        below.apply_to()
        self.adapter.bypass_mode = None
        self.adapter.apply_to()
        for strength in (0.3, -1.0):
            self.adapter.multiplier = strength
            self.compare(f"beside strength={strength}", self.base(self.x), self.want(strength))
        below.restore()
        self.adapter.restore()

    @torch.no_grad()
    def merged(self) -> None:
        """The merged weight as a plain layer; merging and restoring is exact."""
        for strength in (0.3, -1.0, 2.0):
            want = self.want(strength)
            self.adapter.onfly_merge(strength)
            self.compare(f"merged strength={strength}", self.base(self.x), want)
            self.adapter.onfly_restore()
            if not torch.equal(self.base.weight, self.pristine.weight):
                self.bad.append(f"restore is not exact {self.options}")
        weight, _ = self.adapter.get_diff_weight(0.3)
        error = oracle.relative(weight, oracle.delta(self.adapter, self.pristine.weight, self.setting, 0.3)[0], 1e-6)
        if not error <= LIMIT:
            self.bad.append(f"get_diff_weight {self.options}: {error:.2e}")

    @torch.no_grad()
    def reloaded(self) -> None:
        """Through a safetensors file into a network made from it."""
        state = {f"lycoris_layer.{key}": value for key, value in self.adapter.state_dict().items()}
        tensors = safetensors.torch.load(safetensors.torch.save(state))
        model = Holder(copy.deepcopy(self.pristine))
        net, _ = deltafuse.create_lycoris_from_weights(0.3, None, model, tensors)
        net.eval().apply_to()
        again = net.loras[0]
        if self.options.get("detach_norm"):
            again.detach_norm = True
        self.compare("reloaded", model(self.x), self.want(0.3))
        if type(again) is not type(self.adapter) and self.name != "dylora":
            self.bad.append(f"reloaded as {again.name}")


def check(name: str, layer: table.Layer) -> list[str]:
    """What differs for one algorithm on one layer, over all its option sets."""
    bad: list[str] = []
    for options in table.variants(name):
        one = Check(name, layer, options)
        one.hooked()
        one.beside()
        one.merged()
        one.reloaded()
        bad += one.bad
    return bad


@pytest.mark.parametrize("kind", table.LAYERS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_form_gives_the_oracles_delta(name: str, kind: str) -> None:
    layer = table.LAYERS[kind]
    base = layer.base()
    if not table.legal_rank(name, base):
        with pytest.raises(ShapeError, match=str(base.weight.shape[0])):
            table.build(name, base, rank=4)
        return
    bad = check(name, layer)
    assert not bad, f"{len(bad)} differ:\n" + "\n".join(bad[:20])


def test_the_table_reaches_every_layout_of_lokr() -> None:
    """Either factor whole or low-rank, both low-rank, and a Tucker core."""
    seen = set()
    for layer in table.LAYERS.values():
        for options in table.variants("lokr"):
            adapter = table.build("lokr", layer.base(), options, stirred=False)
            seen.add((adapter.use_w1, adapter.use_w2, adapter.tucker))
    wanted = {(one, two, False) for one in (True, False) for two in (True, False)}
    assert seen >= wanted | {(True, False, True), (False, False, True)}
