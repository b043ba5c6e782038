"""The straight line of each verb, top to bottom."""

from __future__ import annotations

import dataclasses
import logging
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from medckpt import console, machine, planner, run_folder, typed
from medckpt.config import RunConfig, compose_here, resolve_device
from medckpt.datasets import phantom
from medckpt.datasets.layouts import Case, Dataset, open_dataset
from medckpt.datasets.prepare import PreparedCase, median_spacing, prepare, read_case_label
from medckpt.datasets.reading import write_label
from medckpt.datasets.split import split_patients
from medckpt.errors import ConfigError
from medckpt.files import write_json
from medckpt.geometry import canonical_grid, resample
from medckpt.inference.inputs import check_targets, find_inputs
from medckpt.inference.predict import Predictor
from medckpt.memory.apply import apply_recompute
from medckpt.memory.profile import MemoryProfile
from medckpt.memory.regions import find_regions
from medckpt.models.build import build_model
from medckpt.profiles import load_profile, profile_machine
from medckpt.report.curves import draw_curves
from medckpt.report.html import write_report
from medckpt.report.overlay import draw_overlay
from medckpt.training import state
from medckpt.training.first_step import CPU_MEASURE, CUDA_MEASURE
from medckpt.training.fit import fit
from medckpt.training.metrics import CaseScore, score_case, summarize
from medckpt.training.precision import Device, prepare_network

log = logging.getLogger("medckpt")

OVERLAYS = 4
"""Validation cases that get a picture in the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a training left behind."""

    folder: Path
    metrics: dict[str, Any] | None
    """The body of metrics.json; None if the run was interrupted, or in a DDP process that does not evaluate."""
    interrupted: bool = False


def train(config: RunConfig, *, resume: Path | None = None, command: str = "") -> Trained:
    """Trains as `config` says, evaluates on the validation cases, and leaves a run folder.

    Args:
        config: from `compose`, or from the run folder that is resumed.
        resume: a run folder that was interrupted; its split, spacing and weights are used.
        command: what the user typed, for the report.

    Raises:
        MedckptError: anything that is wrong with configuration or data, before a run folder is made.
    """
    device = resolve_device(typed.to_plain(config))
    facts = machine.prepare_machine(device)
    dataset = open_data(config)
    if resume:
        run_folder.prepare_resume(resume, config, dataset)
        training, validation = run_folder.load_split(resume, dataset)
    else:
        training, validation = split_patients(dataset.cases, config.data.validation, config.seed)
    if config.data.spacing_mm is None:
        spacing = median_spacing(training)
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, spacing_mm=spacing))
    console.data(dataset, config, training, validation)
    prepared_training = _prepare(training, dataset, config, "training cases")
    prepared_validation = _prepare(validation, dataset, config, "validation cases")
    network = make_network(config, dataset, device)
    folder = resume or run_folder.make(config, dataset, training, validation, facts)
    console.start(folder, config, device, network)
    note_peak = _foresee_step(config, dataset, network, folder, device)
    with console.training(config) as report:
        fitted = fit(
            network,
            config,
            prepared_training,
            prepared_validation,
            classes=class_indices(dataset),
            device=device,
            folder=folder,
            report=report,
            on_peak=note_peak,
        )
    if fitted.interrupted:
        console.interrupted(folder, fitted.progress)
    if fitted.interrupted or machine.rank() > 0:
        return Trained(folder=folder, metrics=None, interrupted=fitted.interrupted)

    predictor = Predictor(
        network=network,
        config=config,
        labels=dataset.labels,
        channels=len(dataset.channel_names),
        device=torch.device(device),
    )
    scores = evaluate_cases(predictor, dataset, validation, folder, keep=config.trainer.save_predictions)
    return _write_results(folder, config, scores, fitted.progress, command)


def _foresee_step(
    config: RunConfig, dataset: Dataset, network: torch.nn.Module, folder: Path, device: Device
) -> Callable[[int], None] | None:
    """Prints and notes the forecast of a step; returns what prints and notes the measured peak beside it."""
    if machine.rank() > 0:
        return None
    task = planner.Task(channels=len(dataset.channel_names), classes=len(dataset.labels))
    profile = load_profile(config.memory)
    predicted: int | None = None
    try:
        forecast = planner.forecast_run(config, profile, task, network)
    except Exception as error:  # the trace leans on torch's inner parts, and a training must not fall with it
        log.warning("No forecast of this step's memory: %s", error)
    else:
        console.foreseen(forecast)
        forecast.plot(folder / "memory_timeline.png")
        predicted = forecast.allocated_bytes
        run_folder.note_memory(folder, {"predicted_peak_bytes": predicted, "forecast": forecast.to_dict()})

    def note_peak(found: int) -> None:
        if predicted is not None:
            console.measured(predicted, found)
        measure = CUDA_MEASURE if device == "cuda" else CPU_MEASURE
        run_folder.note_memory(folder, {"measured_peak_bytes": found, "measure": measure})

    return note_peak


