"""Grids of voxels in the patient: one policy for DICOM, NIfTI, resampling and export.

Every grid is a shape and an affine. The affine is 4x4 float64 in RAS millimetres (nibabel's convention: +x towards
the patient's right, +y anterior, +z superior) and takes an index (i, j, k) of an (X, Y, Z) array to the *centre* of
that voxel. DICOM and ITK count in LPS; their affines are turned by `LPS_TO_RAS`. The policy in words, with every
tolerance, is docs/dicom.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from nibabel.orientations import inv_ornt_aff, io_orientation

from medckpt.errors import GeometryError

GRID_TOLERANCE_MM = 0.1
"""Two grids are the same when no corner of the volume differs by more than this ..."""

GRID_TOLERANCE_VOXELS = 0.1
"""... nor by more than this share of the smallest spacing (which decides below 1 mm, and for micro-CT)."""

ORTHONORMALITY_TOLERANCE = 1e-3
"""Largest |cosine| between two axes that is read as a rectangular grid; beyond it the grid is sheared and refused."""

ITK_ORTHONORMALITY_TOLERANCE = 1e-4
"""Up to here ITK reads the file as well (measured on SimpleITK 2.5.7); above it a warning says that ITK will not."""

QFORM_SFORM_TOLERANCE_MM = 0.1
"""A NIfTI file whose qform and sform part by more than this at a corner is named in a warning; the sform is used."""

SPACING_TOLERANCE_MM = 0.1
"""A DICOM slice may lie this far from its place in an evenly spaced stack ..."""

SPACING_TOLERANCE_FRACTION = 0.1
"""... and no further than this share of the slice spacing."""

POSITION_TOLERANCE_MM = 0.01
"""DICOM slices nearer to each other than this along the normal lie at the same position."""

ORIENTATION_TOLERANCE = 1e-4
"""Slices of one stack agree in every direction cosine, and in relative pixel spacing, within this."""

LATTICE_TOLERANCE_VOXELS = 1e-3
"""Grids whose voxel centres meet within this at every corner are copied instead of interpolated."""

LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])
"""Turns an affine that ends in DICOM's or ITK's LPS millimetres into RAS millimetres (and back)."""

_ITK_DTYPES: dict[np.dtype, np.dtype] = {  # what ITK has no pixel type for
    np.dtype(np.bool_): np.dtype(np.uint8),
    np.dtype(np.float16): np.dtype(np.float32),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grid:
    """Where the voxels of a volume lie: `shape` (X, Y, Z) and the 4x4 RAS mm affine of voxel centres.

    `==` asks for exact equality; `same_grid` asks within a tolerance.

    Raises:
        GeometryError: the shape is not three positive numbers, or the affine is not an invertible 4x4 affine.
    """

    shape: tuple[int, int, int]
    affine: np.ndarray

    def __post_init__(self) -> None:
        shape = tuple(int(n) for n in self.shape)
        if len(shape) != 3 or min(shape) < 1:
            raise GeometryError(f"a grid needs three axes with at least one voxel each, not shape {shape}")
        affine = np.array(self.affine, dtype=np.float64)
        if affine.shape != (4, 4) or not np.isfinite(affine).all() or not np.array_equal(affine[3], [0, 0, 0, 1]):
            raise GeometryError(f"an affine is 4x4, finite and ends in the row 0 0 0 1; this one is {affine.tolist()}")
        lengths = np.linalg.norm(affine[:3, :3], axis=0)
        if lengths.min() <= 0 or abs(np.linalg.det(affine[:3, :3] / lengths)) < 1e-6:
            raise GeometryError(f"the affine flattens the volume, it cannot be inverted: {affine[:3].tolist()}")
        affine.flags.writeable = False
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "affine", affine)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Grid):
            return NotImplemented
        return self.shape == other.shape and np.array_equal(self.affine, other.affine)

    def __hash__(self) -> int:
        return hash((self.shape, self.affine.tobytes()))

    @property
    def spacing_mm(self) -> tuple[float, float, float]:
        """Distance between neighbouring voxel centres along each array axis, in mm."""
        x, y, z = np.linalg.norm(self.affine[:3, :3], axis=0)
        return float(x), float(y), float(z)

    @property
    def directions(self) -> np.ndarray:
        """(3, 3) float64: column a is the unit vector, in RAS, along which array axis a runs."""
        return self.affine[:3, :3] / np.linalg.norm(self.affine[:3, :3], axis=0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Volume:
    """One channel of voxels: `array` (X, Y, Z) in the index order of `affine`, and the file or folder it came from."""

    array: np.ndarray
    affine: np.ndarray
    source: Path
    notes: tuple[str, ...] = ()
    """What was done to the source to put it on this grid, or is to be known of its values; empty for a plain scan."""

    @property
    def grid(self) -> Grid:
        """The volume's grid; raises GeometryError where `array` is not 3D or the affine is none."""
        return Grid(shape=self.array.shape, affine=self.affine)


