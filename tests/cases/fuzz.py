"""Damaged scans by the thousand: small DICOM series and NIfTI files, changed by a seeded generator, through the check.

Whatever the damage, the check ends within its limit, takes memory in proportion to what the file honestly holds, and
either names the case or reads what an independent reader reads.
"""

from __future__ import annotations

import gzip
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pydicom
from pydicom.uid import ExplicitVRLittleEndian, JPEG2000Lossless, RLELossless

from medckpt.datasets.check.case import Task, check_case
from medckpt.datasets.check.dataset import find_cases
from medckpt.datasets.check.findings import CaseCheck
from medckpt.datasets.check.pool import Lost, run_each
from tests.datasets.dicom_maker import make_slice, save_slice

SHAPE = (40, 36, 24)
SLICES = 5
SLACK_BYTES = 48 * 2**20
"""What the interpreter, its libraries and ITK's pools take beside the voxels."""

LIMIT_SECONDS = 10.0

Bytes = bytearray
Generator = np.random.Generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one mutated case; `peak_bytes` is what reading it took, None where the process was lost."""

    case: CaseCheck | Lost
    peak_bytes: int | None
    honest_bytes: int


def probe(task: Task) -> tuple[CaseCheck, int]:
    """Checks a case and measures the highest resident set meanwhile, above what was there before."""
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    checked = check_case(task)
    return checked, _resident("VmHWM") - before


def run_fuzz(root: Path, count: int, seed: int, *, workers: int = 1) -> dict[str, Outcome | str]:
    """Writes `count` mutated cases to `root`, checks them, and returns what came of each (text: a fault of layout)."""
    make_mutants(root, count, seed)
    dataset, faults = find_cases(root)
    tasks = [Task(case=c, root=root, channel_names=dataset.channel_names, labels={}) for c in dataset.cases]
    found: dict[str, Outcome | str] = dict(faults)
    for index, result in run_each(probe, tasks, workers=workers, limit_seconds=LIMIT_SECONDS):
        honest = _honest_bytes(dataset.cases[index].images[0])
        case, peak = (result, None) if isinstance(result, Lost) else result
        found[dataset.cases[index].name] = Outcome(case=case, peak_bytes=peak, honest_bytes=honest)
    return found


def make_mutants(root: Path, count: int, seed: int) -> None:
    """Writes images/ (files, and folders of DICOM slices) and labels/: case 0, 1, ... each with one mutation."""
    (root / "labels").mkdir(parents=True)
    for number in range(count):
        generator = np.random.default_rng([seed, number])
        name = f"{number:05d}"
        kind = number % 8
        label = _label(kind)
        if kind < 4:
            suffix = (".nii.gz", ".nii")[kind % 2]
            raw = Bytes(_nifti(generator))
            if kind == 3:
                label = bytes(_mutate(Bytes(label), generator, _nifti_field))
            else:
                raw = _mutate(raw, generator, _nifti_field)
            content = gzip.compress(raw, 1, mtime=0) if suffix == ".nii.gz" else bytes(raw)
            if kind == 0 and generator.random() < 0.4:  # the compressed stream itself
                content = bytes(_mutate(Bytes(content), generator, None))
            path = root / "images" / f"{name}{suffix}"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        else:
            _write_series(root / "images" / name, kind, generator)
        (root / "labels" / f"{name}.nii.gz").write_bytes(gzip.compress(label, 1, mtime=0))


def complaint(name: str, outcome: Outcome | str, root: Path) -> str | None:
    """Returns what is wrong with how a mutant was treated; None if nothing is."""
    if isinstance(outcome, str):
        return None
    if isinstance(outcome.case, Lost):
        return f"{name}: {outcome.case.why}"
    assert outcome.peak_bytes is not None
    if outcome.peak_bytes > 4 * outcome.honest_bytes + SLACK_BYTES:
        return f"{name}: {outcome.peak_bytes / 2**20:.0f} MiB for a file of {outcome.honest_bytes / 2**20:.2f} MiB"
    broken = [finding.text for finding in outcome.case.findings if finding.code in ("reader", "memory")]
    if broken:
        return f"{name}: {broken[0]}"
    if not outcome.case.images:
        return None if outcome.case.result == "fail" else f"{name}: neither read nor named"
    return _misread(name, outcome.case, root)


def _misread(name: str, case: CaseCheck, root: Path) -> str | None:
    """Compares what was read with nibabel, or with pydicom slice by slice."""
    facts = case.images[0]
    path = root / facts.path
    if path.is_dir():
        values = []
        for file in sorted(path.iterdir()):
            dataset = pydicom.dcmread(file, force=True)
            if "Rows" in dataset and "PixelData" in dataset:
                # These change no stored value, and may be gone.
                dataset.PhotometricInterpretation, dataset.SamplesPerPixel = "MONOCHROME2", 1
                if not dataset["PixelData"].is_undefined_length:  # else it is compressed, and nothing says how
                    dataset.file_meta.setdefault("TransferSyntaxUID", ExplicitVRLittleEndian)
                slope, inter = float(dataset.get("RescaleSlope", 1)), float(dataset.get("RescaleIntercept", 0))
                try:
                    stored = dataset.pixel_array.astype(np.float32)
                except Exception as error:  # whatever pydicom and its plugins raise
                    return f"{name}: read {file.name}, which pydicom refuses ({error})"
                values.append(stored * np.float32(slope) + np.float32(inter))
        low, high = min(float(v.min()) for v in values), max(float(v.max()) for v in values)
        # A copy or a localizer may be set aside: what was read lies within what is there.
        right = low <= facts.minimum and facts.maximum <= high
    else:
        image = nib.load(path)
        array = np.asarray(image.dataobj, dtype=np.float32)
        same = tuple(n for n in array.shape if n > 1) == tuple(n for n in facts.shape if n > 1)
        right = same and (float(array.min()), float(array.max())) == (facts.minimum, facts.maximum)
    return None if right else f"{name}: read {facts}, which an independent reader does not find"


def _resident(key: str) -> int:
    match = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def _honest_bytes(path: Path) -> int:
    """Voxels of the unmutated scan in float32, or the file's own size where that is larger."""
    files = list(path.iterdir()) if path.is_dir() else [path]
    return max(int(np.prod(SHAPE)) * 4, sum(file.stat().st_size for file in files))