def _write_results(
    folder: Path, config: RunConfig, scores: list[CaseScore], progress: state.Progress, command: str
) -> Trained:
    """Writes metrics, memory, curves and report, and prints the screen at the end."""
    metrics = summarize(scores) | {
        "recipe": config.recipe,
        "weights": "weights/best.ckpt",
        "weights_step": progress.best_step,
        "steps": progress.step,
        "minutes": round(progress.seconds / 60, 3),
        "patches_per_step": config.sampler.patches_per_step * config.trainer.accumulate * config.trainer.devices,
        "command": command,
    }
    write_json(folder / "metrics.json", metrics)
    memory = run_folder.note_memory(folder, machine.process_peak(resolve_device(typed.to_plain(config))))
    draw_curves(folder / "metrics.csv", folder / "curves.png")
    report_file = write_report(folder)
    console.summary(metrics, memory, report_file, share=progress.step / config.trainer.max_steps)
    return Trained(folder=folder, metrics=metrics)


def plan(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    channels: int | None = None,
    classes: int | None = None,
    sides: Sequence[int] | None = None,
    output: Path = Path("plans"),
    workers: int = 1,
) -> planner.StepPlan:
    """Forecasts a recipe's training step on a device that need not be here, prints it, and leaves picture and JSON.

    Args:
        recipe: name or path.
        overrides: `key=value` words; `memory=` names the device, `data=` is read for channels and classes only.
        channels: of a scan; None takes the data's, or 1.
        classes: background included; None takes the data's, or 14.
        sides: of the cubes in the table; None takes the usual ones.
        workers: processes that trace the table; above 1 a script needs the `if __name__ == "__main__"` guard.
        output: folder of the plan's own folder, which is named by recipe and device and replaced.

    Raises:
        ConfigError: as `compose`; a device or precision that is not known; a network that cannot be traced.
    """
    composed = compose_here(recipe, overrides, elsewhere=True)
    config = composed.config
    profile = load_profile(config.memory)
    console.scaled(recipe, composed.scaled)
    task = _task(config, channels, classes)
    sides = planner.SIDES if sides is None else sides
    # The profile is of a device that the training will find by itself.
    kept = [word for word in overrides if not word.startswith("memory=")]
    command = shlex.join(["medckpt", "train", f"recipe={recipe}", *kept])
    with console.bar("trace", planner.traces_of(config, sides)) as advance:
        found = planner.plan(config, profile, task, sides=sides, workers=workers, command=command, advance=advance)
    folder = output / re.sub(r"[^\w.-]+|^\.+", "_", f"{config.recipe}-{profile.name}")
    found.chosen.plot(folder / "memory_timeline.png")
    write_json(folder / "plan.json", found.to_dict())
    console.planned(found, folder / "memory_timeline.png")
    return found


def profile(output: Path | None = None) -> MemoryProfile:
    """Measures this machine and writes a memory profile of it; see `medckpt.profiles.profile_machine`."""
    with console.bar("measure", None) as advance:
        measured, path = profile_machine(output, lambda what, done, total: advance())
    console.profiled(measured, path)
    return measured


def predict(run: str | Path, input_path: str | Path, output: str | Path, *, weights: str = "best") -> list[Path]:
    """Segments one scan or a folder of scans with a trained run; writes NIfTI label maps on the scans' own grids.

    Args:
        run: a run folder.
        input_path: a volume file, a DICOM series folder, or a folder of either.
        output: a `.nii.gz` file (for one scan) or a folder.
        weights: `best`, `last`, or the path of a weights file.

    Returns:
        The files written.
    """
    output = Path(output)
    predictor = load_predictor(Path(run), weights)
    cases = find_inputs(Path(input_path), predictor.channels)
    single = output.name.endswith((".nii", ".nii.gz"))
    if single and len(cases) > 1:
        raise ConfigError(f"output={output}: there are {len(cases)} scans, so the output must be a folder.")
    targets = [output if single else output / f"{case.name}.nii.gz" for case in cases]
    check_targets(targets, [image for case in cases for image in case.images])
    with console.bar("predict", len(cases)) as advance:
        for case, target in zip(cases, targets, strict=True):
            labels, volumes = predictor.predict(case)
            write_label(target, labels, volumes[0].grid)
            advance()
    console.predicted(targets, predictor.labels)
    return targets


