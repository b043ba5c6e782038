"""Predictions on the input's own grid: same shape, same affine, whatever grid the network was trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from medckpt.config import RunConfig
from medckpt.datasets.layouts import Case
from medckpt.datasets.prepare import read_images, to_training_grid
from medckpt.errors import DataError
from medckpt.geometry import Volume
from medckpt.inference.sliding_window import Part, Progress, predict_parts
from medckpt.inference.source_grid import to_source_grid
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

    def predict(self, case: Case, progress: Progress | None = None) -> tuple[np.ndarray, list[Volume]]:
        """Returns the label map (X, Y, Z) on the grid of the case's first channel, and the channels as read."""
        volumes = read_images(case, self.config.data)
        return self.predict_volumes(volumes, progress), volumes

    def predict_volumes(self, volumes: Sequence[Volume], progress: Progress | None = None) -> np.ndarray:
        """Returns label values (X, Y, Z), the smallest unsigned integers that hold them, on the first volume's grid.

        Raises:
            DataError: the machine lacks the memory, or the network's answer is not a number somewhere.
        """
        image, grid = to_training_grid(volumes, self.config.data)
        self.network.eval()
        network = self.network.to(self.device)
        parts = predict_case(network, torch.from_numpy(image), self.config, self.device, progress)
        winner = to_source_grid(_numbers_only(parts, volumes[0].source), grid, volumes[0].grid)
        values = np.array(sorted(self.labels.values()))
        return values.astype(np.min_scalar_type(values.max()))[winner]


def predict_case(
    network: nn.Module, image: Tensor, config: RunConfig, device: torch.device, progress: Progress | None = None
) -> Iterator[Part]:
    """Yields the logits, part by part, of an image (C, X, Y, Z) on the training grid, as a run predicts.

    A GPU computes in the precision of the run, a CPU in float32.
    """
    on_gpu = device.type == "cuda"
    precision = resolve_precision(config.precision, "cuda") if on_gpu else "32-true"
    half = torch.float16 if precision == "16-mixed" else torch.bfloat16

    def answer(window: Tensor) -> Tensor:
        with torch.autocast(device.type, half, enabled=precision != "32-true"):
            return network(window)

    return predict_parts(
        answer,
        image,
        config.sampler.patch_size,
        overlap=config.trainer.overlap,
        mirror_axes=config.sampler.mirror_axes if config.trainer.mirror_predictions else (),
        device=device,
        progress=progress,
    )


def _numbers_only(parts: Iterator[Part], source: Path) -> Iterator[Part]:
    for part in parts:
        if part.logits.max().isnan():
            raise DataError(
                f"{source}: the network's answer is not a number in a part of the scan, so no label is right there. "
                "Check the scan's intensities for NaN and the run's loss, or predict with other weights."
            )
        yield part