# What is mutated, and how


def _label(kind: int) -> bytes:
    """A label map on the grid of the image that is to be mutated."""
    shape, steps = (SHAPE, (-1.0, -1.0, 2.0, 1.0)) if kind < 4 else ((40, 36, SLICES), (-0.5, -1.0, 2.0, 1.0))
    return nib.Nifti1Image(np.ones(shape, np.uint8), np.diag(steps)).to_bytes()


def _nifti(generator: Generator) -> bytes:
    dtype = (np.int16, np.float32, np.uint8, np.int32, np.float64)[generator.integers(5)]
    array = generator.normal(100, 20, SHAPE).astype(dtype)
    image = nib.Nifti1Image(array, np.diag([-1.0, -1.0, 2.0, 1.0]))
    image.set_qform(image.affine, 1)
    image.set_sform(image.affine, int(generator.integers(2)))
    return image.to_bytes()


def _write_series(folder: Path, kind: int, generator: Generator) -> None:
    victim = int(generator.integers(SLICES))
    for k in range(SLICES):
        pixels = generator.integers(-1000, 1000, (36, 40)).astype(np.int16)
        dataset = make_slice(k, pixels=pixels, RescaleSlope=1, RescaleIntercept=-24)
        if k == victim and kind in (4, 5):
            _change_tag(dataset, generator)
        path = folder / f"{k}.dcm"
        try:
            save_slice(path, dataset)
        except Exception:  # pydicom itself will not write it; the bytes below do
            save_slice(path, make_slice(k, pixels=pixels))
        if kind in (6, 7):
            clean = pydicom.dcmread(path)
            if kind == 7:
                clean.compress((RLELossless, JPEG2000Lossless)[victim % 2])
                clean.save_as(path)
            if k == victim:
                path.write_bytes(bytes(_mutate(Bytes(path.read_bytes()), generator, _dicom_tag)))


