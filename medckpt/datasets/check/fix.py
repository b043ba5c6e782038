"""A corrected copy of a data set: what is certain is mended, all else refused by name; the source is never touched.

geometry     a label that lies off its image's grid: by less than a voxel at the same shape, it gets the image's header;
             otherwise it is resampled (nearest neighbour), if every class keeps its volume
labels       label values by a table (remap), in the label maps and in dataset.json
orthonormal  NIfTI axes that are slightly sheared: the nearest rectangular grid about the volume's centre; voxels stay
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from medckpt.datasets.check.dataset import find_cases
from medckpt.datasets.check.findings import FIXES
from medckpt.datasets.check.orthonormal import write_orthonormal
from medckpt.datasets.dataset_json import FILE_NAME
from medckpt.datasets.layouts import Case, Dataset
from medckpt.datasets.nifti import NIFTI_SUFFIXES
from medckpt.datasets.reading import read_grid, read_label, write_label
from medckpt.errors import ConfigError, DataError, GeometryError, listing
from medckpt.files import write_json
from medckpt.geometry import Grid, Volume, canonical_grid, grid_difference_mm, resample, same_grid

RECORD = "medckpt_fix.json"
"""Written into the copy: what was changed, file by file."""

VOLUME_TOLERANCE = 0.1
"""A resampled class may gain or lose this share of its volume ..."""

VOLUME_TOLERANCE_VOXELS = 30
"""... or this many voxels of the coarser grid, for small ones."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One file of the copy that is not the source's: `file` below the data set, and what was done."""

    case: str
    file: str
    what: str


