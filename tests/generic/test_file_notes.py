"""What a file's metadata adds to its tensors."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import deltafuse


@pytest.mark.parametrize("detach", [True, False])
def test_detached_norms_come_back(tmp_path, detach):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 5))
    made = deltafuse.create_lycoris(model, 1.0, 3, 2.0, algo="lora", dora_wd=True, detach_norm=detach)
    made.save_weights(tmp_path / "a.safetensors", None, None)
    read, _ = deltafuse.create_lycoris_from_weights(1.0, tmp_path / "a.safetensors", model)
    assert [item.detach_norm for item in read.loras] == [detach, detach]


def test_other_metadata_is_no_obstacle(tmp_path):
    model = nn.Sequential(nn.Linear(6, 9))
    made = deltafuse.create_lycoris(model, 1.0, 3, 2.0, algo="lora", dora_wd=True)
    made.save_weights(tmp_path / "a.safetensors", None, {"deltafuse_layers": "not json", "mine": 1})
    read, _ = deltafuse.create_lycoris_from_weights(0.5, tmp_path / "a.safetensors", model)
    read.save_weights(tmp_path / "b.safetensors", None, None)
    from safetensors import safe_open

    with safe_open(tmp_path / "b.safetensors", "pt") as handle:
        metadata = handle.metadata()
    assert metadata["mine"] == "1"
    assert json.loads(metadata["deltafuse_layers"])["*"]["algo"] == "locon"


def test_a_decomposition_that_hides_ia3_is_said(caplog):
    with caplog.at_level("WARNING", logger="deltafuse"):
        deltafuse.IA3Module("hidden_layer", nn.Linear(5, 7), weight_decompose=True)
    assert "hidden_layer" in caplog.text
