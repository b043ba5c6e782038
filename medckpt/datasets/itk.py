"""ITK's files (.nrrd, .mha, .mhd) in: read by SimpleITK, with what it passes over in their headers in silence.

ITK ignores units of length, takes any axes for the patient's, and reads voxels from wherever a header points. Here
units become mm, axes that are not the patient's are refused, and voxels lie in the file or beside it.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np

from medckpt.errors import DataError, GeometryError
from medckpt.geometry import LPS_TO_RAS, Grid

ITK_SUFFIXES = (".nrrd", ".mha", ".mhd")

_HEADER_BYTES = 65536  # what is searched for the fields below
_FIELD = re.compile(rb"^[ \t]*([A-Za-z][A-Za-z ]*?)[ \t]*[=:][ \t]*([^\r\n]*)", re.MULTILINE)
_PATIENT_SPACES = {"right-anterior-superior", "ras", "left-anterior-superior", "las", "left-posterior-superior", "lps"}
_MM_PER_UNIT = {
    **dict.fromkeys(("", "mm", "millimeter", "millimeters", "millimetre"), 1.0),
    **dict.fromkeys(("um", "µm", "μm", "micron", "microns", "micrometer", "micrometers"), 0.001),
    **dict.fromkeys(("cm", "centimeter", "centimeters"), 10.0),
    **dict.fromkeys(("m", "meter", "meters", "metre"), 1000.0),
}

logger = logging.getLogger("medckpt")


def read_itk_grid(path: Path) -> Grid:
    """Returns the grid of an ITK file from its header alone; raises as `read_itk`."""
    import SimpleITK as sitk

    fields = _fields(path)
    _require_sound(path, fields)
    _require_voxels(path, fields)
    reader = sitk.ImageFileReader()
    reader.SetImageIO(_reader_of(path))  # ITK looks for suffixes in lower case alone
    reader.SetFileName(str(path))
    try:
        reader.ReadImageInformation()
    except RuntimeError as error:
        raise _unreadable(path, error) from error
    return _grid(path, reader, fields)


def read_itk(path: Path, floating: bool) -> tuple[np.ndarray, Grid]:
    """Returns the voxels of a 3D ITK file (X, Y, Z), float32 if `floating`, else of the type stored; and their grid.

    Raises:
        DataError: unreadable or cut short, voxels that lie elsewhere, several components, not three-dimensional.
        GeometryError: axes that are not the patient's, or an unknown unit of length.
    """
    import SimpleITK as sitk

    grid = read_itk_grid(path)
    try:
        image = sitk.ReadImage(str(path), sitk.sitkFloat32 if floating else sitk.sitkUnknown, _reader_of(path))
    except RuntimeError as error:
        raise _unreadable(path, error) from error
    array = sitk.GetArrayFromImage(image)
    return array.reshape(array.shape[-3:]).transpose(2, 1, 0), grid


def voxel_file(path: Path) -> Path | None:
    """Returns the file beside an ITK header that holds its voxels; None if they are in the file itself, or nowhere."""
    try:
        named = _detached(_fields(path))
    except DataError:
        return None
    if named is None or not _is_beside(named) or not (path.parent / named).is_file():
        return None
    return path.parent / named


def _reader_of(path: Path) -> str:
    return "NrrdImageIO" if path.suffix.lower() == ".nrrd" else "MetaImageIO"


def _fields(path: Path) -> dict[str, str]:
    """The fields of the text header by name in lower case without blanks; nothing after the voxels begin."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER_BYTES)
    except OSError as error:
        raise DataError(f"{path}: the file cannot be opened ({error.strerror or error}).") from error
    if path.suffix.lower() == ".nrrd":
        head = re.split(rb"\r?\n\r?\n", head, maxsplit=1)[0]
    fields: dict[str, str] = {}
    for match in _FIELD.finditer(head):
        name = match[1].decode().replace(" ", "").lower()
        if name in fields and path.suffix.lower() != ".nrrd":
            raise DataError(f"{path}: {match[1].decode()} is in the header twice. Copy or convert the file again.")
        fields.setdefault(name, match[2].decode("utf-8", "replace").strip())
        if name == "elementdatafile":  # the last field of a MetaImage; voxels may follow
            break
    return fields


