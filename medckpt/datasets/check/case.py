"""One case, read once: headers, voxels, labels, the grid of one against the other. Errors become findings.

Everything here runs in processes of its own (pool.py), one case after another in each, so few are in memory at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import nibabel as nib
import numpy as np

from medckpt.blocks import DataConfig
from medckpt.datasets.check.findings import CaseCheck, Finding, ImageFacts, LabelFacts
from medckpt.datasets.check.sides import body_findings, pair_findings
from medckpt.datasets.dicom_series import is_dicom_file
from medckpt.datasets.layouts import MOST_LABELS, Case
from medckpt.datasets.prepare import channels_apart
from medckpt.datasets.reading import read_label, read_volume
from medckpt.errors import DataError
from medckpt.geometry import Grid, Volume, canonical_grid, grid_difference_mm, grid_tolerance_mm, same_grid

SAMPLE_VOXELS = 200_000
"""Percentiles are taken over every n-th voxel, so that about this many are sorted."""

MOST_CENTRES = 10_000
"""Largest label value whose centre is looked for."""

logger = logging.getLogger("medckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a process is told to check. `labels` is empty where no dataset.json names the classes."""

    case: Case
    root: Path
    channel_names: tuple[str, ...]
    labels: Mapping[str, int]
    config: DataConfig = field(default_factory=DataConfig)
    """What reading does about faults of files."""


def check_case(task: Task) -> CaseCheck:
    """Reads a case and returns what it holds and what is wrong with it; never raises for what is in the files."""
    try:
        return _check(task)
    except Exception as error:
        finding = _broken("the check", error)
        return CaseCheck(name=task.case.name, patient=task.case.patient, findings=(finding,))


def _check(task: Task) -> CaseCheck:
    case = task.case
    findings: list[Finding] = []
    config = task.config
    label = None
    if case.label is not None:
        label = _guarded(case.label, lambda path: read_label(path, shear=config.shear), "label", findings)
    images: list[ImageFacts] = []
    first: Grid | None = None
    for name, path in zip(task.channel_names, case.images, strict=False):
        volume = _guarded(path, lambda path: read_volume(path, config.dicom, shear=config.shear), "image", findings)
        if volume is None:
            continue
        images.append(_image_facts(volume, task.root))
        findings += _intensity_findings(images[-1], name, path)
        if first is None:
            first = volume.grid
            if label is not None and case.label is not None:
                off_grid = label_grid_findings(label.grid, first, case.label)
                if config.label_grid == "resample":
                    off_grid = [dataclasses.replace(finding, severity="warn") for finding in off_grid]
                findings += off_grid
                findings += body_findings(volume, label, task.labels)
        elif not same_grid(first, volume.grid):
            text = channels_apart(first, volume.grid, case.images[0], path)
            findings.append(Finding(code="channels", severity="fail", text=text))
        if label is not None and label.array.shape == volume.array.shape and _is_copy(label, volume):
            findings.append(intensities_stored(f"equals the image {path.name} voxel for voxel"))
        del volume  # one channel at a time
    facts = None if label is None else _label_facts(label, task)
    if facts is not None:
        findings += _label_findings(facts)
        findings += pair_findings(facts.centres_mm, task.labels)
    return CaseCheck(
        name=case.name,
        patient=case.patient,
        images=tuple(images),
        label=facts,
        grid_shape=None if first is None else canonical_grid(first, None).shape,
        patient_id=_patient_id(case),
        findings=tuple(dict.fromkeys(findings)),
    )


def label_grid_findings(label: Grid, image: Grid, path: Path) -> list[Finding]:
    """The geometry gate: what is wrong with a label's grid, given its image's."""
    if same_grid(label, image):
        return []
    fix: str | None = "fix=geometry"
    what = f"{path.name}: the label does not lie on its image's grid"
    if same_grid(canonical_grid(label, None), canonical_grid(image, None)):
        axes = ["".join(nib.aff2axcodes(grid.affine)) for grid in (label, image)]
        difference = f"the place is the same, but its axes are stored as {axes[0]}, the image's as {axes[1]}"
        way_out = "Resample it onto the image's grid, which turns it voxel for voxel; a copied header would mirror it."
    elif label.shape == image.shape:
        off_mm = grid_difference_mm(label, image)
        difference = f"its corners lie up to {off_mm:.3g} mm off (at most {grid_tolerance_mm(image):.2g} mm)"
        way_out = "Copy the image's geometry."
        if off_mm > min(image.spacing_mm):  # more than a voxel: nothing says which of the two is right
            way_out = (
                "Is its header wrong, or its voxels? Look at it on the image, then write it with the right header."
            )
            fix = None
    else:
        spacings = [" x ".join(f"{side:.4g}" for side in grid.spacing_mm) for grid in (label, image)]
        difference = f"shape {label.shape} at {spacings[0]} mm, the image {image.shape} at {spacings[1]} mm"
        way_out = "Resample the label onto the image's grid."
    return [Finding(code="grid", severity="fail", text=f"{what}: {difference}. {way_out}", fix=fix)]


def intensities_stored(why: str) -> Finding:
    """The finding that a label map holds an image's intensities."""
    text = f"intensities are stored as labels: the label map {why}. Put the segmentation in its place."
    return Finding(code="intensities", severity="fail", text=text)


@contextmanager
def warnings_into(findings: list[Finding], path: Path) -> Iterator[None]:
    """Turns what is logged as a warning inside of its block into findings, and keeps it off the screen."""

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = f"{path.name}: {record.getMessage().removeprefix(f'{path}: ')}"
            findings.append(Finding(code="reader-warning", severity="warn", text=text))

    handler = Collect(logging.WARNING)
    before, propagated = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [handler], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before, propagated