def shear(affine: np.ndarray) -> float:
    """Returns the largest |cosine| between two axes of a 4x4 affine: 0 for a rectangular grid."""
    unit = affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0)
    return float(np.abs(unit.T @ unit - np.eye(3)).max(initial=0.0, where=~np.eye(3, dtype=bool)))


def grid_difference_mm(a: Grid, b: Grid) -> float:
    """Returns the largest distance in mm between the eight outer corners of two volumes; inf if shapes differ.

    Corners are voxel edges (index -0.5 and n - 0.5), so that a wrong spacing shows along an axis of one voxel too.
    """
    if a.shape != b.shape:
        return float("inf")
    return float(np.linalg.norm(_corners(a.shape) @ (a.affine - b.affine).T, axis=1).max())


def grid_tolerance_mm(grid: Grid) -> float:
    """Returns how far, in mm, a corner may lie off for another grid to count as this one."""
    return min(GRID_TOLERANCE_MM, GRID_TOLERANCE_VOXELS * min(grid.spacing_mm))


def same_grid(a: Grid, b: Grid, tolerance_mm: float | None = None) -> bool:
    """Says whether two grids hold the same voxels: equal shape, corners within `tolerance_mm`.

    By default the tolerance is `grid_tolerance_mm(a)`: 0.1 mm, less where voxels are smaller than 1 mm.
    """
    return grid_difference_mm(a, b) <= (grid_tolerance_mm(a) if tolerance_mm is None else tolerance_mm)


def canonical_grid(grid: Grid, spacing_mm: Sequence[float] | None) -> Grid:
    """Returns the grid in closest-canonical (RAS) axis order and direction, and in `spacing_mm` if it is given.

    Axes are permuted and flipped so that each runs nearest to R, A, S (nibabel's `io_orientation`); an oblique
    volume stays oblique. With a spacing, given in mm in that canonical order, the shape is max(1, round(n * s / t))
    per axis, the spacing is exactly t, and the centre of the volume stays where it is (nnU-Net's rule for the shape).

    Raises:
        GeometryError: `spacing_mm` is not three positive numbers.
    """
    orientation = io_orientation(grid.affine)
    affine = grid.affine @ inv_ornt_aff(orientation, grid.shape)
    order = np.argsort(orientation[:, 0])
    shape = np.asarray(grid.shape)[order]
    if spacing_mm is None:
        return Grid(shape=tuple(shape), affine=affine)
    target = np.asarray(spacing_mm, dtype=np.float64)
    if target.shape != (3,) or not np.isfinite(target).all() or target.min() <= 0:
        raise GeometryError(f"a spacing is three positive numbers of mm in R, A, S order, not {tuple(spacing_mm)}")
    spacing = np.linalg.norm(affine[:3, :3], axis=0)
    new_shape = np.maximum(1, np.round(shape * spacing / target)).astype(int)
    new_affine = np.eye(4)
    new_affine[:3, :3] = affine[:3, :3] / spacing * target
    centre = affine[:3, :3] @ ((shape - 1) / 2) + affine[:3, 3]
    new_affine[:3, 3] = centre - new_affine[:3, :3] @ ((new_shape - 1) / 2)
    return Grid(shape=tuple(new_shape), affine=new_affine)