def _require_sound(path: Path, fields: dict[str, str]) -> None:
    """Refuses a MetaImage header whose lists are of other lengths than NDims says, or come before it.

    ITK (5.4) writes past the end of its memory on some of them, which ends the process.
    """
    if path.suffix.lower() == ".nrrd":
        return
    lengths = {"transformmatrix": 2, "rotation": 2, "orientation": 2} | dict.fromkeys(
        ("offset", "position", "origin", "centerofrotation", "elementspacing", "elementsize", "dimsize"), 1
    )
    text, names = fields.get("ndims", ""), list(fields)
    sound = text in ("2", "3", "4", "5")
    for name, power in lengths.items():
        if sound and name in fields:
            sound = names.index("ndims") < names.index(name) and len(fields[name].split()) == int(text) ** power
    if not sound:
        raise DataError(f"{path}: ITK cannot read the file (a damaged header). Copy or convert it again.")


def _detached(fields: dict[str, str]) -> str | None:
    named = fields.get("elementdatafile") or fields.get("datafile")
    return None if named is None or named.upper() == "LOCAL" else named


def _is_beside(named: str) -> bool:
    parts = Path(named).parts
    listed = named.upper().startswith("LIST") or "%" in named
    return not (listed or Path(named).is_absolute() or ".." in parts or "\\" in named)


def _require_voxels(path: Path, fields: dict[str, str]) -> None:
    named = _detached(fields)
    if named is None:
        return
    if not _is_beside(named):
        raise DataError(
            f"{path}: the voxels lie elsewhere ({named}); they are read from the file itself or from one file beside "
            f"it. Convert it, e.g. with SimpleITK: sitk.WriteImage(sitk.ReadImage('{path.name}'), '{path.stem}.mha')."
        )
    if not (path.parent / named).is_file():
        raise DataError(f"{path}: the voxels are not there; put {named} beside it.")


def _grid(path: Path, reader: Any, fields: dict[str, str]) -> Grid:
    size = list(reader.GetSize())
    dimensions = len(size)
    while len(size) > 3 and size[-1] == 1:
        size.pop()
    if len(size) != 3 or reader.GetNumberOfComponents() != 1:
        raise DataError(
            f"{path}: {len(size)} dimensions with {reader.GetNumberOfComponents()} components per voxel; "
            "one file holds one 3D volume here. Write one file per channel or time point."
        )
    directions = np.reshape(reader.GetDirection(), (dimensions, dimensions))[:3, :3]
    affine = np.eye(4)
    affine[:3, :3] = directions * np.asarray(reader.GetSpacing())[:3]
    affine[:3, 3] = reader.GetOrigin()[:3]
    affine[:3] *= _mm_per_unit(path, fields)
    _require_patient_axes(path, fields)
    try:
        return Grid(shape=tuple(size), affine=LPS_TO_RAS @ affine)
    except GeometryError as error:
        raise GeometryError(f"{path}: {error}. Write the file again with valid axes.") from error


def _require_patient_axes(path: Path, fields: dict[str, str]) -> None:
    if path.suffix.lower() != ".nrrd":
        return
    space = fields.get("space")
    if space is None:
        logger.warning("%s: no spatial information (no 'space' in the header); ITK's LPS axes are assumed", path)
    elif space.lower().removesuffix("-time").removesuffix("t") not in _PATIENT_SPACES:
        raise GeometryError(
            f"{path}: space '{space}' are not the patient's axes, and ITK would take them for left, posterior, "
            "superior. If that is meant, write 'space: left-posterior-superior' into the header."
        )


def _mm_per_unit(path: Path, fields: dict[str, str]) -> float:
    text = fields.get("distanceunits") or fields.get("spaceunits") or ""
    units = set(re.findall(r'"([^"]*)"', text)) if '"' in text else {text}
    units = {unit.strip().lower() for unit in units}
    if len(units) != 1 or not units <= _MM_PER_UNIT.keys():
        raise GeometryError(f"{path}: unit of length {text} is not known; write the file again in mm.")
    scale = _MM_PER_UNIT[units.pop()]
    if scale != 1.0:
        logger.warning("%s: lengths are in %s and are converted to mm", path, text)
    return scale


def _unreadable(path: Path, error: RuntimeError) -> DataError:
    reason = " ".join(str(error).split())[-300:]
    return DataError(
        f"{path}: ITK cannot read the file ({reason}). Is it complete? Copy or convert it again, to .nii.gz if need be."
    )
