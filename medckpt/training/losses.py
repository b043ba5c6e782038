"""The segmentation loss: Dice plus cross-entropy, in float32 whatever the precision of the network."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from medckpt.blocks import LossConfig
from medckpt.lean.dice_ce import Sums, dice_ce_sums, of_sums


class DiceCrossEntropy(nn.Module):
    """Soft Dice (Milletari et al. 2016, arXiv:1606.04797) plus cross-entropy.

    `logits` are (B, classes, X, Y, Z) of any floating type, `label` is (B, 1, X, Y, Z) of integers. A class that a
    sample does not hold adds to the loss what the network predicts of it, and its smoothing keeps that bounded.

    Where Dice is taken over the batch (`over_batch`) the loss is no mean over samples, but a function of sums over
    them: `of_statistics` of the sum of each sample's `statistics`. So a step can run sample by sample all the same.
    """

    def __init__(self, config: LossConfig) -> None:
        super().__init__()
        self.config = config

    @property
    def over_batch(self) -> bool:
        """Whether the samples of a batch depend on one another."""
        return self.config.batch_dice and self.config.dice_weight != 0

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        return self._of(self._sums(logits, label), batch_dice=self.config.batch_dice)

    def statistics(self, logits: Tensor, label: Tensor) -> Tensor:
        """Returns what the loss over a batch needs of these samples, shape (2 + 3 x classes,); it adds up over them."""
        sums = self._sums(logits, label)
        rows = torch.stack([sums.overlap, sums.predicted, sums.present], 1).sum(0).flatten()
        return torch.cat([sums.entropy[None], rows.new_full((1,), logits[:, 0].numel()), rows])

    def of_statistics(self, statistics: Tensor) -> Tensor:
        """Returns the loss of a batch from the sum of its samples' `statistics`."""
        overlap, predicted, present = statistics[2:].reshape(3, 1, -1)
        return self._of(Sums(statistics[0], overlap, predicted, present, statistics[1]), batch_dice=True)

    def _sums(self, logits: Tensor, label: Tensor) -> Sums:
        config = self.config
        return dice_ce_sums(logits, label, with_dice=config.dice_weight != 0, with_entropy=config.ce_weight != 0)

    def _of(self, sums: Sums, *, batch_dice: bool) -> Tensor:
        config = self.config
        return of_sums(
            sums,
            dice_weight=config.dice_weight,
            ce_weight=config.ce_weight,
            include_background=config.include_background,
            batch_dice=batch_dice,
        )
