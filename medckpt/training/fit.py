"""From a network and prepared cases to trained weights in a run folder, by Lightning's Trainer."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch
from torch import nn

from medckpt import machine
from medckpt.config import RunConfig
from medckpt.datasets.module import PatchDataModule
from medckpt.datasets.prepare import PreparedCase
from medckpt.memory.plan import MemoryPlan
from medckpt.training import state
from medckpt.training.callbacks import Keeper, OnProgress, Report, RunLog
from medckpt.training.first_step import FirstFullStep
from medckpt.training.module import SegmentationModule, mean_dice
from medckpt.training.precision import Device, prepare_network, resolve_precision
from medckpt.training.schedule import share_done


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """How a training ended."""

    progress: state.Progress
    interrupted: bool


def fit(
    network: nn.Module,
    config: RunConfig,
    training: Sequence[PreparedCase],
    validation: Sequence[PreparedCase],
    *,
    classes: dict[str, int],
    device: Device,
    folder: Path,
    report: Report | None = None,
    on_peak: Callable[[int], None] | None = None,
    plan: MemoryPlan | None = None,
) -> Fitted:
    """Trains `network` in place, from weights/last.ckpt of the run folder if there is one, else from its weights.

    `on_peak` gets the measured peak bytes of the first full step. `plan` is applied to `network` already. The network
    is left with the weights that a prediction should use: the averaged ones where they are kept.
    """
    resumed, progress = None, state.Progress()
    if (folder / "weights" / "last.ckpt").is_file():
        resumed, progress = state.load(folder / "weights" / "last.ckpt")
        network.load_state_dict(resumed["network"])
    first_step = progress.step
    module = SegmentationModule(network, config, classes, progress, plan)
    keeper = Keeper(folder, resumed)
    callbacks: list[L.Callback] = [
        keeper,
        RunLog(folder, classes, first_step=first_step, tensorboard=config.trainer.tensorboard),
        *([FirstFullStep(keeper, config.trainer.accumulate, on_peak)] if on_peak else []),
        *([OnProgress(report)] if report else []),
    ]
    if share_done(progress, config.trainer) < 1:
        _run(module, config, keeper, callbacks, training, validation, device, first_step)
    else:
        keeper.start_average(module)
    module.to(torch.device(device))  # Lightning leaves it on the CPU
    if keeper.average:
        keeper.average.swap()
    if not keeper.stop_asked and machine.rank() == 0:
        _choose_weights(module, validation[: config.trainer.validate_cases], folder)
    return Fitted(progress=progress, interrupted=keeper.stop_asked)


def _choose_weights(module: SegmentationModule, validation: Sequence[PreparedCase], folder: Path) -> None:
    """Leaves the best weights in the network and in weights/best.ckpt: the last ones, or an earlier validation's."""
    progress, best = module.progress, folder / "weights" / "best.ckpt"
    if progress.best_dice is not None:
        module.eval()
        module.case_dice = {}
        for batch in PatchDataModule.cases(validation):
            module.validation_step(batch, 0)
        dice = mean_dice(module.case_dice, module.classes)["dice_mean"]
        if dice is None or dice < progress.best_dice:
            module.network.load_state_dict(state.load(best)[0]["network"])
            return
        progress.best_dice = dice
    progress.best_step = progress.step
    state.save(best, {"network": module.network.state_dict()}, progress)


def _run(
    module: SegmentationModule,
    config: RunConfig,
    keeper: Keeper,
    callbacks: list[L.Callback],
    training: Sequence[PreparedCase],
    validation: Sequence[PreparedCase],
    device: Device,
    first_step: int,
) -> None:
    settings, accumulate = config.trainer, config.trainer.accumulate
    steps = settings.max_steps - first_step
    data = PatchDataModule(
        training,
        validation[: settings.validate_cases],
        config.sampler,
        seed=config.seed,
        start=first_step * accumulate,
        stop=settings.max_steps * accumulate,
    )
    every = settings.validate_every
    validates = every is not None and every < steps
    # Lightning's advice is for its own users: what a person should know here, the console says.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    precision = resolve_precision(config.precision, device)
    prepare_network(module.network, config.precision, device)
    trainer = L.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=settings.devices,
        strategy="ddp" if settings.devices > 1 else "auto",
        precision=precision,
        max_steps=steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=config.optimizer.clip_norm,
        val_check_interval=every * accumulate if validates and every else None,
        limit_val_batches=None if validates else 0,
        check_val_every_n_epoch=None if validates else 1,
        num_sanity_val_steps=0,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    with warnings.catch_warnings():
        # Workers are our own choice (on a CPU they would take the cores that train).
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", module="lightning.pytorch.utilities._pytree")
        try:
            trainer.fit(module, datamodule=data)
        except SystemExit:
            # Lightning turns a KeyboardInterrupt into an exit; one that was asked for once has been saved, and the
            # run goes on to say so.
            if not keeper.stop_asked or keeper.stopped_at_once:
                raise KeyboardInterrupt from None
        finally:
            keeper.restore_signals()
