"""The learning rate as a function of how much of the run is done; nothing to save, nothing to jump on resume."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from medckpt.blocks import OptimizerConfig, TrainerConfig

if TYPE_CHECKING:
    from medckpt.training.state import Progress


def share_done(progress: Progress, config: TrainerConfig) -> float:
    """Returns how much of the run is done, 0..1: by steps or by the clock, whichever is further."""
    share = progress.step / config.max_steps
    if config.max_minutes is not None:
        share = max(share, progress.seconds / 60 / config.max_minutes)
    return min(1.0, share)


def learning_rate(share: float, config: OptimizerConfig) -> float:
    """Returns the learning rate at `share` (0..1) of the run: linear warm-up, then a cosine (arXiv:1608.03983)."""
    if share < config.warmup_share:
        # Never zero: the first step would be lost.
        return config.lr * max(share / config.warmup_share, 0.01)
    rest = (share - config.warmup_share) / (1 - config.warmup_share)
    low = config.lr * config.final_lr_share
    return low + (config.lr - low) * (1 + math.cos(math.pi * rest)) / 2