def evaluate(
    run: Path, *, data: str | None = None, output: Path | None = None, weights: str = "best"
) -> dict[str, Any]:
    """Scores a trained run: on its own validation cases, or on all labelled cases of another data set.

    Returns:
        The body of evaluation.json, which is written to `output` (default: RUN/evaluation) beside the label maps.
    """
    run = Path(run)
    predictor = load_predictor(run, weights)
    dataset = open_data(predictor.config) if data is None else open_dataset(Path(data))
    run_folder.require_same_data(run, dataset)
    cases = run_folder.load_split(run, dataset)[1] if data is None else dataset.cases
    folder = Path(output) if output else run / "evaluation"
    metrics = summarize(evaluate_cases(predictor, dataset, cases, folder, keep=True))
    metrics |= {"run": str(run), "data": str(dataset.root), "weights": weights}
    write_json(folder / "evaluation.json", metrics)
    console.scores(metrics)
    return metrics


def evaluate_cases(
    predictor: Predictor, dataset: Dataset, cases: list[Case] | tuple[Case, ...], folder: Path, *, keep: bool
) -> list[CaseScore]:
    """Predicts and scores cases on their own grids; leaves overlays and, with `keep`, label maps in `folder`."""
    classes = {name: dataset.labels[name] for name in dataset.classes}
    data = predictor.config.data
    scores = []
    with console.bar("evaluate", len(cases)) as advance:
        for number, case in enumerate(cases):
            prediction, volumes = predictor.predict(case)
            grid = volumes[0].grid
            reference = read_case_label(case, dataset, grid).array
            scores.append(score_case(case.name, prediction, reference, grid.spacing_mm, classes))
            if keep:
                write_label(folder / "predictions" / f"{case.name}.nii.gz", prediction, grid)
            if number < OVERLAYS:
                upright = canonical_grid(grid, None)
                image, expected, found = (
                    resample(array, grid, upright, order=0, fill=0)
                    for array in (volumes[0].array, reference, prediction)
                )
                window = data.window_hu if data.intensity == "window" else None
                picture = folder / "overlays" / f"{case.name}.png"
                draw_overlay(image, expected, found, upright.spacing_mm, classes, window, case.name, picture)
            advance()
    return scores


def open_data(config: RunConfig) -> Dataset:
    """Opens the data set that a configuration names; the built-in phantom is made if it is not there yet."""
    if config.data.path != "phantom":
        return open_dataset(Path(config.data.path))
    with console.bar("make the phantom CT", None) as advance:
        return open_dataset(phantom.make_phantom(phantom.phantom_folder(), progress=lambda done, total: advance()))


def _task(config: RunConfig, channels: int | None, classes: int | None) -> planner.Task:
    """Returns what is asked for, else what the data say, else one channel and 14 classes (as in BTCV)."""
    if config.data.path == "none":
        assumed = channels is None or classes is None
        return planner.Task(channels=channels or 1, classes=classes or 14, assumed=assumed)
    if config.data.path == "phantom":
        return planner.Task(channels=channels or 1, classes=classes or len(phantom.PHANTOM_LABELS))
    dataset = open_data(config)
    return planner.Task(channels=channels or len(dataset.channel_names), classes=classes or len(dataset.labels))


def make_network(config: RunConfig, dataset: Dataset, device: Device) -> torch.nn.Module:
    """Builds the network from the seed, with recompute applied as `activation_ckpt` says."""
    torch.manual_seed(config.seed)
    network = build_model(
        config.model,
        in_channels=len(dataset.channel_names),
        out_channels=len(dataset.labels),
        patch=config.sampler.patch_size,
    )
    prepare_network(network, config.precision, device)
    return apply_recompute(network, find_regions(network, config.activation_ckpt))


def class_indices(dataset: Dataset) -> dict[str, int]:
    """Returns the network's output channel of each foreground class: the rank of its label value."""
    ranks = {value: rank for rank, value in enumerate(sorted(dataset.labels.values()))}
    return {name: ranks[dataset.labels[name]] for name in dataset.classes}


def load_predictor(run: Path, weights: str = "best") -> Predictor:
    """Returns a run's network with its weights, ready to predict; `weights` as in `predict`."""
    config, facts = run_folder.load_config(run), run_folder.load_facts(run)
    path = run / "weights" / f"{weights}.ckpt" if weights in ("best", "last") else Path(weights)
    if weights == "best" and not path.is_file() and not (run / "metrics.json").is_file():
        path = run / "weights" / "last.ckpt"
        log.warning("%s: interrupted before its first validation; its last weights are used.", run)
    device = resolve_device(typed.to_plain(config))
    machine.prepare_machine(device)
    network = build_model(
        config.model,
        in_channels=len(facts.channel_names),
        out_channels=len(facts.labels),
        patch=config.sampler.patch_size,
    )
    state.load_weights(path, network)
    return Predictor(
        network=network,
        config=config,
        labels=facts.labels,
        channels=len(facts.channel_names),
        device=torch.device(device),
    )


def _prepare(cases: tuple[Case, ...], dataset: Dataset, config: RunConfig, what: str) -> tuple[PreparedCase, ...]:
    with console.bar(f"prepare {what}", len(cases)) as advance:
        threads = machine.cpu_count()
        return prepare(cases, dataset, config.data, threads=threads, progress=lambda done, total: advance())
