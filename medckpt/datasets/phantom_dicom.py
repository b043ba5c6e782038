"""Grid and files of the phantom: a DICOM series with a NIfTI label per patient, in a folder that stays whole.

The folder's rules: `.phantom.json` says from the start whose folder it is and what was asked for, `dataset.json` comes
last and lists a digest per patient, and a patient is built beside its place and renamed into it.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from medckpt.errors import DataError

if TYPE_CHECKING:
    from pydicom.dataset import FileDataset

RESCALE_INTERCEPT_HU = -1024
STORED_MAX = 4095  # 12 bits stored
UPRIGHT = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
TURNED = (-1.0, 0.0, 0.0, 0.0, -1.0, 0.0)
_MARKER, _CLAIM, _SCRATCH = "dataset.json", ".phantom.json", ".patient_*.tmp"
_STALE_S = 3600.0
Digest = dict[str, int | str]
_LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The voxel grid of a series, in the words of the DICOM tags (LPS mm, voxel centres).

    shape: slices, rows, columns. spacing_mm: slice distance, row distance, column distance. origin_mm: centre of the
    first voxel of the lowest slice. orientation: ImageOrientationPatient; slices follow its normal upwards.
    """

    shape: tuple[int, int, int]
    spacing_mm: tuple[float, float, float]
    origin_mm: tuple[float, float, float]
    orientation: tuple[float, ...] = UPRIGHT

    @property
    def affine_lps(self) -> NDArray[np.float64]:
        """(4, 4) float64, from the indices (column, row, slice) to LPS mm; PS3.3 C.7.6.2.1.1."""
        along_row, along_column = np.array(self.orientation[:3]), np.array(self.orientation[3:])
        affine = np.eye(4)
        affine[:3, 0] = along_row * self.spacing_mm[2]
        affine[:3, 1] = along_column * self.spacing_mm[1]
        affine[:3, 2] = np.cross(along_row, along_column) * self.spacing_mm[0]
        affine[:3, 3] = self.origin_mm
        return affine

    @property
    def affine_ras(self) -> NDArray[np.float64]:
        """(4, 4) float64, from the indices (column, row, slice) to RAS mm, as NIfTI wants it."""
        return np.asarray(_LPS_TO_RAS @ self.affine_lps)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesNames:
    """What the headers of a series say: `key` feeds the UIDs, so equal keys give equal UIDs."""

    key: str
    patient_id: str
    patient_name: str
    description: str
    instance_numbers: tuple[int, ...]  # of the slices from the lowest to the highest


def place_on_table(
    rng: np.random.Generator, width_mm: float, size: NDArray[np.float64], *, turned: bool
) -> tuple[Grid, NDArray[np.float64]]:
    """Draws a grid around a body that is `width_mm` wide, tilted a little and moved on the table.

    size: (3,) the body's scale along its x, y, z. Returns the grid, and the (4, 4) map from its indices (column, row,
    slice) to the body's own mm. `turned` stores the same anatomy with rows to the right and columns to the front.
    """
    from scipy.spatial.transform import Rotation

    spacing = round(float(rng.uniform(np.clip(width_mm / 120, 2.8, 3.8), 3.8)), 3)
    columns = int(np.clip(math.ceil(width_mm / spacing), 96, 120))
    rows = max(96, math.ceil(302 / spacing), columns - int(rng.choice([0, 0, 8, 12])))  # the body is up to 260 mm deep
    thickness = float(rng.choice([3.0, 3.5, 4.0, 4.5, 5.0, 6.0]))
    slices = int(np.clip(round(rng.uniform(205, 225) / thickness), 34, 60))
    body = rng.uniform([-60, -220, -900], [60, -80, 600])  # where the body's zero lies in the scanner's LPS mm
    side = -1.0 if turned else 1.0
    half = side * np.array([columns - 1, rows - 1]) * spacing / 2
    first = body + np.array([-half[0], 15 - half[1], rng.uniform(50, 68) - (slices - 1) * thickness])
    grid = Grid(
        shape=(slices, rows, columns),
        spacing_mm=(thickness, spacing, spacing),
        origin_mm=(round(float(first[0]), 3), round(float(first[1]), 3), round(float(first[2]), 3)),
        orientation=TURNED if turned else UPRIGHT,
    )
    to_scanner = np.eye(4)
    tilt = Rotation.from_euler("zyx", rng.uniform(-1, 1, 3) * [5, 2, 2], degrees=True)
    to_scanner[:3, :3] = tilt.as_matrix() * size
    to_scanner[:3, 3] = body
    return grid, np.linalg.inv(to_scanner) @ grid.affine_lps


