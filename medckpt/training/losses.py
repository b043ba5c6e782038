"""The segmentation loss: Dice plus cross-entropy, in float32 whatever the precision of the network."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from medckpt.blocks import LossConfig


class DiceCrossEntropy(nn.Module):
    """Soft Dice (Milletari et al. 2016, arXiv:1606.04797) plus cross-entropy.

    `logits` are (B, classes, X, Y, Z) of any floating type, `label` is (B, 1, X, Y, Z) of integers. A class that a
    sample does not hold adds to the loss what the network predicts of it, and its smoothing keeps that bounded.
    """

    def __init__(self, config: LossConfig) -> None:
        super().__init__()
        from monai.losses import DiceLoss

        self.config = config
        self.dice = DiceLoss(
            softmax=True, to_onehot_y=True, include_background=config.include_background, batch=config.batch_dice
        )

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        with torch.autocast(logits.device.type, enabled=False):
            logits = logits.float()
            loss = logits.new_zeros(())
            if self.config.dice_weight:
                loss = loss + self.config.dice_weight * self.dice(logits, label)
            if self.config.ce_weight:
                cross_entropy = nn.functional.cross_entropy(logits, label[:, 0].long())
                loss = loss + self.config.ce_weight * cross_entropy
        return loss
