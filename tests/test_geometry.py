"""Grids and resampling, against hand-worked affines, nibabel and SciPy."""

from __future__ import annotations

import itertools

import nibabel as nib
import numpy as np
import pytest
from scipy.ndimage import map_coordinates

from medckpt.errors import GeometryError
from medckpt.geometry import (
    Grid,
    canonical_grid,
    grid_difference_mm,
    grid_tolerance_mm,
    resample,
    same_grid,
    shear,
)

SIGNED_PERMUTATIONS = [
    (axes, signs) for axes in itertools.permutations(range(3)) for signs in itertools.product((1, -1), repeat=3)
]


def rotation(degrees: tuple[float, float, float]) -> np.ndarray:
    a, b, c = np.radians(degrees)
    x = np.array([[1, 0, 0], [0, np.cos(a), -np.sin(a)], [0, np.sin(a), np.cos(a)]])
    y = np.array([[np.cos(b), 0, np.sin(b)], [0, 1, 0], [-np.sin(b), 0, np.cos(b)]])
    z = np.array([[np.cos(c), -np.sin(c), 0], [np.sin(c), np.cos(c), 0], [0, 0, 1]])
    return z @ y @ x


def oblique_grid(shape: tuple[int, int, int] = (9, 8, 7)) -> Grid:
    affine = np.eye(4)
    affine[:3, :3] = rotation((10, -20, 30)) * [0.8, 1.2, 2.5]
    affine[:3, 3] = [-40, 25, 310]
    return Grid(shape=shape, affine=affine)


def stored_as(array: np.ndarray, grid: Grid, axes: tuple[int, ...], signs: tuple[int, ...]) -> tuple[np.ndarray, Grid]:
    """The same voxels in another axis order and direction, made by nibabel."""
    image = nib.Nifti1Image(array, grid.affine).as_reoriented(np.stack([axes, signs], axis=1))
    return np.asarray(image.dataobj), Grid(shape=image.shape, affine=image.affine)


def test_spacing_directions_and_equality() -> None:
    grid = oblique_grid()
    assert grid.spacing_mm == pytest.approx((0.8, 1.2, 2.5))
    np.testing.assert_allclose(grid.directions, rotation((10, -20, 30)), atol=1e-12)
    assert grid == oblique_grid()
    assert hash(grid) == hash(oblique_grid())
    assert grid != oblique_grid((9, 8, 6))
    with pytest.raises(ValueError, match="read-only"):
        grid.affine[0, 0] = 1


@pytest.mark.parametrize(
    ("shape", "affine", "match"),
    [
        ((4, 4), np.eye(4), "three axes"),
        ((4, 0, 4), np.eye(4), "at least one voxel"),
        ((4, 4, 4), np.eye(3), "4x4"),
        ((4, 4, 4), np.diag([1, 1, np.nan, 1]), "finite"),
        ((4, 4, 4), np.diag([1, 1, 0, 1]), "flattens"),
        ((4, 4, 4), np.array([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]), "flattens"),
    ],
)
def test_impossible_grids(shape: tuple[int, ...], affine: np.ndarray, match: str) -> None:
    with pytest.raises(GeometryError, match=match):
        Grid(shape=shape, affine=affine)  # type: ignore[arg-type]


def test_shear_is_the_cosine_between_axes() -> None:
    sheared = np.eye(4)
    sheared[0, 1] = np.tan(np.radians(15))
    assert shear(sheared) == pytest.approx(np.sin(np.radians(15)))
    assert shear(oblique_grid().affine) < 1e-12


def test_grid_difference() -> None:
    grid = Grid(shape=(10, 10, 10), affine=np.eye(4))
    moved = np.eye(4)
    moved[:3, 3] = [3, 4, 0]
    assert grid_difference_mm(grid, Grid(shape=grid.shape, affine=moved)) == pytest.approx(5)
    # Spacing 1.02 along x: corners at -0.5 and 9.5 move by 0.01 and 0.19 mm.
    wider = Grid(shape=grid.shape, affine=np.diag([1.02, 1, 1, 1]))
    assert grid_difference_mm(grid, wider) == pytest.approx(0.19)
    assert grid_difference_mm(grid, Grid(shape=(10, 10, 9), affine=np.eye(4))) == float("inf")


@pytest.mark.parametrize(("shift_mm", "same"), [(2e-8, True), (0.09, True), (0.11, False), (40, False)])
def test_same_grid_tolerance(shift_mm: float, same: bool) -> None:
    grid, moved = Grid(shape=(5, 5, 5), affine=np.eye(4)), np.eye(4)
    moved[0, 3] = shift_mm
    assert same_grid(grid, Grid(shape=(5, 5, 5), affine=moved)) is same