def body_coordinates(grid: Grid, to_body: NDArray[np.float64], rng: np.random.Generator) -> list[NDArray[np.float32]]:
    """x, y, z of every voxel in the body's mm, each (slices, rows, columns), bent by a few slow waves."""
    slices, rows, columns = (np.arange(size, dtype=np.float32) for size in grid.shape)
    axes = columns[None, None, :], rows[None, :, None], slices[:, None, None]
    straight = [sum(float(row[n]) * axes[n] for n in range(3)) + float(row[3]) for row in to_body[:3]]
    shift = rng.uniform(0, 6.28, 3)
    bent = []
    for axis in range(3):
        wave = np.sin(straight[(axis + 1) % 3] / 37 + float(shift[axis])) + np.sin(
            straight[(axis + 2) % 3] / 43 - float(shift[axis])
        )
        bent.append(np.asarray(straight[axis] + 1.8 * wave, dtype=np.float32))
    return bent


def index_box(
    low: tuple[float, ...], high: tuple[float, ...], from_body: NDArray[np.float64], shape: tuple[int, int, int]
) -> tuple[slice, ...] | None:
    """The index box (slices, rows, columns) that holds a box in the body's mm, None where it lies outside the grid."""
    corners = np.array([[*np.where(pick, low, high), 1.0] for pick in np.ndindex(2, 2, 2)])
    indices = (corners @ from_body.T)[:, 2::-1]
    margin = np.abs(from_body[2::-1, :3]).sum(axis=1) * 7  # mm: the waves, and the soft edge
    first = np.maximum(np.floor(indices.min(axis=0) - margin), 0).astype(int)
    last = np.minimum(np.ceil(indices.max(axis=0) + margin) + 1, shape).astype(int)
    if (last - first < 2).any():
        return None
    return tuple(slice(int(a), int(b)) for a, b in zip(first, last, strict=True))


def write_patient(
    folder: Path, hu: NDArray[np.float32], labels: NDArray[np.uint8], grid: Grid, names: SeriesNames
) -> None:
    """Writes `folder/ct/*.dcm` and `folder/label.nii.gz`; the same input gives the same bytes.

    hu: (slices, rows, columns) float32 in HU, rounded and cut to -1024..3071. labels: the same shape, uint8. Files are
    named after the instance number. They are not flushed to the disk one by one: the builder keeps a digest of every
    patient, so that a file torn by a crash is found and made again.
    """
    (folder / "ct").mkdir(parents=True)
    stored = np.clip(np.rint(hu - RESCALE_INTERCEPT_HU), 0, STORED_MAX).astype("<u2")
    header = _series_header(grid, names)
    for index, number in enumerate(names.instance_numbers):
        _set_slice(header, grid, names, index)
        header.PixelData = stored[index].tobytes()
        header.save_as(folder / "ct" / f"IM{number:04d}.dcm", enforce_file_format=True)
    (folder / "label.nii.gz").write_bytes(_nifti_bytes(labels, grid))


def folder_digest(folder: Path) -> Digest:
    """Returns {"files", "bytes", "sha256"} over the names and contents of the files in `folder`; missing is empty.

    Hidden files are left out: file managers strew them.
    """
    content = hashlib.sha256()
    files = total = 0
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")):
        try:
            data = path.read_bytes()
        except FileNotFoundError:  # a second process has just moved the folder
            continue
        files, total = files + 1, total + len(data)
        content.update(f"{path.relative_to(folder).as_posix()}\0{len(data)}\0".encode())
        content.update(data)
    return {"files": files, "bytes": total, "sha256": content.hexdigest()}