def orthogonal_grid(grid: Grid) -> Grid:
    """Returns the rectangular grid that covers a sheared one whole.

    The two axes nearest to a right angle keep their plane and spacing; the third becomes their normal, with the
    distance between the planes as its spacing. So a stack of slices that are shifted against each other keeps its
    slices. A grid that is rectangular to rounding (1e-9) is returned as it is.
    """
    unit = grid.directions
    if shear(grid.affine) <= 1e-9:
        return grid
    cosines = np.abs(unit.T @ unit)
    i, j = min(itertools.combinations(range(3), 2), key=lambda pair: cosines[pair])
    k = 3 - i - j
    # Both of the pair turn by half of what is missing to the right angle.
    sum_, difference = unit[:, i] + unit[:, j], unit[:, i] - unit[:, j]
    sum_, difference = sum_ / np.linalg.norm(sum_), difference / np.linalg.norm(difference)
    directions = np.empty((3, 3))
    directions[:, i], directions[:, j] = (sum_ + difference) / np.sqrt(2), (sum_ - difference) / np.sqrt(2)
    normal = np.cross(directions[:, i], directions[:, j])
    directions[:, k] = normal * np.sign(normal @ unit[:, k])
    spacing = np.array(grid.spacing_mm)
    spacing[k] *= directions[:, k] @ unit[:, k]
    outermost = np.array([(*index, 1.0) for index in itertools.product(*((0, n - 1) for n in grid.shape))])
    centres = outermost @ grid.affine[:3].T @ directions  # mm along the new axes
    low, high = centres.min(axis=0), centres.max(axis=0)
    affine = np.eye(4)
    affine[:3, :3] = directions * spacing
    affine[:3, 3] = directions @ low
    steps = np.ceil((high - low) / spacing - LATTICE_TOLERANCE_VOXELS)
    return Grid(shape=tuple(1 + np.maximum(0, steps).astype(int)), affine=affine)


def resample(array: np.ndarray, source: Grid, target: Grid, order: int, fill: float) -> np.ndarray:
    """Returns `array`, which lies on `source`, evaluated at the voxel centres of `target`.

    Where the two share one lattice (axes permuted, flipped, cropped or padded) voxels are copied, bit for bit.
    Otherwise SimpleITK interpolates between images of identity geometry with one affine from index to index, so that
    oblique, flipped and sheared grids need no special case. Nothing is smoothed first when the target is coarser.

    Args:
        array: (X, Y, Z), any real dtype, of `source.shape`.
        source: the grid of `array`.
        target: the grid wanted.
        order: 0 nearest neighbour (labels), 1 linear, 3 cubic B-spline.
        fill: the value of every point outside the source's voxels (further out than half a voxel from its centres).

    Returns:
        C-contiguous array of `target.shape`: the dtype of `array` for order 0, float32 otherwise.

    Raises:
        GeometryError: the array does not have the source's shape.
        ValueError: another `order`, or a `fill` that the result's dtype cannot hold.
    """
    if array.shape != source.shape:
        raise GeometryError(f"the array has shape {array.shape} but its grid {source.shape}")
    if order not in (0, 1, 3):
        raise ValueError(f"order is 0 (nearest), 1 (linear) or 3 (cubic), not {order}")
    dtype = array.dtype.newbyteorder("=") if order == 0 else np.dtype(np.float32)
    if order == 0 and dtype.kind in "biu" and (fill != int(fill) or np.array(int(fill)).astype(dtype) != fill):
        raise ValueError(f"fill {fill} does not fit into {dtype}")
    index_map = np.linalg.inv(source.affine) @ target.affine
    if share_lattice(source, target):
        return _copy(array.astype(dtype, copy=False), np.round(index_map).astype(int), target.shape, fill)
    return interpolate(array.astype(dtype, copy=False), index_map, target.shape, order, fill)


def share_lattice(source: Grid, target: Grid) -> bool:
    """Says whether the voxels of `target` are voxels of `source`, or of its lattice continued beyond its edges.

    Axes may be permuted or flipped; centres meet within `LATTICE_TOLERANCE_VOXELS` at every corner of `target`.
    """
    index_map = np.linalg.inv(source.affine) @ target.affine
    steps = np.round(index_map)
    return _is_signed_permutation(steps) and _meets(index_map, steps, target.shape)


