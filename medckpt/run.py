"""The straight line of each verb, top to bottom."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from medckpt import console, machine, plan_screen, run_folder, step_memory, typed
from medckpt.config import RunConfig, resolve_device
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
from medckpt.profiles import profile_machine
from medckpt.recipe_step import Task
from medckpt.report.curves import draw_curves
from medckpt.report.html import write_report
from medckpt.report.overlay import draw_overlay
from medckpt.training import state
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
    from medckpt.training.fit import fit  # Lightning: seconds that a plan has no use for

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
    task = Task(channels=len(dataset.channel_names), classes=len(dataset.labels))
    planned = step_memory.plan_step(config, task, network)
    folder = resume or run_folder.make(config, dataset, training, validation, facts)
    console.start(folder, config, device, network)
    step_memory.note_plan(planned, folder)
    note_peak = step_memory.foresee(config, task, network, folder, device, planned.forecast if planned else None)
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
            plan=planned.plan if planned else None,
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


def profile(output: Path | None = None) -> MemoryProfile:
    """Measures this machine and writes a memory profile of it; see `medckpt.profiles.profile_machine`."""
    load, cores = machine.load_of_others(), machine.cpu_count()
    if load is not None and load > cores / 2:
        log.warning("This machine is busy (load %.1f on %d cores): the profile tells what is left of it.", load, cores)
    with console.bar("measure", None) as advance:
        measured, path = profile_machine(output, lambda what, done, total: advance())
    plan_screen.profiled(measured, path)
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
            labels, volumes = predictor.predict(case, advance.within)
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
            prediction, volumes = predictor.predict(case, advance.within)
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
