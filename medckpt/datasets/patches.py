"""The patch sampler: patch number `index` of a run is a pure function of the seed and `index`.

So a run is the same with any number of workers, and one that goes on at step n draws what the whole run would have
drawn at step n.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import Sampler

from medckpt.blocks import SamplerConfig
from medckpt.datasets.augment import Augmentation, affine_source_size
from medckpt.datasets.prepare import PreparedCase


class PatchDataset(TorchDataset[dict[str, Any]]):
    """Item `index` is {"image": (C, X, Y, Z) float32, "label": (1, X, Y, Z) integers, "case": name}.

    Cases come round-robin in an order shuffled anew each round. A patch is placed on a voxel of a labelled class
    (classes equally often, the voxel anywhere in the middle half of the patch) or anywhere; where it reaches over
    the volume's edge it is padded with the image's minimum and background.
    """

    def __init__(
        self, cases: Sequence[PreparedCase], config: SamplerConfig, seed: int, *, augment: bool = True
    ) -> None:
        self.cases = tuple(cases)
        self.config = config
        self.seed = seed
        self.augment = Augmentation(config) if augment else None
        self._voxels = [case.class_voxels() for case in self.cases]
        self._minimum = [float(case.image().min()) for case in self.cases]

    def __len__(self) -> int:
        return np.iinfo(np.int64).max  # an index is drawn by step, not by length

    def __getitem__(self, index: int) -> dict[str, Any]:
        turn, place = divmod(index, len(self.cases))
        number = int(np.random.default_rng([self.seed, 0, turn]).permutation(len(self.cases))[place])
        generator = np.random.default_rng([self.seed, 1, index])
        case = self.cases[number]
        image, label = case.image(), case.label()

        spatial = self.augment is not None and generator.random() < self.config.affine_probability
        start = self._start(generator, label.shape, self._voxels[number])
        size = np.array(self.config.patch_size)
        if spatial:
            larger = np.array(affine_source_size(self.config.patch_size))
            start, size = start - (larger - size) // 2, larger
        patch = {
            "image": torch.from_numpy(crop(image, start, size, self._minimum[number])),
            "label": torch.from_numpy(crop(label[None], start, size, 0)),
        }
        if self.augment is not None:
            patch = self.augment(patch, seed=int(generator.integers(2**31)), spatial=spatial)
        return {**patch, "case": case.name}

    def _start(
        self, generator: np.random.Generator, shape: tuple[int, ...], voxels: dict[int, np.ndarray]
    ) -> np.ndarray:
        patch, room = np.array(self.config.patch_size), np.array(shape)
        # Where the volume is smaller than the patch it may lie anywhere in it; else the patch anywhere in the volume.
        lowest, highest = np.minimum(0, room - patch), np.maximum(0, room - patch)
        if voxels and generator.random() < self.config.foreground_share:
            choices = voxels[sorted(voxels)[int(generator.integers(len(voxels)))]]
            voxel = choices[int(generator.integers(len(choices)))]
            start = voxel - generator.integers(patch // 4, patch - patch // 4)
        else:
            start = generator.integers(lowest, highest + 1)
        # A volume smaller than the patch goes anywhere inside it, whatever voxel was chosen.
        anywhere = generator.integers(lowest, highest + 1)
        return np.where(room < patch, anywhere, np.clip(start, lowest, highest))


def crop(array: np.ndarray, start: np.ndarray, size: np.ndarray, fill: float) -> np.ndarray:
    """Returns array[:, start : start + size] as a copy, (C, *size); voxels outside of the array are `fill`."""
    shape = np.array(array.shape[1:])
    low, high = np.clip(start, 0, shape), np.clip(start + size, 0, shape)
    inside = array[:, *(slice(a, b) for a, b in zip(low, high, strict=True))]
    if inside.shape[1:] == tuple(size):
        return np.array(inside)
    result = np.full((array.shape[0], *size), fill, dtype=array.dtype)
    result[:, *(slice(a, b) for a, b in zip(low - start, high - start, strict=True))] = inside
    return result


class StepBatches(Sampler[list[int]]):
    """Yields the patch indices of each forward pass from `start` up to `stop`, for one of `world` processes."""

    def __init__(self, start: int, stop: int, patches_per_step: int, *, rank: int = 0, world: int = 1) -> None:
        self.start, self.stop = start, stop
        self.patches = patches_per_step
        self.rank, self.world = rank, world

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in range(self.start, self.stop):
            first = (batch * self.world + self.rank) * self.patches
            yield list(range(first, first + self.patches))
