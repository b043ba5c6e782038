"""Writes the small volumes of the fault reports N1 to N22, in every format that is read, with every switch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import SimpleITK as sitk

LPS = np.diag([-1.0, -1.0, 1.0, 1.0])
TURN = np.array([[0.8, -0.48, 0.36], [0.6, 0.64, -0.48], [0.0, 0.6, 0.8]])  # a rotation in exact decimals


def affine_of(directions: Any, spacing: tuple[float, float, float] = (1.0, 0.75, 2.5)) -> np.ndarray:
    """A RAS mm affine from (3, 3) axis directions, with an origin that is nowhere near 0."""
    affine = np.eye(4)
    affine[:3, :3] = np.asarray(directions, dtype=float) * spacing
    affine[:3, 3] = [12.5, -30.25, 41.0]
    return affine


# Axis directions in RAS: array axis a runs along column a.
AXES = {
    "RAS": np.eye(3),
    "LPS": np.diag([-1.0, -1.0, 1.0]),
    "left-handed LAS": np.diag([-1.0, 1.0, 1.0]),
    "permuted PIR": np.array([[0.0, 0, 1], [-1, 0, 0], [0, -1, 0]]),
    "oblique": TURN,
    "oblique, left-handed": TURN @ np.diag([1.0, 1.0, -1.0]),
}


def numbers(shape: tuple[int, ...] = (4, 5, 6), dtype: Any = np.int16) -> np.ndarray:
    """Every voxel its own number, so that no flip or permutation goes unseen."""
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def save_nifti(
    path: Path,
    array: np.ndarray,
    affine: np.ndarray,
    *,
    qform: np.ndarray | None = None,
    codes: tuple[int, int] = (1, 1),
    units: str = "mm",
    scaling: tuple[float, float] | None = None,
    big_endian: bool = False,
) -> Path:
    """Writes .nii, .nii.gz or .hdr + .img with these qform and sform (`affine` unless given) and their codes."""
    kind = nib.Nifti1Pair if path.suffix == ".hdr" else nib.Nifti1Image
    header = kind.header_class(endianness=">" if big_endian else "<")
    header.set_data_dtype(array.dtype.newbyteorder(">" if big_endian else "<"))
    header.set_data_shape(array.shape)
    header.set_qform(affine if qform is None else qform, code=codes[0])
    header.set_sform(affine, code=codes[1])
    header.set_xyzt_units(units)
    image = kind(array, None, header)
    if scaling is not None:
        image.header.set_slope_inter(*scaling)
    image.to_filename(path)
    return path


def save_itk(path: Path, array: np.ndarray, affine: np.ndarray) -> Path:
    """Writes .nrrd, .mha or .mhd (its voxels beside it) by SimpleITK, which takes LPS."""
    lps = LPS @ affine
    spacing = np.linalg.norm(lps[:3, :3], axis=0)
    image = sitk.GetImageFromArray(array.transpose(2, 1, 0))
    image.SetSpacing(spacing.tolist())
    image.SetDirection((lps[:3, :3] / spacing).ravel().tolist())
    image.SetOrigin(lps[:3, 3].tolist())
    sitk.WriteImage(image, str(path))
    return path


def save_any(path: Path, array: np.ndarray, affine: np.ndarray) -> Path:
    """Writes one volume in the format of the name."""
    is_nifti = path.name.endswith((".nii", ".nii.gz", ".hdr"))
    return save_nifti(path, array, affine) if is_nifti else save_itk(path, array, affine)


def make_case(
    root: Path,
    image: tuple[np.ndarray, np.ndarray],
    label: tuple[np.ndarray, np.ndarray],
    name: str = "case",
    suffix: str = ".nii.gz",
) -> Path:
    """Writes images/NAME and labels/NAME, each an (array, affine), below `root`."""
    for folder, (array, affine) in (("images", image), ("labels", label)):
        (root / folder).mkdir(parents=True, exist_ok=True)
        save_any(root / folder / f"{name}{suffix}", array, affine)
    return root
