"""Files: metadata, dtype, kept tensors, broken and hostile ones, every alpha (rules 1, 3, 39 to 42)."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

import deltafuse
from deltafuse.core.errors import CheckpointError, DeltaFuseError

from . import table
from .toy import ALGORITHMS, network, toy, toy_input


def metadata_of(file: Path) -> dict[str, str]:
    with safetensors.safe_open(file, framework="pt") as handle:
        return dict(handle.metadata())


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_metadata_are_strings_that_describe_the_network(algo: str, tmp_path: Path) -> None:
    net = network(toy(torch.float32), algo)
    file = tmp_path / "a.safetensors"
    net.save_weights(file, torch.float16, {"mine": 7})
    meta = metadata_of(file)
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in meta.items())
    assert {"ss_network_module", "ss_network_dim", "ss_network_alpha", "ss_network_args", "mine"} <= set(meta)
    assert meta["mine"] == "7"
    assert json.loads(meta["ss_network_args"])["algo"] == algo
    assert float(meta["ss_network_alpha"]) == 5.0
    tensors = safetensors.torch.load_file(file)
    assert {value.dtype for value in tensors.values() if value.dim() > 0 and value.is_floating_point()} == {
        torch.float16
    }


def test_stored_dtype_is_kept_unless_asked(tmp_path: Path) -> None:
    net = network(toy(torch.float32), "locon").to(torch.bfloat16)
    net.save_weights(tmp_path / "a.safetensors")
    tensors = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert {value.dtype for value in tensors.values() if value.dim() > 0} == {torch.bfloat16}


def test_bundled_embeddings_and_own_entries_survive_a_re_save(tmp_path: Path) -> None:
    net = network(toy(torch.float32), "lokr")
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    net.save_weights(first, None, {"note": "mine"})
    tensors = safetensors.torch.load_file(first)
    tensors["bundle_emb.cat.string_to_param"] = torch.randn(2, 3)
    safetensors.torch.save_file(tensors, first, {**metadata_of(first), "note": "mine"})
    for how in ("load", "create"):
        if how == "load":
            other = network(toy(torch.float32), "lokr")
            other.load_weights(first)
        else:
            other, _ = deltafuse.create_lycoris_from_weights(1.0, first, toy(torch.float32))
        other.save_weights(second)
        again = safetensors.torch.load_file(second)
        assert torch.equal(again["bundle_emb.cat.string_to_param"], tensors["bundle_emb.cat.string_to_param"])
        assert metadata_of(second)["note"] == "mine"
        assert set(again) == set(tensors)
        assert all(torch.equal(again[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_loading_before_and_after_apply_to_reports(algo: str, ending: str, tmp_path: Path) -> None:
    model, x = toy(), toy_input()
    net = network(model, algo)
    net.apply_to()
    want = model(x)
    file = tmp_path / f"a.{ending}"
    net.save_weights(file)
    for after in (False, True):
        other = toy()
        again = network(other, algo)
        if after:
            again.apply_to()
        report = again.load_weights(file)
        assert report["loaded keys"] == sorted(net.state_dict())
        assert not report.get("missing keys")
        assert not report.get("unexpected keys")
        if not after:
            again.apply_to()
        torch.testing.assert_close(other(x), want, rtol=1e-9, atol=1e-11)


def test_missing_and_unexpected_keys_are_reported(tmp_path: Path) -> None:
    net = network(toy(torch.float32), "locon")
    tensors = {key: value.clone() for key, value in net.state_dict().items()}
    gone = {key for key in tensors if key.startswith("lycoris_head.")}
    changed = {key: value for key, value in tensors.items() if key not in gone}
    changed["lycoris_nothing.lora_up.weight"] = torch.zeros(1, 1)
    file = tmp_path / "a.safetensors"
    safetensors.torch.save_file(changed, file)
    report = network(toy(torch.float32), "locon").load_weights(file)
    assert report["unexpected keys"] == ["lycoris_nothing.lora_up.weight"]
    assert any("lycoris_head" in key for key in report["missing keys"])
    with pytest.raises(CheckpointError, match="lycoris_nothing"):
        deltafuse.create_lycoris_from_weights(1.0, file, toy(torch.float32))


class Bomb:
    """Runs code when unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.target),))


