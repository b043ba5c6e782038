"""Predictions on the input's own grid: same shape, same affine, whatever grid the network was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from medckpt.config import RunConfig
from medckpt.datasets.layouts import Case
from medckpt.datasets.prepare import read_images, to_training_grid
from medckpt.geometry import Grid, Volume, resample
from medckpt.inference.sliding_window import predict_logits
from medckpt.training.precision import resolve_precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """A trained network with all that it takes to segment a scan."""

    network: nn.Module
    config: RunConfig
    labels: dict[str, int]
    """Label value by class name, background included."""
    channels: int
    """Channels of a scan."""
    device: torch.device

    def predict(self, case: Case) -> tuple[np.ndarray, list[Volume]]:
        """Returns the label map (X, Y, Z) on the grid of the case's first channel, and the channels as read."""
        volumes = read_images(case, self.config.data.dicom)
        return self.predict_volumes(volumes), volumes

    def predict_volumes(self, volumes: Sequence[Volume]) -> np.ndarray:
        """Returns label values (X, Y, Z), the smallest unsigned integers that hold them, on the first volume's grid."""
        image, grid = to_training_grid(volumes, self.config.data)
        self.network.eval()
        logits = predict_case(self.network.to(self.device), torch.from_numpy(image), self.config, self.device)
        values = np.array(sorted(self.labels.values()))
        return values.astype(np.min_scalar_type(values.max()))[to_source_grid(logits, grid, volumes[0].grid)]


def predict_case(network: nn.Module, image: Tensor, config: RunConfig, device: torch.device) -> Tensor:
    """Returns logits (classes, X, Y, Z) on the CPU of an image (C, X, Y, Z) on the training grid, as a run predicts.

    A GPU computes in the precision of the run, a CPU in float32.
    """
    on_gpu = device.type == "cuda"
    precision = resolve_precision(config.precision, "cuda") if on_gpu else "32-true"
    half = torch.float16 if precision == "16-mixed" else torch.bfloat16
    with torch.autocast(device.type, half, enabled=precision != "32-true"):
        return predict_logits(
            network,
            image,
            config.sampler.patch_size,
            overlap=config.trainer.overlap,
            mirror_axes=config.sampler.mirror_axes if config.trainer.mirror_predictions else (),
            device=device,
        )


def to_source_grid(logits: Tensor, grid: Grid, source: Grid) -> np.ndarray:
    """Returns the winning class (X, Y, Z) on `source` of logits (classes, X, Y, Z) on `grid`.

    Logits are interpolated linearly and compared class by class, so that two volumes are held, not one per class.
    """
    # One voxel of border, repeated: where rounding made the training grid a little smaller than the source, the
    # source's outermost voxels take the nearest answer.
    affine = grid.affine @ np.array([[1, 0, 0, -1], [0, 1, 0, -1], [0, 0, 1, -1], [0, 0, 0, 1]], dtype=float)
    x, y, z = (side + 2 for side in grid.shape)
    bordered = Grid(shape=(x, y, z), affine=affine)
    best: np.ndarray | None = None
    winner = np.zeros(source.shape, dtype=np.min_scalar_type(len(logits) - 1))
    for index, channel in enumerate(logits.numpy()):
        values = resample(np.pad(channel, 1, mode="edge"), bordered, source, order=1, fill=-np.inf)
        if best is None:
            best = values
            continue
        better = values > best
        best[better] = values[better]
        winner[better] = index
    return winner