def _guarded(path: Path, read: Callable[[Path], Volume], what: str, findings: list[Finding]) -> Volume | None:
    """What `read` gives, or None with a finding that says why not."""
    with warnings_into(findings, path):
        try:
            return read(path)
        except DataError as error:
            text = str(error).removeprefix(f"{path}: ")
            fix = "fix=orthonormal" if "sheared" in text else None
            findings.append(Finding(code=what, severity="fail", text=f"{path.name}: {text}", fix=fix))
        except MemoryError:
            text = f"{path.name}: it needs more memory than there is. Use a larger machine, or crop the scan."
            findings.append(Finding(code="memory", severity="fail", text=text))
        except Exception as error:  # a library that stumbles over damaged bytes: the case is named, the check goes on
            findings.append(_broken(f"{path.name}: the reader", error))
    return None


def _broken(what: str, error: Exception) -> Finding:
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    text = f"{what} broke down ({reason}). Is the file complete? Copy or convert it again."
    return Finding(code="reader", severity="fail", text=text)


def _image_facts(volume: Volume, root: Path) -> ImageFacts:
    array, grid = volume.array, volume.grid
    digest = hashlib.blake2b(repr(array.shape).encode(), digest_size=16)
    shift, total, squares = float(array[0, 0, 0]), 0.0, 0.0
    for k in range(array.shape[2]):  # plane by plane: no second copy of the volume
        plane = np.ascontiguousarray(array[:, :, k].T)
        digest.update(plane.data)
        offset = plane.astype(np.float64) - shift
        total += float(offset.sum())
        squares += float(np.vdot(offset, offset))
    flat = array.ravel(order="K")
    low, median, high = np.percentile(flat[:: max(1, flat.size // SAMPLE_VOXELS)], (0.5, 50, 99.5))
    mean = total / array.size
    return ImageFacts(
        path=_below(volume.source, root),
        shape=grid.shape,
        spacing_mm=grid.spacing_mm,
        axes="".join(nib.aff2axcodes(grid.affine)),
        minimum=float(array.min()),
        low=float(low),
        median=float(median),
        high=float(high),
        maximum=float(array.max()),
        mean=shift + mean,
        deviation=max(0.0, squares / array.size - mean**2) ** 0.5,
        digest=digest.hexdigest(),
    )


def _intensity_findings(facts: ImageFacts, channel: str, path: Path) -> list[Finding]:
    if facts.minimum == facts.maximum:
        text = (
            f"{path.name}: every voxel is {facts.minimum:g}: nothing is in this scan. Export it again, or leave the "
            "case out."
        )
        return [Finding(code="constant", severity="fail", text=text)]
    if channel.upper() == "CT" and facts.minimum >= 0:
        text = (
            f"{path.name}: a CT without negative values (the lowest is {facts.minimum:g}): air is about -1000 HU. Was "
            "the rescale intercept lost, or the scan windowed? Convert it again from DICOM."
        )
        return [Finding(code="hounsfield", severity="warn", text=text)]
    return []


def _is_copy(label: Volume, image: Volume) -> bool:
    return bool(label.array.any()) and np.array_equal(label.array, image.array)


def _label_facts(label: Volume, task: Task) -> LabelFacts:
    array = label.array
    if array.dtype.itemsize <= 2:
        counts = np.bincount(array.ravel(order="K"))
        values = np.flatnonzero(counts)
        counts = counts[values]
    else:
        values, counts = np.unique(array, return_counts=True)
    kept = np.argsort(-counts, kind="stable")[:MOST_LABELS]
    voxels = {int(values[i]): int(counts[i]) for i in sorted(kept)}
    centres = _centres_mm(label) if task.labels and int(values[-1]) <= MOST_CENTRES else {}
    path = _below(label.source, task.root)
    return LabelFacts(path=path, shape=label.grid.shape, distinct=len(values), voxels=voxels, centres_mm=centres)


def _centres_mm(label: Volume) -> dict[int, tuple[float, float, float]]:
    """Centre of mass of each label value, in RAS mm."""
    from scipy import ndimage

    centres = {}
    for value, box in enumerate(ndimage.find_objects(label.array), start=1):
        if box is None:
            continue
        inside = np.argwhere(label.array[box] == value).mean(axis=0)
        index = inside + [side.start for side in box]
        x, y, z = label.affine[:3, :3] @ index + label.affine[:3, 3]
        centres[value] = (float(x), float(y), float(z))
    return centres


def _label_findings(facts: LabelFacts) -> list[Finding]:
    name = Path(facts.path).name
    if facts.distinct > MOST_LABELS:
        return [intensities_stored(f"{name} holds {facts.distinct} different values")]
    if set(facts.voxels) == {0}:
        text = f"{name}: the label map is empty (0 everywhere). If nothing is to be found in this scan, all is well."
        return [Finding(code="empty", severity="warn", text=text)]
    return []


def _patient_id(case: Case) -> str:
    import pydicom

    folder = case.images[0]
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        try:
            if path.is_file() and is_dicom_file(path):
                header = pydicom.dcmread(path, stop_before_pixels=True, force=True, specific_tags=["PatientID"])
                return str(header.get("PatientID") or "").strip()
        except Exception:  # a damaged header: the case's own reader says so
            return ""
    return ""


def _below(path: Path, root: Path) -> str:
    if path == root:  # a scan alone
        return path.name
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
