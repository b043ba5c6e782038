"""Random variation of a patch, by MONAI's transforms, driven by one random state per patch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from monai.transforms import (
    Compose,
    RandAdjustContrastd,
    RandAffined,
    RandFlipd,
    RandGaussianNoised,
    RandScaleIntensityd,
    RandShiftIntensityd,
)

from medckpt.blocks import SamplerConfig, Triple

MARGIN = 1.3
"""How much larger than the patch the voxels are that a rotated or scaled patch is drawn from."""


def affine_source_size(patch_size: Triple) -> Triple:
    """Returns the size in voxels of the crop that a rotated or scaled patch is drawn from."""
    x, y, z = (int(np.ceil(side * MARGIN / 2)) * 2 for side in patch_size)
    return x, y, z


class Augmentation:
    """Varies {"image": (C, X, Y, Z) float32, "label": (1, X, Y, Z)}; the same seed gives the same result."""

    def __init__(self, config: SamplerConfig) -> None:
        turn, grow, vary = np.deg2rad(config.rotation_degrees), config.scale, config.intensity_range
        chance = config.intensity_probability
        self.spatial = RandAffined(
            ["image", "label"],
            prob=1.0,  # the sampler decides whether, since it must cut a larger crop for it
            spatial_size=config.patch_size,
            rotate_range=(turn, turn, turn),
            scale_range=(grow, grow, grow),
            mode=("bilinear", "nearest"),
            padding_mode="border",
        )
        mirrors = [RandFlipd(["image", "label"], prob=0.5, spatial_axis=axis) for axis in config.mirror_axes]
        self.rest = Compose(
            [
                *mirrors,
                RandGaussianNoised("image", prob=config.noise_probability, std=config.noise_std),
                RandScaleIntensityd("image", factors=vary, prob=chance),
                RandShiftIntensityd("image", offsets=vary, prob=chance),
                RandAdjustContrastd("image", prob=chance, gamma=(1 / (1 + 2 * vary), 1 + 2 * vary)),
            ]
        )

    def __call__(self, patch: Mapping[str, Any], seed: int, spatial: bool) -> dict[str, torch.Tensor]:
        state = np.random.RandomState(seed)
        varied: Any = dict(patch)
        if spatial:
            self.spatial.set_random_state(state=state)
            varied = self.spatial(varied)
        self.rest.set_random_state(seed=int(state.randint(2**31)))
        varied = self.rest(varied)
        return {key: torch.as_tensor(varied[key]).as_subclass(torch.Tensor) for key in ("image", "label")}
