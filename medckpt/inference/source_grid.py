"""Labels on the scan's own grid from logits on the training grid, part by part: no volume of logits is held."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from medckpt.errors import GeometryError
from medckpt.geometry import Grid, interpolate, resample, share_lattice
from medckpt.inference.sliding_window import Part, winners

_Corner = tuple[int, ...]


def to_source_grid(parts: Iterator[Part], grid: Grid, source: Grid) -> np.ndarray:
    """Returns the winning class (X, Y, Z) on `source` of logits on `grid`, given as the parts that tile it.

    Logits are interpolated linearly and compared class by class; the first of equals wins. A part comes after its
    lower neighbour along each axis. Where the grids share a lattice the winners are copied.

    Raises:
        GeometryError: one grid is rotated against the other, so that their axes do not run side by side.
    """
    bordered = _bordered(grid)
    if share_lattice(bordered, source):
        labels = winners(parts, grid.shape)
        return resample(np.pad(labels, 1, mode="edge"), bordered, source, order=0, fill=0)
    spread = _Spread(np.linalg.inv(bordered.affine) @ source.affine, grid.shape, source.shape)
    for part in parts:
        spread.add(part)
    assert spread.winner is not None
    return spread.winner


def _bordered(grid: Grid) -> Grid:
    """The grid with one voxel of border, to be filled with its edge voxels: where rounding made the training grid a
    little smaller than the source, the source's outermost voxels take the nearest answer."""
    affine = grid.affine @ np.array([[1, 0, 0, -1], [0, 1, 0, -1], [0, 0, 1, -1], [0, 0, 0, 1]], dtype=float)
    x, y, z = (side + 2 for side in grid.shape)
    return Grid(shape=(x, y, z), affine=affine)


class _Spread:
    """Interpolates the source voxels between the centres of a part, its lower neighbours' last voxels included.

    Of each part that came by, the last plane along each axis is kept until the next part along that axis has used it.
    Indices are those of the bordered training grid: voxel v of the training grid is v + 1.
    """

    def __init__(self, index_map: np.ndarray, shape: tuple[int, int, int], source: tuple[int, int, int]) -> None:
        self.index_map = index_map
        self.shape = shape
        self.source = source
        self.axes = np.argmax(np.abs(index_map[:3, :3]), axis=1)
        """The source's axis that runs along each axis of the training grid."""
        scale = index_map[range(3), self.axes]
        off_axis = index_map[:3, :3].copy()
        off_axis[range(3), self.axes] = 0
        if len(set(self.axes.tolist())) < 3 or np.abs(off_axis).max() > 1e-6 * np.abs(scale).min():
            raise GeometryError("a prediction returns to grids whose axes run along those of the training grid only")
        self.reached = [
            np.floor(scale[axis] * np.arange(source[along]) + index_map[axis, 3]).astype(int)
            for axis, along in enumerate(self.axes)
        ]
        """The lower of the two training voxels that each source index lies between, along each training axis."""
        self.planes: dict[tuple[int, _Corner], np.ndarray] = {}
        self.winner: np.ndarray | None = None

    def add(self, part: Part) -> None:
        """Writes the winners of all source voxels whose last neighbour came with this part."""
        logits = part.logits.cpu().numpy()
        if self.winner is None:
            self.winner = np.zeros(self.source, dtype=np.min_scalar_type(len(logits) - 1))
        low = tuple(place.start for place in part.place)
        last = [place.stop == side for place, side in zip(part.place, self.shape, strict=True)]
        sides = tuple(n + 1 + end for n, end in zip(logits.shape[1:], last, strict=True))
        before = {axis: self.planes.pop((axis, low)) for axis in range(3) if low[axis]}
        after = {
            axis: np.empty((len(logits), *sides[:axis], *sides[axis + 1 :]), np.float32)
            for axis in range(3)
            if not last[axis]
        }
        target, index_map = self._between(part, last)
        shape = tuple(place.stop - place.start for place in target)
        best, winner = np.empty(0), np.zeros(shape, self.winner.dtype)
        for index, channel in enumerate(logits):
            whole = self._with_borders(channel, sides, {axis: plane[index] for axis, plane in before.items()}, last)
            for axis, planes in after.items():
                planes[index] = whole.take(-1, axis)
            if 0 in shape:
                continue
            values = interpolate(whole, index_map, shape, order=1, fill=-np.inf)
            if index:
                winner[values > best] = index
            best = np.maximum(best, values) if index else values
        for axis, planes in after.items():
            self.planes[axis, (*low[:axis], part.place[axis].stop, *low[axis + 1 :])] = planes
        self.winner[target] = winner

    def _between(self, part: Part, last: list[bool]) -> tuple[tuple[slice, ...], np.ndarray]:
        """Returns where in the source the part's voxels go, and the map from there into the part with its borders."""
        target = [slice(0)] * 3
        for axis, (place, along) in enumerate(zip(part.place, self.axes, strict=True)):
            reached = self.reached[axis]
            inside = np.flatnonzero(
                ((reached >= place.start) | (place.start == 0)) & ((reached < place.stop) | last[axis])
            )
            target[along] = slice(int(inside[0]), int(inside[-1]) + 1) if len(inside) else slice(0, 0)
        index_map = self.index_map.copy()
        first = np.array([place.start for place in target])
        index_map[:3, 3] += index_map[:3, :3] @ first - [place.start for place in part.place]
        return tuple(target), index_map

    @staticmethod
    def _with_borders(
        channel: np.ndarray, sides: tuple[int, ...], before: dict[int, np.ndarray], last: list[bool]
    ) -> np.ndarray:
        """Returns one class of a part with the plane before it along each axis, and behind it where the volume ends.

        Before it comes the neighbour's last plane, with that one's own borders; at the volume's faces its edge voxels.
        """
        whole = np.empty(sides, np.float32)
        whole[tuple(slice(1, 1 + n) for n in channel.shape)] = channel
        for axis, plane in before.items():
            np.moveaxis(whole, axis, 0)[0] = plane
        for axis, end in itertools.product(range(3), (0, -1)):
            if last[axis] if end else axis not in before:
                rows = np.moveaxis(whole, axis, 0)
                rows[end] = rows[end - 1 if end else 1]
        return whole
