"""Folders of images: found, checked, labelled, split, decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset

from ..core.errors import DataError
from ..core.optional import require

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")


@dataclass(frozen=True)
class LabelledFile:
    """One image file and its class, None without classes."""

    path: Path
    label: int | None


def find_images(places: Sequence[str]) -> list[LabelledFile]:
    """Image files below folders. Sub-folders of a folder are classes: numbers by value, else names by order."""
    if not places:
        raise DataError("no data given: --data takes a folder of images.")
    found: list[LabelledFile] = []
    for place in places:
        root = Path(place).expanduser()
        if not root.is_dir():
            raise DataError(f"image folder '{place}' {'is a file' if root.exists() else 'does not exist'}.")
        files = _files_in(root)
        if not files:
            raise DataError(f"image folder '{place}' holds no image ({', '.join(SUFFIXES)}).")
        found += files
    return found


def _files_in(root: Path) -> list[LabelledFile]:
    paths = sorted(p for p in root.rglob("*") if p.is_file() and p.suffix.lower() in SUFFIXES)
    folders = sorted({p.relative_to(root).parts[0] for p in paths if p.parent != root})
    labels = {name: int(name) if all(n.isdigit() for n in folders) else i for i, name in enumerate(folders)}
    return [LabelledFile(p, None if p.parent == root else labels[p.relative_to(root).parts[0]]) for p in paths]


def settle_labels(files: Sequence[LabelledFile], classes: int | None, null: int | None) -> list[LabelledFile]:
    """Labels as the model needs them: none, the folders' or its "no class" label; DataError where neither fits."""
    if classes is None:
        return [LabelledFile(item.path, None) for item in files]
    labels = {item.label for item in files}
    if labels == {None} and null is not None:
        return [LabelledFile(item.path, null) for item in files]
    if None in labels:
        bare = next(item.path for item in files if item.label is None)
        raise DataError(f"the model is class-conditioned, but '{bare}' is in no class folder (FOLDER/CLASS/image).")
    largest = max(label for label in labels if label is not None)
    if largest >= classes:
        raise DataError(f"the images have class {largest}, the model knows {classes} classes (0 to {classes - 1}).")
    return list(files)


def check_images(files: Sequence[LabelledFile]) -> None:
    """DataError naming the first file that is not a whole image."""
    image = require("PIL.Image", extra="train", purpose="--task image")
    for item in files:
        try:
            with image.open(item.path) as picture:
                picture.verify()
        except (OSError, SyntaxError, ValueError) as error:
            raise DataError(f"image '{item.path}' cannot be read: {error}") from error


class Images(Dataset[dict[str, torch.Tensor]]):
    """``{"pixels": (channels, size, size) in [-1, 1]}``, with ``"label": ()`` where there are classes.

    The shorter side is scaled to ``size`` and the middle is cut out.
    """

    def __init__(self, files: Sequence[LabelledFile], channels: int, size: int) -> None:
        self.files, self.channels, self.size = list(files), channels, size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = self.files[index]
        sample = {"pixels": self._pixels(item.path)}
        if item.label is not None:
            sample["label"] = torch.tensor(item.label)
        return sample

    def _pixels(self, path: Path) -> torch.Tensor:
        pil: Any = require("PIL.Image", extra="train")
        ops: Any = require("PIL.ImageOps", extra="train")
        try:
            with pil.open(path) as picture:
                fitted = ops.fit(picture.convert("L" if self.channels == 1 else "RGB"), (self.size, self.size))
        except (OSError, ValueError) as error:
            raise DataError(f"image '{path}' cannot be read: {error}") from error
        values = torch.from_numpy(numpy.array(fitted, dtype="float32")) / 127.5 - 1
        return values.view(self.size, self.size, self.channels).permute(2, 0, 1).contiguous()
