"""The LightningModule: one training step, one validation case, the optimizer."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from medckpt.config import RunConfig
from medckpt.errors import MedckptError, listing
from medckpt.inference.predict import predict_case
from medckpt.inference.sliding_window import winners
from medckpt.memory.bind import bind
from medckpt.memory.plan import MemoryPlan
from medckpt.training.losses import DiceCrossEntropy
from medckpt.training.metrics import dice_per_class
from medckpt.training.schedule import learning_rate, share_done
from medckpt.training.state import Progress


class SegmentationModule(L.LightningModule):
    """Trains `network` on patches {"image": (B, C, X, Y, Z), "label": (B, 1, X, Y, Z), "case": names}."""

    def __init__(
        self,
        network: nn.Module,
        config: RunConfig,
        classes: dict[str, int],
        progress: Progress,
        plan: MemoryPlan | None = None,
    ) -> None:
        """`plan` is applied to `network` already; what it does with the loss inside is done here."""
        super().__init__()
        self.network = network
        self.config = config
        self.classes = classes
        self.progress = progress
        self.loss = DiceCrossEntropy(config.loss)
        levers = (plan.tail, plan.micro_batches) if plan else (False, 1)
        self.step = bind(network, self.loss, tail=levers[0], micro_batches=levers[1], scale=self._loss_scale)
        self.case_dice: dict[str, dict[str, float | None]] = {}
        """Dice per class of each case of the validation under way."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        rate = learning_rate(share_done(self.progress, self.config.trainer), self.config.optimizer)
        for optimizer in self.trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            if batch_idx % self.config.trainer.accumulate == 0:
                # Lightning drops the last step's gradients after the forward pass; they need not be there during it.
                optimizer.zero_grad()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = self.step(batch["image"], batch["label"])
        # Under fp16 the GradScaler skips such a step and lowers its factor; elsewhere it would spoil the weights.
        if self.trainer.precision != "16-mixed" and not torch.isfinite(loss):
            raise MedckptError(
                f"step {self.progress.step + 1}: the loss is {loss.item()}. Cases of this step: "
                f"{listing(batch['case'])}. Check their intensities, or lower optimizer.lr."
            )
        return loss

    def _loss_scale(self) -> float:
        """The factor that the loss of this step will be multiplied by: under float16 small gradients need it early."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        return 1.0 if scaler is None else float(scaler.get_scale())

    def on_validation_epoch_start(self) -> None:
        self.case_dice = {}

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        prediction = self.predict_labels(batch["image"][0])
        reference = batch["label"][0, 0].cpu().numpy()
        self.case_dice[batch["case"][0]] = dice_per_class(prediction, reference, self.classes)

    def predict_labels(self, image: Tensor) -> np.ndarray:
        """Returns the class of every voxel (X, Y, Z) of one image (C, X, Y, Z) on the training grid."""
        x, y, z = image.shape[1:]
        return winners(predict_case(self.network, image, self.config, self.device), (x, y, z))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        config = self.config.optimizer
        # Weight decay pulls on weights that multiply; biases, norms and tables of one value per channel keep theirs.
        decayed = [p for p in self.network.parameters() if p.requires_grad and p.ndim > 1]
        kept = [p for p in self.network.parameters() if p.requires_grad and p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": kept, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)


def mean_dice(case_dice: dict[str, dict[str, float | None]], classes: dict[str, int]) -> dict[str, float | None]:
    """Returns Dice per class over the cases that count it, and `dice_mean` over the classes that have one."""
    per_class: dict[str, float | None] = {}
    for name in classes:
        counted = [dice for scores in case_dice.values() if (dice := scores[name]) is not None]
        per_class[name] = sum(counted) / len(counted) if counted else None
    known = [dice for dice in per_class.values() if dice is not None]
    return {"dice_mean": sum(known) / len(known) if known else None, **per_class}