def _corners(shape: Sequence[int]) -> np.ndarray:
    """(8, 4) homogeneous indices of the outer corners of a volume."""
    return np.array([(*corner, 1.0) for corner in itertools.product(*((-0.5, n - 0.5) for n in shape))])


def _is_signed_permutation(index_map: np.ndarray) -> bool:
    linear = np.abs(index_map[:3, :3])
    return bool(np.all(linear.sum(axis=0) == 1) and np.all(linear.sum(axis=1) == 1) and linear.max() == 1)


def _meets(index_map: np.ndarray, steps: np.ndarray, shape: Sequence[int]) -> bool:
    return float(np.abs(_corners(shape) @ (index_map - steps).T).max()) <= LATTICE_TOLERANCE_VOXELS


def _copy(array: np.ndarray, steps: np.ndarray, shape: tuple[int, int, int], fill: float) -> np.ndarray:
    """Copies along a signed permutation: target index t reads source index steps @ t."""
    source_axes = np.argmax(np.abs(steps[:3, :3]), axis=0)
    result = np.full(shape, fill, dtype=array.dtype)
    read, write = [slice(0)] * 3, []
    for axis, source_axis in enumerate(source_axes):
        sign, offset = int(steps[source_axis, axis]), int(steps[source_axis, 3])
        inside = [t for t in range(shape[axis]) if 0 <= sign * t + offset < array.shape[source_axis]]
        if not inside:
            return result
        first, last = sign * inside[0] + offset, sign * inside[-1] + offset
        stop = last + sign
        read[source_axis] = slice(first, None if stop < 0 else stop, sign)
        write.append(slice(inside[0], inside[-1] + 1))
    result[tuple(write)] = array[tuple(read)].transpose(source_axes)
    return result


def interpolate(
    array: np.ndarray, index_map: np.ndarray, shape: tuple[int, int, int], order: int, fill: float
) -> np.ndarray:
    """Returns `array` evaluated at index `index_map` @ (i, j, k, 1) for every voxel of `shape`; see `resample`.

    It never copies voxels: a piece of a volume is interpolated as the whole is, however short it is.
    """
    if order != 3 or min(array.shape) > 3:
        return _resample_with_itk(array, index_map, shape, order, fill)
    # ITK's B-spline needs four samples per axis. Mirroring a short axis up to a further mirror point leaves the
    # spline as it is (its boundary condition is that mirror), but makes what lies outside look inside: masked after.
    padding = {1: (0, 3), 2: (0, 2), 3: (0, 2)}
    padded = np.pad(array, [padding.get(n, (0, 0)) for n in array.shape], mode="reflect")
    result = _resample_with_itk(padded, index_map, shape, order, fill)
    inside = _resample_with_itk(np.ones(array.shape, dtype=np.uint8), index_map, shape, 0, 0)
    return np.where(inside == 1, result, np.float32(fill))


def _resample_with_itk(
    array: np.ndarray, index_map: np.ndarray, shape: tuple[int, int, int], order: int, fill: float
) -> np.ndarray:
    import SimpleITK as sitk

    interpolator = {0: sitk.sitkNearestNeighbor, 1: sitk.sitkLinear, 3: sitk.sitkBSpline}[order]
    stored: np.dtype = array.dtype
    if stored in _ITK_DTYPES:
        stored = _ITK_DTYPES[stored]
    transform = sitk.AffineTransform(3)
    transform.SetMatrix(index_map[:3, :3].ravel().tolist())
    transform.SetTranslation(index_map[:3, 3].tolist())
    # SimpleITK counts (x, y, z) where its NumPy arrays count [z, y, x].
    image = sitk.GetImageFromArray(array.astype(stored, copy=False).transpose(2, 1, 0))
    resampled = sitk.Resample(
        image,
        [int(n) for n in shape],
        transform,
        interpolator,
        (0.0, 0.0, 0.0),
        (1.0, 1.0, 1.0),
        np.eye(3).ravel().tolist(),
        float(fill),
        image.GetPixelID(),
    )
    view = sitk.GetArrayViewFromImage(resampled).transpose(2, 1, 0)
    # Always a copy: the view's memory goes with the image, and a view with axes of one voxel is contiguous already.
    return np.array(view, dtype=array.dtype, order="C")