def fix_dataset(
    root: Path,
    output: Path,
    fixes: Sequence[str],
    *,
    remap: Mapping[int, int] | None = None,
    progress: Progress | None = None,
) -> tuple[Change, ...]:
    """Writes a copy of a data set to `output` with `fixes` applied; it appears whole or not at all.

    Returns:
        What was changed; also written to the copy's medckpt_fix.json.

    Raises:
        ConfigError: unknown fixes, a remap without `labels` or the other way round, an output that is not a new or
            empty folder outside of the data set.
        DataError: nothing to correct, or cases whose correction is not certain, all by name. Nothing is written then.
    """
    _check_words(fixes, remap)
    root, output = Path(root), Path(output).absolute()
    _require_free(root, output)
    dataset, _ = find_cases(root)
    if dataset.layout == "one scan":
        raise ConfigError(f"data={root}: fix= copies a data set; this is one scan.")
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}."))
    try:
        changes = _correct(dataset, temporary, fixes, remap or {}, progress)
        _copy_rest(root, temporary)
        write_json(temporary / RECORD, _record(root, fixes, remap, changes))
        temporary.chmod(root.stat().st_mode | 0o700)
        if output.exists():
            output.rmdir()  # empty, or this fails and nothing is lost
        os.replace(temporary, output)
    except OSError as error:
        raise DataError(f"output={output}: the copy cannot be written ({error}); nothing is left of it.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return changes


def _check_words(fixes: Sequence[str], remap: Mapping[int, int] | None) -> None:
    unknown = [name for name in fixes if name not in FIXES]
    if unknown or not fixes:
        raise ConfigError(f"fix={','.join(fixes)}: not understood. Known: {', '.join(FIXES)}; several by commas.")
    if ("labels" in fixes) != bool(remap):
        raise ConfigError("fix=labels and remap= go together, for example fix=labels remap={4:3}.")


def _require_free(root: Path, output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"output={output}: it is there already, and nothing is overwritten. Give a new folder.")
    if output.resolve().is_relative_to(root.resolve()) or root.resolve().is_relative_to(output.resolve()):
        raise ConfigError(f"output={output}: the copy goes outside of the data set; nothing is corrected in place.")


def _correct(
    dataset: Dataset, target: Path, fixes: Sequence[str], remap: Mapping[int, int], progress: Progress | None
) -> tuple[Change, ...]:
    """Writes the corrected files of every case (and dataset.json) to `target`."""
    changes: list[Change] = []
    refused: list[str] = []
    if remap:
        _refuse_merging(dataset, remap)
    for done, case in enumerate(dataset.cases, start=1):
        try:
            changes += _correct_case(case, dataset, target, fixes, remap)
        except DataError as error:
            refused.append(f"{case.name}: {error}")
        if progress:
            progress(done, len(dataset.cases))
    if refused:
        lines = "".join(f"\n  {line}" for line in refused[:20])
        more = f"\n  and {len(refused) - 20} more" if len(refused) > 20 else ""
        raise DataError(f"{len(refused)} cases cannot be corrected for certain; no copy is written:{lines}{more}")
    if remap and (renamed := _remapped_json(dataset.root / FILE_NAME, remap)) is not None:
        write_json(target / FILE_NAME, renamed)
        changes.append(Change(case="", file=FILE_NAME, what="label values as in the label maps"))
    if not changes:
        raise DataError(f"{dataset.root}: fix={','.join(fixes)} finds nothing to correct; no copy is written.")
    return tuple(changes)


def _correct_case(
    case: Case, dataset: Dataset, target: Path, fixes: Sequence[str], remap: Mapping[int, int]
) -> Iterator[Change]:
    def place(path: Path) -> Path:
        return target / path.relative_to(dataset.root)

    if "orthonormal" in fixes:
        for path in (*case.images, case.label):
            if path is not None and path.name.lower().endswith(NIFTI_SUFFIXES):
                what = write_orthonormal(path, place(path))
                if what:
                    yield Change(case=case.name, file=path.relative_to(dataset.root).as_posix(), what=what)
    if case.label is None or not {"geometry", "labels"} & set(fixes):
        return
    written = place(case.label)
    label = read_label(written if written.exists() else case.label)
    array, grid, done = label.array, label.grid, []
    if remap and (changed := remapped(array, remap)) is not None:
        array = changed
        done.append("values " + ", ".join(f"{a} to {b}" for a, b in remap.items()))
    if "geometry" in fixes:
        first = place(case.images[0])
        image = read_grid(first if first.exists() else case.images[0])
        moved = onto_image_grid(Volume(array=array, affine=label.affine, source=label.source), image)
        if moved is not None:
            array, grid = moved[0], image
            done.append(moved[1])
    if done:
        _write(written, array, grid)
        yield Change(case=case.name, file=case.label.relative_to(dataset.root).as_posix(), what="; ".join(done))


def onto_image_grid(label: Volume, image: Grid) -> tuple[np.ndarray, str] | None:
    """Returns a label map on its image's grid, and what was done; None where it lies there already.

    Raises:
        GeometryError: which of header and voxels is wrong cannot be known, or a class would lose its volume.
    """
    if same_grid(label.grid, image):
        return None
    name = label.source.name
    if label.grid.shape == image.shape:
        off_mm = grid_difference_mm(label.grid, image)
        if off_mm <= min(image.spacing_mm):
            return label.array, f"geometry copied from the image; corners were {off_mm:.3g} mm off"
        if not same_grid(canonical_grid(label.grid, None), canonical_grid(image, None)):
            raise GeometryError(
                f"{name} has the image's shape but lies {off_mm:.3g} mm off: is its header wrong, or its voxels? This "
                "is not guessed. Look at it on the image, then write it again with the right header."
            )
    array = resample(label.array, label.grid, image, order=0, fill=0)
    _require_volumes(label, array, image)
    return array, f"resampled onto the image's grid, shape {label.grid.shape} to {image.shape}"


def remapped(array: np.ndarray, remap: Mapping[int, int]) -> np.ndarray | None:
    """Returns a label map with values replaced, all at once ({1: 2, 2: 1} swaps); None if it holds none of them."""
    present = [value for value in remap if (array == value).any()]
    if not present:
        return None
    result = array.astype(np.int64)
    for value in present:
        result[array == value] = remap[value]
    return result


def _require_volumes(label: Volume, array: np.ndarray, image: Grid) -> None:
    before_mm3, after_mm3 = (abs(float(np.linalg.det(g.affine[:3, :3]))) for g in (label.grid, image))
    slack = VOLUME_TOLERANCE_VOXELS * max(before_mm3, after_mm3)
    for value in np.unique(label.array[label.array > 0]):
        before = int((label.array == value).sum()) * before_mm3
        after = int((array == value).sum()) * after_mm3
        if not after or abs(after - before) > VOLUME_TOLERANCE * before + slack:
            raise GeometryError(
                f"{label.source.name}: on the image's grid, label {value} would have {after / 1000:.3g} ml instead of "
                f"{before / 1000:.3g} ml: part of it lies outside of the image, or the image is too coarse. Is it "
                "this image's label?"
            )


def _refuse_merging(dataset: Dataset, remap: Mapping[int, int]) -> None:
    """A remap onto a value that is in use merges two classes; that must be said, by mapping the value to itself."""
    targets = set(remap.values()) - set(remap)
    merged: dict[int, list[str]] = {}
    for case in dataset.cases if targets else ():
        if case.label is None:
            continue
        values = set(np.unique(read_label(case.label).array).tolist())
        for value in targets & values:
            merged.setdefault(value, []).append(case.name)
    if merged:
        value, names = next(iter(merged.items()))
        raise ConfigError(
            f"remap=: the value {value} is in use already ({listing(names, 3)}); another class would become part of "
            f"it. If that is meant, say so: add {value}:{value} to remap=. If not, move {value} as well."
        )


def _remapped_json(path: Path, remap: Mapping[int, int]) -> dict[str, Any] | None:
    """The content of dataset.json with its label values replaced; None where there is none to replace."""
    if not path.is_file():
        return None
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8-sig"))
    labels = content["labels"]
    inverted = all(str(key).isdigit() and not str(name).isdigit() for key, name in labels.items())
    by_name = (
        {str(name): int(key) for key, name in labels.items()} if inverted else {k: int(v) for k, v in labels.items()}
    )
    # Of classes that become one, the name of the value that stays is kept.
    order = sorted(by_name.items(), key=lambda item: remap.get(item[1], item[1]) != item[1])
    changed: dict[int, str] = {}
    for name, value in order:
        changed.setdefault(remap.get(value, value), name)
    if {name: value for value, name in changed.items()} == by_name:
        return None
    ordered = sorted(changed.items())
    content["labels"] = {str(v): n for v, n in ordered} if inverted else {n: v for v, n in ordered}
    return content


def _write(path: Path, array: np.ndarray, grid: Grid) -> None:
    """Writes a label map under its own name, and reads it back."""
    if not path.name.lower().endswith(NIFTI_SUFFIXES):
        raise DataError(f"{path.name}: corrected label maps are written as NIfTI; convert this one to .nii.gz first.")
    zipped = path if path.name.endswith(".nii.gz") else path.with_name(f"{path.name}.nii.gz")
    write_label(zipped, array, grid)
    if zipped != path:
        path.write_bytes(gzip.decompress(zipped.read_bytes()))
        zipped.unlink()
    back = read_label(path)
    if not np.array_equal(back.array, array) or not same_grid(back.grid, grid):
        raise DataError(f"{path.name}: what was written does not read back as it was. This is a fault of medckpt.")


def _copy_rest(root: Path, target: Path) -> None:
    seen: set[str] = set()
    for folder, folders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # a link that leads back
            folders.clear()
            continue
        seen.add(real)
        place = target / Path(folder).relative_to(root)
        place.mkdir(parents=True, exist_ok=True)
        for name in files:
            if not (place / name).exists():
                shutil.copy2(Path(folder) / name, place / name)


def _record(
    root: Path, fixes: Sequence[str], remap: Mapping[int, int] | None, changes: Sequence[Change]
) -> dict[str, Any]:
    return {
        "source": str(root.resolve()),
        "fix": list(fixes),
        "remap": {str(a): b for a, b in (remap or {}).items()},
        "changes": [{"case": change.case, "file": change.file, "what": change.what} for change in changes],
    }