def test_tolerance_shrinks_with_small_voxels() -> None:
    """0.05 mm are nothing in a CT and a whole voxel in micro-CT."""
    fine, moved = np.diag([0.05, 0.05, 0.05, 1]), np.diag([0.05, 0.05, 0.05, 1])
    moved[0, 3] = 0.05
    a, b = (Grid(shape=(5, 5, 5), affine=affine) for affine in (fine, moved))
    assert grid_tolerance_mm(a) == pytest.approx(0.005)
    assert not same_grid(a, b)
    assert same_grid(a, b, tolerance_mm=0.1)


def test_a_flipped_axis_is_another_grid() -> None:
    grid = oblique_grid()
    assert not same_grid(grid, stored_as(np.zeros(grid.shape), grid, (0, 1, 2), (-1, 1, 1))[1])


@pytest.mark.parametrize(("axes", "signs"), SIGNED_PERMUTATIONS)
def test_canonical_grid_is_nibabels(axes: tuple[int, ...], signs: tuple[int, ...]) -> None:
    _, stored = stored_as(np.zeros((9, 8, 7)), oblique_grid(), axes, signs)
    expected = nib.as_closest_canonical(nib.Nifti1Image(np.zeros(stored.shape), stored.affine))
    ours = canonical_grid(stored, None)
    assert ours.shape == expected.shape
    np.testing.assert_allclose(ours.affine, expected.affine, atol=1e-9)
    same = canonical_grid(stored, (1.0, 1.5, 2.0))
    reference = canonical_grid(oblique_grid(), (1.0, 1.5, 2.0))
    assert same_grid(same, reference, tolerance_mm=1e-9)


def test_canonical_spacing_keeps_centre_and_direction() -> None:
    grid = oblique_grid()
    target = canonical_grid(grid, (1.0, 1.0, 3.0))
    assert target.shape == (7, 10, 6)  # 9*0.8=7.2, 8*1.2=9.6, 7*2.5/3=5.83
    assert target.spacing_mm == pytest.approx((1.0, 1.0, 3.0), abs=1e-12)
    np.testing.assert_allclose(target.directions, grid.directions, atol=1e-12)
    for g in (grid, target):
        centre = g.affine @ [*((np.array(g.shape) - 1) / 2), 1]
        np.testing.assert_allclose(centre, grid.affine @ [4, 3.5, 3, 1], atol=1e-9)
    assert canonical_grid(grid, (100, 100, 100)).shape == (1, 1, 1)


@pytest.mark.parametrize("spacing", [(1, 1), (1, 0, 1), (1, -1, 1), (1, np.inf, 1)])
def test_impossible_spacing(spacing: tuple[float, ...]) -> None:
    with pytest.raises(GeometryError, match="three positive numbers"):
        canonical_grid(oblique_grid(), spacing)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float32])
@pytest.mark.parametrize(("axes", "signs"), SIGNED_PERMUTATIONS)
def test_reorientation_is_bit_exact_and_comes_back(
    axes: tuple[int, ...], signs: tuple[int, ...], dtype: type[np.generic]
) -> None:
    grid = oblique_grid((9, 8, 5))
    array = np.random.default_rng(0).integers(0, 200, grid.shape).astype(dtype)
    stored, stored_grid = stored_as(array, grid, axes, signs)
    # The affine as a NIfTI file gives it back: float32.
    stored_grid = Grid(shape=stored_grid.shape, affine=stored_grid.affine.astype(np.float32))
    for order in (0, 1, 3):
        there = resample(stored, stored_grid, grid, order, fill=77)
        np.testing.assert_array_equal(there, array)
        assert there.dtype == (dtype if order == 0 else np.float32)
        assert there.flags.c_contiguous
        np.testing.assert_array_equal(resample(there, grid, stored_grid, order, fill=77), stored)


def test_crop_and_padding_on_one_lattice_are_copies() -> None:
    array = np.random.default_rng(1).normal(size=(5, 6, 7)).astype(np.float32)
    grid = Grid(shape=array.shape, affine=np.eye(4))
    moved = np.diag([1.0, -1.0, 1.0, 1.0])
    moved[:3, 3] = [2, 5, -1]
    target = Grid(shape=(6, 4, 3), affine=moved)
    expected = np.full((6, 4, 3), -1000, np.float32)
    expected[:3, :, 1:] = array[2:, ::-1][:, :4, :2]
    np.testing.assert_array_equal(resample(array, grid, target, 1, fill=-1000), expected)
    moved[0, 3] = 50
    assert np.all(resample(array, grid, Grid(shape=(2, 2, 2), affine=moved), 1, fill=-1000) == -1000)


