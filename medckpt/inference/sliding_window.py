"""Logits of a whole volume on the training grid, window by window."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from medckpt.blocks import Triple

Network = Callable[[Tensor], Tensor]


@torch.inference_mode()
def predict_logits(
    network: Network, image: Tensor, patch_size: Triple, *, overlap: float, device: torch.device, windows: int = 1
) -> Tensor:
    """Returns logits (classes, X, Y, Z) float32 on the CPU for an image (C, X, Y, Z).

    Windows overlap by `overlap` (0..1) and are blended with a Gaussian (as nnU-Net does). A volume smaller than the
    patch is padded with its minimum, as in training, and the result is cut back to it.
    """
    from monai.inferers import sliding_window_inference

    logits = sliding_window_inference(
        image[None],
        roi_size=patch_size,
        sw_batch_size=windows,
        predictor=lambda window: network(window).float(),
        overlap=overlap,
        mode="gaussian",
        sigma_scale=0.125,
        cval=float(image.min()),
        sw_device=device,
        device=torch.device("cpu"),
    )
    assert isinstance(logits, Tensor)
    return logits[0]