@pytest.mark.parametrize("ending", ["pt", "ckpt", "bin", "safetensors"])
def test_pickles_are_not_executed(ending: str, tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    file = tmp_path / f"evil.{ending}"
    for writer in (lambda: torch.save({"x": Bomb(trap)}, file), lambda: file.write_bytes(pickle.dumps(Bomb(trap)))):
        writer()
        net = network(toy(torch.float32), "locon")
        with pytest.raises(CheckpointError, match=r"evil"):
            net.load_weights(file)
        with pytest.raises(CheckpointError, match=r"evil"):
            deltafuse.create_lycoris_from_weights(1.0, file, toy(torch.float32))
        assert not trap.exists()


@pytest.mark.parametrize("keep", [0, 4, 40, -10])
def test_truncated_files_are_refused(keep: int, tmp_path: Path) -> None:
    net = network(toy(torch.float32), "locon")
    for ending in ("safetensors", "pt"):
        file = tmp_path / f"cut.{ending}"
        net.save_weights(file)
        file.write_bytes(file.read_bytes()[:keep])
        with pytest.raises(CheckpointError, match="cut"):
            net.load_weights(file)


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    net = network(toy(torch.float32), "locon")
    net.save_weights(tmp_path / "adapter.safetensors")
    with pytest.raises(CheckpointError, match=r"adapter\.safetensors"):
        net.load_weights(tmp_path / "adaptor.safetensors")


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_wrong_shape_names_key_and_layer_and_changes_nothing(algo: str, tmp_path: Path) -> None:
    net = network(toy(torch.float32), algo)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    file = tmp_path / "a.safetensors"
    key = next(k for k, v in reversed(before.items()) if v.dim() > 0)
    tensors = {k: v.contiguous() + 1 for k, v in before.items()}
    tensors[key] = torch.zeros(*(side + 1 for side in before[key].shape))
    safetensors.torch.save_file(tensors, file)
    layer = key.partition(".")[0]
    with pytest.raises(CheckpointError, match=layer):
        net.load_weights(file)
    assert all(torch.equal(value, before[k]) for k, value in net.state_dict().items()), "half-loaded"
    with pytest.raises(DeltaFuseError, match=layer):
        deltafuse.create_lycoris_from_weights(1.0, file, toy(torch.float32))


def test_keys_of_no_known_algorithm_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    safetensors.torch.save_file({"lycoris_head.strange_key": torch.zeros(2)}, file)
    with pytest.raises(CheckpointError, match=r"lycoris_head\.strange_key"):
        deltafuse.create_lycoris_from_weights(1.0, file, toy(torch.float32))


def test_a_file_of_another_convention_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    safetensors.torch.save_file({"base_model.model.head.lora_A.weight": torch.zeros(2, 12)}, file)
    for call in (
        lambda: deltafuse.create_lycoris_from_weights(1.0, file, toy(torch.float32)),
        lambda: network(toy(torch.float32), "locon").load_weights(file),
    ):
        with pytest.raises(CheckpointError, match="PEFT"):
            call()


ALPHAS = {
    "none": (None, 1.0),
    "zero": (0, 1.0),
    "int": (8, 2.0),
    "float": (0.5, 0.125),
    "0-d": (torch.tensor(2.0), 0.5),
    "one element": (torch.tensor([2.0]), 0.5),
    "bf16": (torch.tensor(3.0, dtype=torch.bfloat16), 0.75),
    "int tensor": (torch.tensor(8), 2.0),
}
SCALED = ("locon", "loha", "glora", "tlora", "dylora")


@pytest.mark.parametrize("kind", ALPHAS)
@pytest.mark.parametrize("algo", SCALED)
def test_every_kind_of_alpha(algo: str, kind: str) -> None:
    alpha, scale = ALPHAS[kind]
    base = nn.Linear(8, 12).double()
    adapter = table.build(algo, base, rank=4, alpha=alpha)
    one = table.build(algo, base, rank=4, alpha=4)
    for target, source in zip(one.parameters(), adapter.parameters(), strict=True):
        target.data.copy_(source.data)
    torch.testing.assert_close(adapter.get_diff_weight()[0], one.get_diff_weight()[0] * scale, rtol=1e-12, atol=1e-14)
    state = {f"lycoris_layer.{key}": value for key, value in one.state_dict().items()}
    if isinstance(alpha, torch.Tensor):
        state["lycoris_layer.alpha"] = alpha
    elif alpha is not None:
        state["lycoris_layer.alpha"] = torch.tensor(alpha)
    else:
        del state["lycoris_layer.alpha"]
    model = nn.ModuleDict({"layer": base})
    net, _ = deltafuse.create_lycoris_from_weights(1.0, None, model, state)
    assert net.loras[0].scale == pytest.approx(scale, rel=1e-6)
    torch.testing.assert_close(net.loras[0].get_diff_weight()[0], adapter.get_diff_weight()[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("alpha", [1e10, 0.0, 7.0])
def test_lokr_with_two_full_matrices_ignores_alpha(alpha: float) -> None:
    base = nn.Linear(8, 12)
    adapter = table.build("lokr", base, {"full_matrix": True}, alpha=alpha, dtype=torch.float32)
    want, _ = table.build("lokr", base, {"full_matrix": True}, alpha=3.0, stirred=False, dtype=torch.float32), None
    want.load_state_dict(adapter.state_dict())
    state = {f"lycoris_layer.{key}": value for key, value in adapter.state_dict().items()}
    state["lycoris_layer.alpha"] = torch.tensor(alpha)
    for dtype in (torch.float32, torch.float16):
        model = nn.ModuleDict({"layer": nn.Linear(8, 12).to(dtype)})
        cast = {key: value.to(dtype) if value.dim() else value for key, value in state.items()}
        net, _ = deltafuse.create_lycoris_from_weights(1.0, None, model, cast)
        dense, _ = net.loras[0].get_diff_weight()
        assert torch.isfinite(dense).all()
        torch.testing.assert_close(dense, want.get_diff_weight()[0], rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("algo", ["locon", "loha", "lokr", "glora", "tlora", "dylora"])
@pytest.mark.parametrize("rank", [2, 5, 8])
def test_rs_lora_is_saved_so_that_plain_readers_agree(algo: str, rank: int) -> None:
    always = {"block_size": 1} if algo == "dylora" else {}
    base = nn.Linear(24, 36).double()
    adapter = table.build(algo, base, {"rs_lora": True, **always}, rank=rank)
    state = adapter.state_dict()
    if getattr(adapter, "_fixed_scale", False):
        return
    assert float(state["alpha"]) == pytest.approx(table.ALPHA * rank**0.5, rel=1e-6)
    plain = table.build(algo, base, always, rank=rank, alpha=state["alpha"])
    for target, source in zip(plain.parameters(), adapter.parameters(), strict=True):
        target.data.copy_(source.data)
    torch.testing.assert_close(plain.get_diff_weight()[0], adapter.get_diff_weight()[0], rtol=1e-9, atol=1e-12)
    assert adapter.scale == pytest.approx(table.ALPHA / rank**0.5)


def test_ranks_and_alphas_may_differ_per_layer(tmp_path: Path) -> None:
    model, x = toy(), toy_input()
    preset = {"name_algo_map": {"q": {"algo": "locon", "dim": 7, "alpha": 2}, "head": {"algo": "lokr", "dim": 2}}}
    net = deltafuse.create_lycoris(model, 1.0, 3, 5.0, preset=preset).double()
    ranks = {item.lora_name: item.lora_dim for item in net.loras}
    assert ranks["lycoris_q"] == 7
    assert ranks["lycoris_k"] == 3
    assert next(i for i in net.loras if i.lora_name == "lycoris_head").name == "lokr"
    for adapter in net.loras:
        table.stir(adapter)
    net.eval().apply_to()
    net.save_weights(tmp_path / "a.safetensors")
    other = toy()
    again, _ = deltafuse.create_lycoris_from_weights(1.0, tmp_path / "a.safetensors", other)
    again.eval().apply_to()
    torch.testing.assert_close(other(x), model(x), rtol=1e-9, atol=1e-11)
