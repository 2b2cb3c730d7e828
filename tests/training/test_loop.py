"""The loop on a toy task: what it computes, freezes, saves, resumes and refuses."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from deltafuse.core.errors import CheckpointError, DataError, OptionError
from deltafuse.training.config import TrainConfig
from deltafuse.training.loop import NonFiniteError, run
from deltafuse.training.state import read_step
from deltafuse.training.task import EndlessShuffle

from .toy import TEST_DEVICE, ToyTask, parameters, toy_model, toy_network, train_toy


def assert_same(one: Any, other: Any, tolerance: float = 0.0) -> None:
    left, right = parameters(one), parameters(other)
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=0, atol=tolerance)


def test_loss_falls_and_files_are_there(tmp_path: Path) -> None:
    result, _, _ = train_toy(tmp_path, steps=30, eval_every=10)
    assert result.steps == 30
    assert not result.interrupted
    assert list(result.evals) == [0, 10, 20, 30]
    assert result.evals[30]["loss"] < result.evals[0]["loss"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "adapter.safetensors",
        "loss.png",
        "metrics.jsonl",
        "state.pt",
    ]
    records = [json.loads(line) for line in result.metrics.read_text(encoding="utf-8").splitlines()]
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 31))
    assert [r["step"] for r in records if "eval_loss" in r] == [0, 10, 20, 30]
    assert result.plot.read_bytes().startswith(b"\x89PNG")


def test_same_seed_same_numbers_and_other_seed_other_numbers(tmp_path: Path) -> None:
    one = train_toy(tmp_path / "1", ToyTask(noise=0.3))
    two = train_toy(tmp_path / "2", ToyTask(noise=0.3))
    three = train_toy(tmp_path / "3", ToyTask(noise=0.3), seed=5)
    assert one[0].losses == two[0].losses != three[0].losses
    assert_same(one[2], two[2])


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_resume_equals_uninterrupted(tmp_path: Path, schedule: str, optimizer: str) -> None:
    class Cut(ToyTask):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            if model.training and self.calls == 8:
                os.kill(os.getpid(), signal.SIGINT)
            return super().loss(model, batch)

    options = {"steps": 9, "grad_accum": 2, "schedule": schedule, "optimizer": optimizer, "eval_every": 2}
    whole, _, expected = train_toy(tmp_path / "whole", ToyTask(noise=0.3), **options)
    cut, _, _ = train_toy(tmp_path / "cut", Cut(noise=0.3), **options)
    assert cut.interrupted
    assert cut.steps == read_step(tmp_path / "cut" / "state.pt") == 5
    rest, _, resumed = train_toy(tmp_path / "cut", ToyTask(noise=0.3), resume=True, **options)
    assert rest.losses == whole.losses
    assert_same(resumed, expected)
    left, right = (load_file(tmp_path / name / "adapter.safetensors") for name in ("cut", "whole"))
    assert all(torch.equal(left[key], right[key]) for key in right)


def test_resume_drops_what_came_after_the_saved_step(tmp_path: Path) -> None:
    train_toy(tmp_path, steps=5, save_every=2)
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 6, "loss": 1.0}\n{"step": 7, "lo')
    result, _, _ = train_toy(tmp_path, steps=7, resume=True)
    records = [json.loads(line) for line in result.metrics.read_text(encoding="utf-8").splitlines()]
    assert [r["step"] for r in records if "loss" in r] == [1, 2, 3, 4, 5, 6, 7]


def test_resume_refuses_what_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing to resume"):
        train_toy(tmp_path, resume=True)
    assert list(tmp_path.iterdir()) == []
    train_toy(tmp_path)
    model = toy_model()
    with pytest.raises(CheckpointError, match=r"shape|missing"):
        run(
            ToyTask(),
            model,
            toy_network(model, linear_dim=3),
            TrainConfig(steps=9, device=TEST_DEVICE),
            tmp_path,
            resume=True,
        )
    (tmp_path / "state.pt").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match=r"state\.pt"):
        train_toy(tmp_path, resume=True)


def test_accumulation_equals_a_big_batch(tmp_path: Path) -> None:
    big, _, one = train_toy(tmp_path / "big", batch_size=12, weight_decay=0.1)
    small, _, two = train_toy(tmp_path / "small", batch_size=3, grad_accum=4, weight_decay=0.1)
    assert small.losses == pytest.approx(big.losses, rel=1e-5)
    assert_same(one, two, tolerance=1e-5)


def test_base_is_frozen_and_untouched(tmp_path: Path) -> None:
    before = {name: value.clone() for name, value in toy_model().state_dict().items()}
    _, model, network = train_toy(tmp_path, optimizer="sgd", weight_decay=0.5)
    own = {id(p) for p in network.parameters()}
    base = {name: p for name, p in model.named_parameters() if id(p) not in own}
    assert base
    assert not any(p.requires_grad or p.grad is not None for p in base.values())
    network.restore()
    after = model.state_dict()
    for name, value in before.items():  # running statistics of the batch norm included
        assert torch.equal(after[name].cpu(), value), name


def test_base_keeps_its_gradients_on_request(tmp_path: Path) -> None:
    before = {name: value.clone() for name, value in toy_model().named_parameters()}
    _, model, _ = train_toy(tmp_path, freeze_base=False)
    for name, value in model.named_parameters():
        if name in before:
            assert value.requires_grad
            assert torch.equal(value.cpu(), before[name])


def test_non_finite_loss_stops_and_keeps_the_last_good_file(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"step 5: loss nan.*holds step 4"):
        train_toy(tmp_path, ToyTask(poison_at=5), save_every=2)
    assert read_step(tmp_path / "state.pt") == 4
    saved = load_file(tmp_path / "adapter.safetensors")
    assert all(torch.isfinite(value).all() for value in saved.values())
    with pytest.raises(NonFiniteError, match=r"step 1: loss nan.*Nothing was saved"):
        train_toy(tmp_path / "early", ToyTask(poison_at=1))


def test_a_failing_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_toy(tmp_path)
    before = (tmp_path / "adapter.safetensors").read_bytes()
    model = toy_model()
    network = toy_network(model)

    def half_written(path: str, *rest: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(network, "save_weights", half_written)
    with pytest.raises(OSError, match="disk full"):
        run(ToyTask(), model, network, TrainConfig(steps=2, device=TEST_DEVICE), tmp_path)
    assert (tmp_path / "adapter.safetensors").read_bytes() == before
    assert not [p for p in tmp_path.iterdir() if "tmp" in p.name]


def test_samples_are_taken_before_and_after_without_touching_the_run(tmp_path: Path) -> None:
    class Sampling(ToyTask):
        def samples(self, model: nn.Module, out: Path, step: int) -> Path:
            assert not model.training
            assert not torch.is_grad_enabled()
            torch.rand(100)
            return out / f"{step}.png"

    plain, _, one = train_toy(tmp_path / "a", ToyTask(noise=0.3))
    drawn, _, two = train_toy(tmp_path / "b", Sampling(noise=0.3))
    assert list(drawn.samples) == [0, 6]
    assert plain.losses == drawn.losses
    assert_same(one, two)


def test_weight_norms_are_limited(tmp_path: Path) -> None:
    _, _, network = train_toy(tmp_path, steps=20, lr=0.1, scale_weight_norms=0.2)
    for module in network.loras:
        delta = module.get_diff_weight(1.0)[0]
        assert delta.norm() <= 0.2 + 1e-4


def test_bf16_trains_fp32_parameters(tmp_path: Path) -> None:
    result, _, network = train_toy(tmp_path, steps=30, mixed_precision="bf16", save_dtype="bf16")
    assert result.evals[30]["loss"] < result.evals[0]["loss"]
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    factors = {v.dtype for key, v in load_file(tmp_path / "adapter.safetensors").items() if key.endswith("weight")}
    assert factors == {torch.bfloat16}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="fp16 needs a CUDA device")
def test_fp16_on_a_gpu_trains_and_resumes(tmp_path: Path) -> None:
    options = {"mixed_precision": "fp16", "device": "cuda"}
    whole, _, expected = train_toy(tmp_path / "whole", steps=30, **options)
    assert whole.evals[30]["loss"] < whole.evals[0]["loss"]
    train_toy(tmp_path / "half", steps=12, **options)
    _, _, resumed = train_toy(tmp_path / "half", steps=30, resume=True, **options)
    assert_same(resumed, expected, tolerance=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "adamx"}, "adam"),
        ({"optimizer": "rprop", "weight_decay": 0.1}, "weight_decay"),
        ({"mixed_precision": "fp16", "device": "cpu"}, "fp16"),
        ({"gradient_checkpointing": "non-reentrant"}, "gradient_checkpointing"),
    ],
)
def test_refusals(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        train_toy(tmp_path, **options)


def test_a_foreign_loader_is_refused(tmp_path: Path) -> None:
    class Foreign(ToyTask):
        def batches(self, split: Any, batch_size: int) -> Any:
            return torch.utils.data.DataLoader(self.data, batch_size)

    with pytest.raises(DataError, match="make_loader"):
        train_toy(tmp_path, Foreign())


@pytest.mark.parametrize("size", [1, 5, 8])
def test_endless_shuffle_takes_up_any_position(size: int) -> None:
    def take(position: int, count: int) -> list[int]:
        sampler = EndlessShuffle(size)
        sampler.begin(3, position)
        return [index for index, _ in zip(sampler, range(count), strict=False)]

    whole = take(0, 30)
    assert all(sorted(whole[i : i + size]) == list(range(size)) for i in range(0, 30 - size, size))
    assert all(take(start, 30 - start) == whole[start:] for start in range(30))
