"""The straight line of each verb, top to bottom."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from medckpt import console, machine, plan_screen, run_folder, step_memory, typed
from medckpt.config import RunConfig, resolve_device
from medckpt.datasets import phantom
from medckpt.datasets.check.quick import failing_cases
from medckpt.datasets.layouts import Case, Dataset, Fault, open_dataset
from medckpt.datasets.prepare import (
    PreparedCase,
    is_prepared,
    median_spacing,
    prepare,
    read_case_label,
    unusable,
)
from medckpt.datasets.reading import read_otherwise, write_label
from medckpt.datasets.split import split_patients
from medckpt.errors import DataError
from medckpt.files import write_json
from medckpt.geometry import canonical_grid, resample
from medckpt.inference import export
from medckpt.inference.dicom_seg import SegType
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
    dropped: dict[str, str] = {}
    dataset, training, validation = _choose_cases(config, resume, dropped)
    if config.data.spacing_mm is None:
        spacing = median_spacing(training, config.data)
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, spacing_mm=spacing))
    console.data(dataset, config, training, validation)
    failed = dropped if config.data.drop_failed and not resume else None
    prepared_training = _prepare(training, dataset, config, "training cases", failed)
    prepared_validation = _prepare(validation, dataset, config, "validation cases", failed)
    training, validation = _left(training, dropped), _left(validation, dropped)
    console.dropped(dropped)
    network = make_network(config, dataset, device)
    task = Task(channels=len(dataset.channel_names), classes=len(dataset.labels))
    planned = step_memory.plan_step(config, task, network)
    folder = resume or run_folder.make(config, dataset, training, validation, facts, dropped)
    run_folder.note_reading(folder, [*prepared_training, *prepared_validation])
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


def predict(
    run: str | Path,
    input_path: str | Path,
    output: str | Path,
    *,
    weights: str = "best",
    format: export.Format | None = None,
    seg_type: SegType = "binary",
    reading: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Segments one scan or a folder of scans with a trained run; the label maps lie on the scans' own grids.

    Args:
        run: a run folder.
        input_path: a volume file, a DICOM series folder, or a folder of either.
        output: a `.nii.gz` or `.dcm` file (for one scan) or a folder.
        weights: `best`, `last`, or the path of a weights file.
        format: `nifti`, `seg` (DICOM Segmentation, for DICOM scans) or `both`; by default what `output` ends in.
        seg_type: `binary` or `labelmap`; see `write_dicom_seg`.
        reading: keys of `data` that are other than in the run, such as {"dicom": {"tilt": "resample"}}.

    Returns:
        The files written.
    """
    export.check_words(format, seg_type)
    predictor = load_predictor(Path(run), weights, reading)
    codes = run_folder.load_facts(Path(run)).codes
    cases = find_inputs(Path(input_path), predictor.channels)
    targets = export.find_targets(Path(output), cases, format)
    files = [file for of_case in targets for file in of_case]
    check_targets(files, [image for case in cases for image in case.images])
    with console.bar("predict", len(cases)) as advance:
        for case, of_case in zip(cases, targets, strict=True):
            found, volumes = predictor.predict(case, advance.within)
            series = volumes[0].source
            export.write_prediction(of_case, found, volumes[0].grid, series, predictor.labels, codes, seg_type)
            advance()
    console.predicted(files, predictor.labels)
    return files


def evaluate(
    run: Path,
    *,
    data: str | None = None,
    output: Path | None = None,
    weights: str = "best",
    reading: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Scores a trained run: on its own validation cases, or on all labelled cases of another data set.

    `weights` and `reading` are those of `predict`.

    Returns:
        The body of evaluation.json, which is written to `output` (default: RUN/evaluation) beside the label maps.
    """
    run = Path(run)
    predictor = load_predictor(run, weights, reading)
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
            reference = read_case_label(case, dataset, grid, data).array
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


def open_data(config: RunConfig, dropped: dict[str, str] | None = None) -> Dataset:
    """Opens the data set that a configuration names; the built-in phantom is made if it is not there yet.

    With data.drop_failed, cases that are not in order are left out, and put into `dropped` with the reason.
    """
    if config.data.path != "phantom":
        faults: list[Fault] | None = [] if config.data.drop_failed else None
        dataset = open_dataset(Path(config.data.path), faults=faults)
        if dropped is not None:
            dropped |= dict(faults or ())
        return dataset
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


def load_predictor(run: Path, weights: str = "best", reading: Mapping[str, Any] | None = None) -> Predictor:
    """Returns a run's network with its weights, ready to predict; `weights` and `reading` as in `predict`."""
    config, facts = run_folder.load_config(run), run_folder.load_facts(run)
    config = dataclasses.replace(config, data=read_otherwise(config.data, reading or {}))
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


def _prepare(
    cases: tuple[Case, ...], dataset: Dataset, config: RunConfig, what: str, failed: dict[str, str] | None
) -> tuple[PreparedCase, ...]:
    with console.bar(f"prepare {what}", len(cases)) as advance:
        threads = machine.cpu_count()
        prepared = prepare(
            cases, dataset, config.data, threads=threads, progress=lambda done, total: advance(), failed=failed
        )
    if not prepared:
        raise DataError(f"of the {what} none is left.\n{unusable(failed or {}, len(dataset.cases))}")
    return prepared


def _choose_cases(
    config: RunConfig, resume: Path | None, dropped: dict[str, str]
) -> tuple[Dataset, tuple[Case, ...], tuple[Case, ...]]:
    """Opens the data and gives its training and validation cases; those that fail at a glance go into `dropped`."""
    dataset = open_data(config, None if resume else dropped)
    if resume:
        run_folder.prepare_resume(resume, config, dataset)
        return dataset, *run_folder.load_split(resume, dataset)
    dataset = _pass_quick_check(dataset, config, dropped)
    return dataset, *split_patients(dataset.cases, config.data.validation, config.seed)


def _pass_quick_check(dataset: Dataset, config: RunConfig, dropped: dict[str, str]) -> Dataset:
    """Looks at headers and grids before anything long begins; what fails is refused by name, or left out if told to."""
    cases = [case for case in dataset.cases if not is_prepared(case, dataset, config.data)]
    with console.bar("check headers", None) as advance:
        failed = failing_cases(cases, config.data, threads=machine.cpu_count(), progress=lambda done, total: advance())
    if failed and not config.data.drop_failed:
        raise DataError(unusable(failed, len(dataset.cases)))
    dropped |= failed
    left = _left(dataset.cases, failed)
    if not left:
        raise DataError(unusable(dropped, len(dropped)))
    return dataclasses.replace(dataset, cases=left)


def _left(cases: tuple[Case, ...], dropped: dict[str, str]) -> tuple[Case, ...]:
    return tuple(case for case in cases if case.name not in dropped)
