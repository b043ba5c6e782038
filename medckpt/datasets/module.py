"""The DataModule: patches for training from any step on, whole prepared cases for validation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from medckpt.blocks import SamplerConfig
from medckpt.datasets.patches import PatchDataset, StepBatches
from medckpt.datasets.prepare import PreparedCase

MOST_WORKERS = 8


class CaseDataset(TorchDataset[dict[str, Any]]):
    """Whole prepared cases: {"image": (C, X, Y, Z) float32, "label": (1, X, Y, Z), "case": name}."""

    def __init__(self, cases: Sequence[PreparedCase]) -> None:
        self.cases = tuple(cases)

    def __len__(self) -> int:
        return len(self.cases)

    def __getitem__(self, index: int) -> dict[str, Any]:
        case = self.cases[index]
        image, label = torch.tensor(case.image()), torch.tensor(case.label())[None]
        return {"image": image, "label": label, "case": case.name}


class PatchDataModule(L.LightningDataModule):
    """Feeds forward passes `start`..`stop` of a run, and its validation cases one by one."""

    def __init__(
        self,
        training: Sequence[PreparedCase],
        validation: Sequence[PreparedCase],
        config: SamplerConfig,
        *,
        seed: int,
        start: int,
        stop: int,
    ) -> None:
        super().__init__()
        self.training, self.validation = training, validation
        self.config, self.seed = config, seed
        self.start, self.stop = start, stop

    def train_dataloader(self) -> DataLoader[dict[str, Any]]:
        assert self.trainer is not None
        rank, world = self.trainer.global_rank, self.trainer.world_size
        on_gpu = self.trainer.strategy.root_device.type == "cuda"
        workers = default_workers(on_gpu) if self.config.workers is None else self.config.workers
        batches = StepBatches(self.start, self.stop, self.config.patches_per_step, rank=rank, world=world)
        return DataLoader(
            PatchDataset(self.training, self.config, self.seed),
            batch_sampler=batches,
            num_workers=workers,
            pin_memory=on_gpu,
            persistent_workers=workers > 0,
        )

    def val_dataloader(self) -> DataLoader[dict[str, Any]]:
        return self.cases(self.validation)

    @staticmethod
    def cases(cases: Sequence[PreparedCase]) -> DataLoader[dict[str, Any]]:
        """Returns a loader of whole cases, one by one."""
        return DataLoader(CaseDataset(cases), batch_size=1)


def default_workers(on_gpu: bool) -> int:
    """Returns how many loader processes to start: none where the CPU itself trains."""
    return min(MOST_WORKERS, max(1, (os.cpu_count() or 2) - 1)) if on_gpu else 0