_ODD_NUMBERS: tuple[Any, ...] = (0, 1, 2, 7, 255, 32767, 65535)
_ODD_TEXTS: tuple[Any, ...] = ("", "0", "-1", "nan", "inf", "1e30", "abc", "1e-30")


def _change_tag(dataset: pydicom.Dataset, generator: Generator) -> None:
    """Deletes an element, or gives it an odd value of its kind."""
    pydicom.config.settings.writing_validation_mode = pydicom.config.IGNORE
    element = list(dataset)[generator.integers(len(dataset))]
    choice = generator.random()
    if choice < 0.3:
        del dataset[element.tag]
        return
    value: Any = _ODD_NUMBERS[generator.integers(len(_ODD_NUMBERS))]
    if element.VR in ("DS", "IS", "LO", "CS", "UI", "SH"):
        odd = [_ODD_TEXTS[generator.integers(len(_ODD_TEXTS))] for _ in range(max(1, element.VM))]
        value = odd if choice < 0.8 else odd[0]
    elif element.VR in ("OW", "OB"):
        value = bytes(element.value[: generator.integers(len(element.value))])
    try:
        element.value = value
    except Exception:  # refused as it is set: another day
        del dataset[element.tag]


def _nifti_field(content: Bytes, generator: Generator) -> None:
    """Overwrites one field of the header."""
    places = (  # offset, format
        *((0, "<i"), (40, "<h"), (42, "<h"), (44, "<h"), (46, "<h"), (48, "<h"), (70, "<h"), (72, "<h")),
        *((76, "<f"), (80, "<f"), (84, "<f"), (88, "<f"), (108, "<f"), (112, "<f"), (116, "<f"), (123, "<B")),
        *((252, "<h"), (254, "<h"), (256, "<f"), (260, "<f"), (280, "<f"), (284, "<f"), (300, "<f"), (344, "<I")),
    )
    offset, form = places[generator.integers(len(places))]
    odd: tuple[Any, ...] = (0, 1, 2, 3, 4, 16, 127)
    if form == "<f":
        odd = (0.0, -1.0, float("nan"), float("inf"), 1e30, 1e-30, 0.5)
    elif form == "<h":
        odd = (0, -1, 1, 3, 5, 8, 64, 4096, 32767)
    struct.pack_into(form, content, offset, odd[generator.integers(len(odd))])


def _dicom_tag(content: Bytes, generator: Generator) -> None:
    """Damages the group, number, VR or length of some element."""
    starts = [match.start() for match in re.finditer(rb"[\x08\x18\x20\x28\xe0\x02]\x00..[A-Z]{2}", bytes(content))]
    if starts:
        content[starts[generator.integers(len(starts))] + int(generator.integers(8))] = int(generator.integers(256))


def _mutate(content: Bytes, generator: Generator, field: Callable[[Bytes, Generator], None] | None) -> Bytes:
    kind = generator.integers(9)
    size = len(content)
    place = int(generator.integers(size))
    if kind <= 2 and field is not None:
        for _ in range(int(generator.integers(1, 3))):
            field(content, generator)
    elif kind == 3:
        del content[place:]
    elif kind == 4:
        content[place : place + int(generator.integers(1, 64))] = bytes(int(generator.integers(1, 64)))
    elif kind == 5:
        content[place:place] = generator.bytes(int(generator.integers(1, 64)))
    elif kind == 6:
        del content[place : place + int(generator.integers(1, 64))]
    else:
        reach = size if kind == 7 else min(size, 600)  # anywhere, or in the header
        for _ in range(int(generator.integers(1, 12))):
            content[generator.integers(reach)] = int(generator.integers(256))
    return content
