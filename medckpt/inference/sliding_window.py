"""Logits of a whole volume on the training grid, window by window."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from medckpt.blocks import Triple

Network = Callable[[Tensor], Tensor]


@torch.inference_mode()
def predict_logits(
    network: Network,
    image: Tensor,
    patch_size: Triple,
    *,
    overlap: float,
    device: torch.device,
    mirror_axes: Sequence[int] = (),
    windows: int = 1,
) -> Tensor:
    """Returns logits (classes, X, Y, Z) float32 on the CPU for an image (C, X, Y, Z).

    Windows overlap by `overlap` (0..1) and are blended with a Gaussian (as nnU-Net does). A volume smaller than the
    patch is padded with its minimum, as in training, and the result is cut back to it. With `mirror_axes` (0..2) each
    window is answered for every mirror image along them, and the answers, mirrored back, are averaged.
    """
    from monai.inferers import sliding_window_inference

    logits = sliding_window_inference(
        image[None],
        roi_size=patch_size,
        sw_batch_size=windows,
        predictor=lambda window: _mirrored_mean(network, window, mirror_axes),
        overlap=overlap,
        mode="gaussian",
        sigma_scale=0.125,
        cval=float(image.min()),
        sw_device=device,
        device=torch.device("cpu"),
    )
    assert isinstance(logits, Tensor)
    return logits[0]


def _mirrored_mean(network: Network, window: Tensor, axes: Sequence[int]) -> Tensor:
    """Returns the mean logits (B, classes, X, Y, Z), float32, over all mirror images of a window along `axes`."""
    subsets = [subset for count in range(len(axes) + 1) for subset in itertools.combinations(axes, count)]
    total: Tensor | None = None
    for subset in subsets:
        dims = [axis + 2 for axis in subset]
        logits = torch.flip(network(torch.flip(window, dims)).float(), dims)
        total = logits if total is None else total + logits
    assert total is not None
    return total / len(subsets)
