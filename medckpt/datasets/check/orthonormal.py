"""Slightly sheared NIfTI axes made rectangular in a copy: the header alone changes, voxels stay byte for byte."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np

from medckpt.datasets.reading import read_grid
from medckpt.errors import DataError, GeometryError
from medckpt.geometry import ITK_ORTHONORMALITY_TOLERANCE, Grid, grid_difference_mm, shear

MOST_MOVED_VOXELS = 0.5
"""No corner of the volume may move by more than this share of the smallest voxel side."""


def nearest_rectangular(grid: Grid) -> Grid:
    """Returns the grid of the same spacing and centre whose axes are the nearest ones at right angles (polar part)."""
    spacing = np.linalg.norm(grid.affine[:3, :3], axis=0)
    left, _, right = np.linalg.svd(grid.affine[:3, :3] / spacing)
    affine = np.eye(4)
    affine[:3, :3] = (left @ right) * spacing
    middle = (np.array(grid.shape) - 1) / 2
    affine[:3, 3] = grid.affine[:3, :3] @ middle + grid.affine[:3, 3] - affine[:3, :3] @ middle
    return Grid(shape=grid.shape, affine=affine)


def write_orthonormal(source: Path, target: Path) -> str | None:
    """Writes a copy of a NIfTI file with rectangular axes and says what changed; None where ITK reads it as it is.

    Raises:
        DataError: the file is no single-file NIfTI.
        GeometryError: a corner would move by more than `MOST_MOVED_VOXELS`: then only resampling helps.
    """
    try:
        image: Any = nib.load(source)
        affine = np.asarray(image.header.get_best_affine(), dtype=np.float64)
        grid = Grid(shape=(*image.shape, 1, 1, 1)[:3], affine=affine)
    except GeometryError as error:
        raise GeometryError(f"{source.name}: {error}") from error
    except Exception as error:  # nibabel raises whatever the damaged bytes lead to
        raise DataError(f"{source.name}: the header cannot be read ({error}).") from error
    deviation = shear(affine)
    if deviation <= ITK_ORTHONORMALITY_TOLERANCE:
        return None
    straight = nearest_rectangular(grid)
    moved = grid_difference_mm(grid, straight) / min(grid.spacing_mm)
    if moved > MOST_MOVED_VOXELS:
        raise GeometryError(
            f"{source.name}: the axes are sheared (cosine {deviation:.2g}); at right angles a corner would move by "
            f"{moved:.2g} voxels (at most {MOST_MOVED_VOXELS:g}). Resample image and label to an orthogonal grid."
        )
    zipped = source.name.lower().endswith(".gz")
    content = source.read_bytes()
    raw = bytearray(gzip.decompress(content) if zipped else content)
    kind, length = type(image.header), image.header.sizeof_hdr
    header = kind(binaryblock=bytes(raw[:length]), endianness=image.header.endianness, check=False)
    code = int(header["sform_code"]) or int(header["qform_code"]) or 1
    header.set_sform(straight.affine, code=code)
    header.set_qform(straight.affine, code=code)
    raw[:length] = header.binaryblock
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(gzip.compress(raw, mtime=0) if zipped else raw)
    if shear(read_grid(target).affine) > ITK_ORTHONORMALITY_TOLERANCE:
        raise GeometryError(f"{source.name}: its axes do not fit a qform; resample it to an orthogonal grid.")
    return f"axes made rectangular (cosine {deviation:.2g}); the farthest corner moved by {moved:.2g} voxels"