@pytest.mark.parametrize("order", [0, 1, 3])
@pytest.mark.parametrize("shape", [(9, 8, 7), (1, 8, 7), (2, 3, 7), (3, 1, 2)])
def test_interpolation_equals_scipy(shape: tuple[int, int, int], order: int) -> None:
    """On an oblique and sheared map between grids; SciPy is evaluated at the same source indices."""
    rng = np.random.default_rng(2)
    array = rng.normal(size=shape).astype(np.float32)
    source = oblique_grid(shape)
    to_source = np.eye(4)
    to_source[:3, :3] = np.diag([0.7, 0.9, 0.6]) + 0.03 * rng.normal(size=(3, 3))
    to_source[:3, 3] = [-0.4, 0.1, 0.2]
    target = Grid(shape=(5, 6, 7), affine=source.affine @ to_source)
    indices = np.stack(np.meshgrid(*map(np.arange, target.shape), indexing="ij")).reshape(3, -1)
    points = to_source[:3, :3] @ indices + to_source[:3, 3:]
    inside = np.all((points >= -0.5) & (points <= np.array(shape)[:, None] - 0.5), axis=0)
    assert inside.sum() > 0
    mode = "mirror" if order == 3 else "nearest"
    expected = np.where(inside, map_coordinates(array.astype(np.float64), points, order=order, mode=mode), -5.0)
    ours = resample(array, source, target, order, fill=-5)
    np.testing.assert_allclose(ours.ravel(), expected, atol=1e-5)


def test_linear_resampling_is_exact_on_a_linear_function() -> None:
    """f(p) = a.p + b in patient millimetres survives any change of grid: geometry end to end."""
    source = oblique_grid((20, 20, 20))
    target = canonical_grid(source, (1.3, 1.1, 2.0))
    slope = np.array([0.3, -0.7, 0.2])

    def value(grid: Grid) -> np.ndarray:
        indices = np.stack(np.meshgrid(*map(np.arange, grid.shape), indexing="ij"), axis=-1)
        return (indices @ grid.affine[:3, :3].T + grid.affine[:3, 3]) @ slope

    ours = resample(value(source).astype(np.float32), source, target, 1, fill=0)
    core = (slice(1, -1),) * 3  # the outermost half voxel is extended, not extrapolated
    np.testing.assert_allclose(ours[core], value(target)[core], atol=1e-3)


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint16, ">i2", np.int64, np.float16, np.float64])
def test_every_dtype_is_kept_by_nearest_neighbour(dtype: str | type) -> None:
    array = np.zeros((5, 6, 7), dtype)
    array[2, 3, 4] = 1
    grid = Grid(shape=array.shape, affine=np.eye(4))
    result = resample(array, grid, Grid(shape=array.shape, affine=np.diag([1, 1.1, 1, 1])), 0, fill=0)
    assert result.dtype == np.dtype(dtype).newbyteorder("=")
    assert np.argwhere(result).tolist() == [[2, 3, 4]]


@pytest.mark.parametrize("order", [0, 1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
@pytest.mark.parametrize(("shape", "wanted"), [((1, 1, 12), (1, 1, 5)), ((40, 40, 12), (1, 1, 1))])
def test_result_with_axes_of_one_voxel_owns_its_memory(
    shape: tuple[int, int, int], wanted: tuple[int, int, int], dtype: type, order: int
) -> None:
    """A view with two axes of one voxel is contiguous already: it was handed out after its image had gone."""
    source = Grid(shape=shape, affine=np.eye(4))
    target = canonical_grid(source, [n / m for n, m in zip(shape, wanted, strict=True)])
    assert target.shape == wanted
    results = [resample(np.ones(shape, dtype), source, target, order, 0) for _ in range(20)]
    others = [np.full(wanted, 7, dtype) for _ in range(200)]  # takes the place of what was freed
    assert len(others) == 200
    for result in results:
        owner = result
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        assert owner.base is None
        assert result.flags.c_contiguous
        np.testing.assert_allclose(result, 1, atol=1e-5)


def test_misuse_of_resample() -> None:
    grid = oblique_grid()
    with pytest.raises(GeometryError, match="shape"):
        resample(np.zeros((8, 8, 7)), grid, grid, 1, 0)
    with pytest.raises(ValueError, match="order"):
        resample(np.zeros(grid.shape), grid, grid, 2, 0)
    with pytest.raises(ValueError, match="does not fit into uint8"):
        resample(np.zeros(grid.shape, np.uint8), grid, grid, 0, -1)
