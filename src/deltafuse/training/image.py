"""Training of pixel-space denoisers on folders of images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from ..core.errors import OptionError
from ..integrations.diffusers import class_count, null_class
from .images import Images, LabelledFile, check_images, find_images, settle_labels
from .task import Split, make_loader, mean_loss


class ImageTask:
    """Noise prediction (or what the scheduler's ``prediction_type`` says) at uniformly drawn timesteps."""

    name = "image"

    def __init__(self, train: Images, held_out: Images | None, scheduler: Any) -> None:
        self.data = {"train": train, "held_out": held_out}
        self.scheduler = scheduler
        self.rank_groups: dict[int, int] = {}

    def attach(self, network: Any) -> None:
        """Note the largest rank of each group of T-LoRA layers, whose ranks follow the timestep."""
        for module in network.loras:
            if hasattr(module, "mask_group_id"):
                group = int(module.mask_group_id)
                self.rank_groups[group] = max(self.rank_groups.get(group, 0), int(module.lora_dim))

    def batches(self, split: Split, batch_size: int) -> DataLoader[Any] | None:
        """Batches ``{"pixels": (batch, channels, size, size), "label": (batch,)}``."""
        data = self.data[split]
        return None if data is None else make_loader(data, batch_size, split)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Mean squared error of the prediction, in fp32."""
        pixels = batch["pixels"]
        noise = torch.randn_like(pixels)
        steps = torch.randint(0, self.scheduler.config.num_train_timesteps, (len(pixels),), device=pixels.device)
        noisy = self.scheduler.add_noise(pixels, noise, steps)
        self._mask_ranks(steps)
        predicted = predict(model, noisy, steps, batch.get("label"))
        return F.mse_loss(predicted.float(), self._target(pixels, noise, steps).float())

    def _mask_ranks(self, steps: torch.Tensor) -> None:
        """Every sample's T-LoRA ranks for its timestep: few at high noise."""
        if not self.rank_groups:
            return
        from ..algorithms.tlora import compute_timestep_mask, set_timestep_mask

        total = self.scheduler.config.num_train_timesteps
        for group, rank in self.rank_groups.items():
            masks = [compute_timestep_mask(step, total, rank) for step in steps.tolist()]
            set_timestep_mask(torch.cat(masks).to(steps.device), group)

    def evaluate(self, model: nn.Module, batches: Iterable[dict[str, torch.Tensor]]) -> dict[str, float]:
        """Mean loss; the loop seeds the noise, so that evaluations of a run compare."""
        return mean_loss(self, model, batches)

    def _target(self, pixels: torch.Tensor, noise: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        kind = self.scheduler.config.prediction_type
        if kind == "v_prediction":
            return self.scheduler.get_velocity(pixels, noise, steps)
        return pixels if kind == "sample" else noise


def predict(model: nn.Module, noisy: torch.Tensor, steps: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
    """The denoiser's output, (batch, channels, size, size); a learned variance in further channels is left out."""
    given = {} if labels is None else {"class_labels": labels}
    inputs = noisy.to(next(model.parameters()).dtype)
    return model(inputs, steps, **given).sample[:, : noisy.shape[1]]


def make_image_task(
    model: nn.Module,
    scheduler: Any,
    data: Sequence[str],
    *,
    resolution: int = 0,
    held_out: float = 0.1,
    held_out_data: Sequence[str] = (),
    seed: int = 0,
) -> ImageTask:
    """Find, check, label and split the images of ``data`` for ``model``."""
    size, channels = _size(model, resolution), int(model.config.in_channels)  # type: ignore[union-attr,arg-type]
    files = _ready(find_images(data), model)
    if held_out_data:
        train, held = files, _ready(find_images(held_out_data), model)
    else:
        train, held = split_images(files, held_out, seed)
    return ImageTask(Images(train, channels, size), Images(held, channels, size) if held else None, scheduler)


def _ready(files: Sequence[LabelledFile], model: nn.Module) -> list[LabelledFile]:
    labelled = settle_labels(files, class_count(model), null_class(model))
    check_images(labelled)
    return labelled


def split_images(
    files: Sequence[LabelledFile], fraction: float, seed: int
) -> tuple[list[LabelledFile], list[LabelledFile]]:
    """Training and held-out files, at least one of each where there are two; one file alone is for training."""
    if fraction == 0 or len(files) < 2:
        return list(files), []
    count = min(len(files) - 1, max(1, round(fraction * len(files))))
    held = set(torch.randperm(len(files), generator=torch.Generator().manual_seed(seed)).tolist()[:count])
    return [f for i, f in enumerate(files) if i not in held], [f for i, f in enumerate(files) if i in held]


def _size(model: nn.Module, asked: int) -> int:
    """Pixels per side; OptionError where the model fixes another size or says none."""
    own: Any = model.config.sample_size  # type: ignore[union-attr]
    own = own[0] if isinstance(own, (list, tuple)) else own
    fixed = type(model).__name__ == "DiTTransformer2DModel"
    if asked and fixed and asked != own:
        raise OptionError(f"option 'resolution' is {asked}; this model takes {own} pixels per side only.")
    if not (asked or own):
        raise OptionError("option 'resolution' is needed: the model's config has no sample_size.")
    return int(asked or own)
