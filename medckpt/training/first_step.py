"""The true peak of a run's first full step, to hold beside its forecast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from medckpt.memory.measure import AllocationRecorder, held_bytes
from medckpt.training.callbacks import Keeper
from medckpt.training.module import SegmentationModule

CPU_MEASURE = "allocator events of the first full step"
CUDA_MEASURE = "torch.cuda.max_memory_allocated of the first full step"


class FirstFullStep(L.Callback):
    """Measures the second optimizer step of a fit: in the first the optimizer's states do not exist yet.

    On a CPU these are the allocator's own events over what is held when the step begins; on a GPU the allocator's
    statistics. `report` gets the bytes. A run of one step is not measured.
    """

    def __init__(self, keeper: Keeper, accumulate: int, report: Callable[[int], None]) -> None:
        self._keeper = keeper
        self._first, self._last = accumulate, 2 * accumulate - 1
        self._report = report
        self._recorder: AllocationRecorder | None = None
        self._held = 0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if module.device.type == "cuda" or not trainer.is_global_zero:
            return
        assert isinstance(module, SegmentationModule)
        # From before the first step, so that the recorder knows whatever is freed in the second.
        self._held = held_bytes(self._tensors(trainer, module))
        self._recorder = AllocationRecorder()
        self._recorder.start()

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx != self._first:
            return
        if self._recorder is not None:
            self._recorder.count_from_here()
        elif module.device.type == "cuda":
            torch.cuda.synchronize(module.device)
            torch.cuda.reset_peak_memory_stats(module.device)

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx != self._last or not trainer.is_global_zero:
            return
        if module.device.type == "cuda":
            self._report(torch.cuda.max_memory_allocated(module.device))
        elif self._recorder is not None:
            peak, self._recorder = self._recorder.stop().peak, None
            self._report(self._held + peak)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self._recorder is not None:  # stopped before the second step was done
            self._recorder.stop()
            self._recorder = None

    def _tensors(self, trainer: L.Trainer, module: SegmentationModule) -> list[Tensor]:
        network = [*module.network.parameters(), *module.network.buffers()]
        states = [list(state.values()) for state in trainer.optimizers[0].state.values()]
        averages = self._keeper.average.average if self._keeper.average else []
        return [leaf for leaf in tree_leaves([network, states, averages]) if isinstance(leaf, Tensor)]