def claim_folder(folder: Path, request: dict[str, int]) -> dict[str, Any]:
    """Makes `folder` ours for `request` (phantom_version, seed, patients); returns the digests known from before.

    Raises DataError when it holds other data, another phantom, or more patients than asked for: data that a run may be
    reading is never replaced or thinned out in silence. More patients than before may be asked for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    visible = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    marker, claim = _read_json(folder / _MARKER), _read_json(folder / _CLAIM)
    held = marker if marker else claim
    if "phantom_version" not in held and visible:
        raise DataError(f"phantom: {folder} holds other files ({visible[0]}, ...). Give an empty or a new folder.")
    if held:
        same = all(held.get(key) == request[key] for key in ("phantom_version", "seed"))
        if not same or held.get("patients") not in range(request["patients"] + 1):
            shown = "{phantom_version}, seed {seed}, {patients} patients"
            has, asked = (
                f"version {shown}".format(**{**dict.fromkeys(request, "?"), **each}) for each in (held, request)
            )
            raise DataError(f"phantom: {folder} holds {has}, not {asked}. Give another folder, or remove this one.")
    if claim != request:
        _write_json(folder / _CLAIM, request)
    files = marker.get("files")
    return files if isinstance(files, dict) else {}


def place_folder(target: Path, build: Callable[[Path], None]) -> Digest:
    """Builds a folder beside `target` and renames it into place; returns its digest.

    A `target` that has the same content is left as it is, another is replaced. When a second process gets in between,
    its equal folder wins. Raises OSError when the folder cannot be written or put in place.
    """
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", suffix=".tmp", dir=target.parent) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        build(new)
        digest = folder_digest(new)
        failure = OSError("not tried")
        for attempt in range(3):
            if folder_digest(target) == digest:
                return digest
            try:
                if target.exists():
                    os.replace(target, Path(scratch) / f"old-{attempt}")
                os.replace(new, target)
            except OSError as error:  # most likely a second process that has just emptied or filled the place
                failure = error
            else:
                return digest
        raise failure


def finish_folder(folder: Path, marker: dict[str, Any]) -> None:
    """Writes `dataset.json` where it differs, and sweeps what killed runs have left behind."""
    if _read_json(folder / _MARKER) != marker:
        _write_json(folder / _MARKER, marker)
    for scratch in folder.glob(_SCRATCH):
        try:
            stale = time.time() - scratch.stat().st_mtime > _STALE_S  # a younger one may belong to a run under way
        except FileNotFoundError:
            continue
        if stale:
            shutil.rmtree(scratch, ignore_errors=True)


def _read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a file, {} where it is missing, torn or no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(value, stream, indent=2)
            stream.write("\n")
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o644)  # mkstemp makes it private
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _series_header(grid: Grid, names: SeriesNames) -> FileDataset:
    """Everything the slices of a series have in common (CT Image Storage, PS3.3 A.3)."""
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = CTImageStorage
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    header = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    header.SOPClassUID = CTImageStorage
    header.ImageType = ["ORIGINAL", "PRIMARY", "AXIAL"]
    header.Modality, header.Manufacturer, header.KVP = "CT", "medckpt phantom", 120
    header.ImageComments = "Synthetic: no human being was scanned."
    header.PatientID, header.PatientName = names.patient_id, names.patient_name
    header.PatientPosition, header.SeriesDescription = "HFS", names.description
    for level in ("Study", "Series"):
        setattr(header, f"{level}InstanceUID", generate_uid(entropy_srcs=[names.key, level]))
    header.FrameOfReferenceUID = generate_uid(entropy_srcs=[names.key, "FrameOfReference"])
    header.SeriesNumber, header.AcquisitionNumber = 1, 1
    # Type 2 attributes: must be there, may be empty. Dates stay empty, a date of making would change the bytes.
    for keyword in ("PatientBirthDate", "PatientSex", "StudyDate", "StudyTime", "StudyID", "AccessionNumber"):
        setattr(header, keyword, "")
    header.ReferringPhysicianName = header.PositionReferenceIndicator = ""
    header.Rows, header.Columns = grid.shape[1:]
    header.PixelSpacing, header.SliceThickness = list(grid.spacing_mm[1:]), grid.spacing_mm[0]
    header.ImageOrientationPatient = list(grid.orientation)
    header.SamplesPerPixel, header.PhotometricInterpretation = 1, "MONOCHROME2"
    header.BitsAllocated, header.BitsStored, header.HighBit, header.PixelRepresentation = 16, 12, 11, 0
    header.RescaleIntercept, header.RescaleSlope, header.RescaleType = RESCALE_INTERCEPT_HU, 1, "HU"
    header.WindowCenter, header.WindowWidth = 40, 400
    return header


def _set_slice(header: FileDataset, grid: Grid, names: SeriesNames, index: int) -> None:
    """Turns `header` into that of the slice `index`, counted from the lowest."""
    from pydicom.uid import generate_uid

    number = names.instance_numbers[index]
    uid = generate_uid(entropy_srcs=[names.key, "Instance", str(number)])
    header.SOPInstanceUID = header.file_meta.MediaStorageSOPInstanceUID = uid
    header.InstanceNumber = number
    position = grid.affine_lps @ [0.0, 0.0, index, 1.0]
    header.ImagePositionPatient = [round(float(value), 4) for value in position[:3]]
    header.SliceLocation = round(float(position[2]), 4)


def _nifti_bytes(labels: NDArray[np.uint8], grid: Grid) -> bytes:
    import nibabel as nib

    image = nib.Nifti1Image(np.ascontiguousarray(labels.transpose(2, 1, 0)), grid.affine_ras)
    image.set_sform(grid.affine_ras, code=1)
    image.set_qform(grid.affine_ras, code=1)
    image.header.set_xyzt_units("mm")
    return gzip.compress(image.to_bytes(), compresslevel=6, mtime=0)  # a time of making would change the bytes
