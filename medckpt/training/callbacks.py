"""What happens around the steps: averaged weights, saves, the log, and a stop that loses nothing."""

from __future__ import annotations

import csv
import io
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch

from medckpt.files import write_text
from medckpt.training import state
from medckpt.training.module import SegmentationModule, mean_dice
from medckpt.training.schedule import share_done

log = logging.getLogger("medckpt")


class Keeper(L.Callback):
    """Counts steps and seconds, averages weights, saves them, and stops the run in time or on request.

    weights/last.ckpt holds all that a run needs to go on, from the end of some step; weights/best.ckpt holds the
    weights of the best validation. On Ctrl-C or SIGTERM the step under way is finished and saved; a second Ctrl-C
    stops at once, and the last save stands.
    """

    def __init__(self, folder: Path, resumed: dict[str, Any] | None) -> None:
        self.last, self.best = folder / "weights" / "last.ckpt", folder / "weights" / "best.ckpt"
        self.average: state.AveragedWeights | None = None
        self.stop_asked = self.stopped_at_once = False
        self._resumed = resumed
        self._began = 0.0
        self._first_step = 0
        self._handlers: dict[int, Any] = {}

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(module, SegmentationModule)
        self._first_step = module.progress.step
        self.start_average(module)
        if self._resumed:
            groups = trainer.optimizers[0].param_groups
            settings = [{"weight_decay": group["weight_decay"], "betas": group["betas"]} for group in groups]
            trainer.optimizers[0].load_state_dict(self._resumed["optimizer"])
            for group, setting in zip(trainer.optimizers[0].param_groups, settings, strict=True):
                group.update(setting)  # the state is the old run's, the settings are this one's
            trainer.precision_plugin.load_state_dict(self._resumed["precision"])
            torch.set_rng_state(self._resumed["torch_rng"])
            self._resumed = None
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._ask_to_stop)
        except ValueError:  # not the main thread: whoever runs us handles signals
            log.debug("Signals are handled elsewhere.")

    def start_average(self, module: SegmentationModule) -> None:
        """Begins the average at the network's weights, or takes it up where the resumed run left it."""
        if module.config.trainer.ema_decay is None:
            return
        self.average = state.AveragedWeights(module.network, module.config.trainer.ema_decay)
        if self._resumed and self._resumed["average"] is not None:
            self.average.load(self._resumed["average"])

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        if self.stop_asked:
            self.stopped_at_once = True
            raise KeyboardInterrupt
        self.stop_asked = True
        log.warning("Stopping after this step; press Ctrl-C again to stop at once.")

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self._began = time.monotonic()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(module, SegmentationModule)
        progress, config = module.progress, module.config.trainer
        progress.seconds += time.monotonic() - self._began
        if trainer.world_size > 1:  # every process must come to the same learning rate and the same end
            seconds = torch.tensor(progress.seconds, dtype=torch.float64, device=module.device)
            progress.seconds = float(trainer.strategy.reduce(seconds, reduce_op="max"))
        if progress.step == self._first_step + trainer.global_step:
            return  # gradients are still being accumulated
        progress.step = self._first_step + trainer.global_step
        if self.average:
            self.average.update(progress.step)
        self.stop_asked = trainer.strategy.reduce_boolean_decision(self.stop_asked, all=False)
        ends = self.stop_asked or share_done(progress, config) >= 1
        if ends:
            trainer.should_stop = True
        if ends or progress.step % config.save_every == 0:
            self.save_last(trainer, module)

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(module, SegmentationModule)
        self.save_last(trainer, module)
        if self.average:
            self.average.swap()

    def on_validation_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if self.stop_asked:  # the step was saved before the validation began
            raise KeyboardInterrupt

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(module, SegmentationModule)
        progress, dice = module.progress, mean_dice(module.case_dice, module.classes)["dice_mean"]
        if dice is not None and (progress.best_dice is None or dice >= progress.best_dice):
            progress.best_dice, progress.best_step = dice, progress.step
            if trainer.is_global_zero:
                state.save(self.best, {"network": module.network.state_dict()}, progress)
        if self.average:
            self.average.swap()
        self.save_last(trainer, module)  # with the best Dice so far, so that a resumed run knows what to beat

    def save_last(self, trainer: L.Trainer, module: SegmentationModule) -> None:
        """Writes weights/last.ckpt; the network must hold its own weights, not their average."""
        if not trainer.is_global_zero:
            return
        content = {
            "network": module.network.state_dict(),
            "average": self.average.average if self.average else None,
            "optimizer": trainer.optimizers[0].state_dict(),
            "precision": trainer.precision_plugin.state_dict(),
            "torch_rng": torch.get_rng_state(),
        }
        state.save(self.last, content, module.progress)

    def restore_signals(self) -> None:
        """Gives Ctrl-C and SIGTERM back to whoever had them; Lightning's own teardown is not reached by an error."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}


class RunLog(L.Callback):
    """Writes metrics.csv (one row per log interval or validation) and, if asked, TensorBoard events.

    Columns: step, minutes (of training), lr, loss (mean since the last row), dice_mean, dice_<class>.
    """

    def __init__(self, folder: Path, classes: dict[str, int], *, first_step: int, tensorboard: bool) -> None:
        self.path = folder / "metrics.csv"
        self.columns = ["step", "minutes", "lr", "loss", "dice_mean", *(f"dice_{name}" for name in classes)]
        self._losses: list[torch.Tensor] = []
        self._rows = _rows_up_to(self.path, first_step)
        self._open_writer = (lambda: _tensorboard(folder / "tensorboard", first_step)) if tensorboard else None
        self._writer: Any = None

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            self._writer = self._open_writer() if self._open_writer else None
            self._save()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(module, SegmentationModule)
        self._losses.append(outputs["loss"].detach())
        step = module.progress.step
        stepped = (batch_idx + 1) % module.config.trainer.accumulate == 0
        if stepped and step and (step % module.config.trainer.log_every == 0 or trainer.should_stop):
            loss = float(torch.stack(self._losses).mean()) * module.config.trainer.accumulate
            self._losses = []
            self.add(module, {"lr": trainer.optimizers[0].param_groups[0]["lr"], "loss": loss})

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(module, SegmentationModule)
        dice = mean_dice(module.case_dice, module.classes)
        self.add(module, {key if key == "dice_mean" else f"dice_{key}": value for key, value in dice.items()})

    def add(self, module: SegmentationModule, values: dict[str, float | None]) -> None:
        """Adds a row at the run's present step."""
        progress = module.progress
        if not module.trainer.is_global_zero:
            return
        row = {"step": progress.step, "minutes": f"{progress.seconds / 60:.4f}"}
        known = {key: value for key, value in values.items() if value is not None}
        self._rows.append({**row, **{key: f"{value:.6g}" for key, value in known.items()}})
        self._save()
        if self._writer:
            for key, value in known.items():
                self._writer.add_scalar(key, value, progress.step)

    def _save(self) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(self._rows)
        write_text(self.path, text.getvalue())

    def teardown(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        if self._writer:
            self._writer.close()

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, module, "fit")


def _rows_up_to(path: Path, step: int) -> list[dict[str, Any]]:
    """Returns the rows of a run that goes on, without those of steps that will be done again."""
    if not step or not path.is_file():
        return []
    with path.open(newline="") as stream:
        return [row for row in csv.DictReader(stream) if int(row["step"]) <= step]


def _tensorboard(folder: Path, first_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(folder), purge_step=first_step + 1)
    except (ImportError, OSError) as error:  # a logger never ends a training
        log.warning("TensorBoard events are not written: %s", error)
        return None


Report = Callable[[SegmentationModule, float | None], None]


class OnProgress(L.Callback):
    """Calls `report(module, loss)` after each step and `report(module, None)` after each validation."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(module, SegmentationModule)
        self.report(module, float(outputs["loss"]) * module.config.trainer.accumulate)

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(module, SegmentationModule)
        self.report(module, None)
