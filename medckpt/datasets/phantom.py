"""The embedded data set: a phantom CT of the trunk, drawn in seconds, the same for the same seed.

Every patient is a table of smooth solids in the body's own millimetres (x to the left, y to the back, z to the head,
0 at the right dome of the diaphragm), painted one over the other on the patient's grid and written as a DICOM series
with a NIfTI label. It is made to be learned from shape and place: ribs look like spine, foam like lung, the aorta like
kidneys, so that no window of intensities finds the labels (`tests/datasets/test_phantom.py` measures that).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from medckpt.datasets import phantom_dicom as disk
from medckpt.errors import ConfigError, DataError

PHANTOM_VERSION = 1
PHANTOM_LABELS: dict[str, int] = {
    "background": 0,
    "body": 1,
    "lungs": 2,
    "liver": 3,
    "spleen": 4,
    "kidneys": 5,
    "spine": 6,
}
PHASES = ("native", "arterial", "portal venous")

Array = NDArray[np.float32]
Pair = tuple[float, float]
Triple = tuple[float, float, float]
Solid = Callable[[Array, Array, Array], Array]  # of x, y, z in mm: negative inside, any scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Tissue:
    """What a solid is made of: label, HU in the three phases, spread between patients and texture within one."""

    label: str
    hu: Triple
    spread: float
    texture: float


def _tissue(label: str, *hu: float, spread: float, texture: float) -> Tissue:
    native, arterial, portal = hu if len(hu) == 3 else hu * 3
    return Tissue(label=label, hu=(native, arterial, portal), spread=spread, texture=texture)


TISSUES: dict[str, Tissue] = {
    "air": _tissue("background", -1000, spread=0, texture=0),
    "foam": _tissue("background", -830, spread=70, texture=40),  # as dark as lung
    "table": _tissue("background", 45, spread=25, texture=12),  # as bright as muscle
    "skin": _tissue("body", 20, spread=15, texture=5),
    "fat": _tissue("body", -105, spread=8, texture=8),
    "muscle": _tissue("body", 50, 58, 64, spread=6, texture=8),
    "mesentery": _tissue("body", -95, spread=10, texture=18),
    "lung": _tissue("lungs", -820, spread=70, texture=45),
    "heart": _tissue("body", 42, 210, 150, spread=12, texture=8),
    "gut": _tissue("body", 35, 60, 75, spread=15, texture=12),  # wall of stomach and bowel
    "chyme": _tissue("body", 60, 70, 80, spread=50, texture=15),  # with or without oral contrast
    "gas": _tissue("body", -850, spread=60, texture=35),  # in foamy content: as dark as lung
    "liver": _tissue("liver", 55, 75, 110, spread=6, texture=8),
    "spleen": _tissue("spleen", 45, 110, 120, spread=6, texture=8),
    "kidney": _tissue("kidneys", 30, 150, 180, spread=10, texture=10),
    "vessel": _tissue("body", 40, 300, 160, spread=15, texture=5),
    "rib": _tissue("body", 300, spread=60, texture=50),
    "sternum": _tissue("body", 190, spread=40, texture=40),
    "disc": _tissue("spine", 85, spread=10, texture=8),
    "marrow": _tissue("spine", 180, spread=40, texture=25),
    "cortex": _tissue("spine", 360, spread=50, texture=40),
    "cord": _tissue("spine", 30, spread=5, texture=5),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One row of a patient's table: a solid of a tissue, and the box (mm) outside of which it need not be looked at."""

    tissue: str
    solid: Solid
    low: Triple = (-400, -400, -400)
    high: Triple = (400, 400, 400)
    extra_hu: float = 0.0


def _ellipsoid(tissue: str, centre: Triple, radii: Triple, *, turn: float = 0, power: int = 2, plus: float = 0) -> Part:
    """A superellipsoid of `power` 2, 4 or 8, turned by `turn` radians about z, `plus` HU brighter than its tissue."""
    (cx, cy, cz), (rx, ry, rz), reach = centre, radii, max(radii[:2])
    cos, sin = math.cos(turn), math.sin(turn)

    def solid(x: Array, y: Array, z: Array) -> Array:
        dx, dy = x - cx, y - cy
        u, v, w = (cos * dx + sin * dy) / rx, (cos * dy - sin * dx) / ry, (z - cz) / rz
        for _ in range(power.bit_length() - 1):  # squares are ten times faster than powers
            u, v, w = u * u, v * v, w * w
        return u + v + w - 1

    low, high = (cx - reach, cy - reach, cz - rz), (cx + reach, cy + reach, cz + rz)
    return Part(tissue=tissue, solid=solid, low=low, high=high, extra_hu=plus)


class Trunk:
    """The sizes that a patient's parts share, drawn once; its methods list the parts in the order of painting."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.size = rng.uniform(0.92, 1.08) * rng.uniform([0.96, 0.96, 0.98], [1.04, 1.04, 1.02])  # of x, y, z
        self.half_width, self.half_depth = rng.uniform(150, 158), rng.uniform(107, 113)
        self.fat, self.wall = rng.uniform(7, 17), rng.uniform(9, 13)
        self.arms = bool(rng.random() < 0.35)
        self.lean, self.bend, self.waist = rng.uniform(-5, 5), rng.uniform(4, 10), rng.uniform(0, 0.08)
        self.dome = {-1: 0.0, 1: rng.uniform(-18, -8)}  # height of the diaphragm by side, -1 is the right
        self.steep = rng.uniform(0.008, 0.011)

    @property
    def width_mm(self) -> float:
        """From side to side, with the arms where they lie at the sides."""
        return 2 * (self.half_width + (58 if self.arms else 25)) * float(self.size[0])

    def near(self, value: float, spread: float) -> float:
        """Returns a number drawn around `value`."""
        return float(value + self.rng.uniform(-spread, spread))

    def inset(self, depth: float) -> Solid:
        """The outline of the body taken in by `depth` mm; in mm."""
        a, b = self.half_width - depth, self.half_depth - depth

        def solid(x: Array, y: Array, z: Array) -> Array:
            slim = 1 - self.waist / (1 + np.exp((z + 60) / 30))
            return np.asarray((np.sqrt((x / (a * slim)) ** 2 + (y / b) ** 2) - 1) * b)

        return solid

    def diaphragm(self, side: int, x: Array, y: Array) -> Array:
        """Height of a dome, which is lower at the back; z in mm."""
        return np.asarray(self.dome[side] - self.steep * ((x - side * 58) ** 2 + y**2) - 0.25 * y)

    def spine_at(self, z: Array) -> tuple[Array, Array]:
        """Centre of the vertebral bodies at height z: x and y in mm."""
        x, y = self.lean * np.sin(z / 80), self.half_depth - 78 + self.bend * np.sin((z + 40) / 75)
        return np.asarray(x), np.asarray(y)

    def outside(self) -> Iterator[Part]:
        """Foam and table under the patient, cushions at the sides, arms."""
        back, width = self.half_depth, self.near(195, 10)
        thick, gap = self.near(26, 8), self.near(9, 2)
        yield _ellipsoid("foam", (0, back - 20 + thick / 2, -50), (width, 20 + thick / 2, 900), power=8)
        yield _ellipsoid("table", (0, back + thick + gap, -50), (width, gap, 900), power=8)
        for side in (-1, 1):
            x = side * (self.half_width + self.near(14, 4))
            yield _ellipsoid("foam", (x, 35, self.near(-60, 60)), (30, self.near(60, 10), self.near(90, 30)), power=4)
            if self.arms:
                arm = (x + side * 12, self.near(15, 10), -60)
                for tissue, radius in (("skin", 31), ("fat", 29), ("muscle", 23), ("rib", 8)):
                    yield _ellipsoid(tissue, arm, (radius, radius * 1.15, 900))

    def shell(self) -> Iterator[Part]:
        """Skin, fat, muscle, the cavity of fat, and the ribs in the wall."""
        for tissue, depth in (("skin", 0), ("fat", 2.5), ("muscle", self.fat), ("mesentery", self.fat + self.wall)):
            yield Part(tissue=tissue, solid=self.inset(depth))
        wall, period, slope = self.inset(self.fat + self.wall - 5), self.near(27, 2), self.near(0.4, 0.1)

        def ribs(x: Array, y: Array, z: Array) -> Array:
            slab = np.abs((z - slope * y + 500) % period - period / 2) - 6
            arch = -70 - 0.6 * y - z  # the costal arch: no ribs below it
            return np.maximum(np.maximum(np.abs(wall(x, y, z)) - 4, slab), arch)

        yield Part(tissue="rib", solid=ribs)
        yield _ellipsoid("sternum", (0, self.fat + 6 - self.half_depth, 60), (19, 6, 75), power=4)

    def chest(self) -> Iterator[Part]:
        """Lungs above the diaphragm, the heart between them."""
        for side in (-1, 1):
            yield Part(tissue="lung", solid=self._lung(side, self.near(24, 4), self.near(3, 3)))
        heart = (self.near(22, 6), self.near(-38, 5), self.near(38, 6))
        yield _ellipsoid("muscle", heart, (58, 44, 48), turn=0.5)
        yield _ellipsoid("heart", heart, (50, 36, 40), turn=0.5)

    def _lung(self, side: int, inner: float, wave: float) -> Solid:
        wall = self.inset(self.fat + self.wall + 1)

        def solid(x: Array, y: Array, z: Array) -> Array:
            mediastinum = inner + 6 * np.sin(y / 30 + z / 50 + wave) - side * x
            return np.maximum(np.maximum(wall(x, y, z), mediastinum), self.diaphragm(side, x, y) - z)

        return solid

    def abdomen(self) -> Iterator[Part]:
        """Stomach, bowel, liver, spleen and kidneys under the diaphragm."""
        yield from self._hollow((self.near(55, 6), self.near(-38, 6), self.near(-70, 6)), (38, 34, 40))
        for _ in range(7):
            centre = (self.near(0, 85), self.near(-38, 30), self.near(-135, 38))
            yield from self._hollow(centre, (self.near(23, 6), self.near(20, 5), self.near(22, 6)))
        right, left = self.near(-62, 4), self.near(12, 10)
        lobes = (
            _ellipsoid("liver", (right, self.near(0, 5), self.near(-52, 5)), (72, 82, self.near(72, 10))),
            _ellipsoid("liver", (left, -44, self.near(-48, 5)), (62, 36, 36), turn=0.15),
        )
        wobble = self.near(3, 3), self.near(3, 3)

        def liver(x: Array, y: Array, z: Array) -> Array:
            ripple = 0.1 * np.sin(x / 19 + wobble[0]) * np.sin(y / 23 + z / 27 + wobble[1])
            return np.asarray(np.minimum(lobes[0].solid(x, y, z), lobes[1].solid(x, y, z)) + ripple)

        yield self._kept(Part(tissue="liver", solid=liver))
        spleen = (self.near(90, 5), self.near(34, 6), self.near(-62, 6))
        radii = (self.near(32, 3), self.near(50, 5), self.near(52, 5))
        yield self._kept(_ellipsoid("spleen", spleen, radii, turn=self.near(0.5, 0.2)))
        for side in (-1, 1):
            yield self._column("muscle", (side * 33, 6), (13, 16), only=lambda z: z + 75)  # psoas
            yield from self._kidney(side)

    def _kept(self, part: Part) -> Part:
        """Keeps a part in the belly: a rim of fat to the wall, the thickness of the diaphragm above."""
        wall = self.inset(self.fat + self.wall + 5)

        def solid(x: Array, y: Array, z: Array) -> Array:
            roof = np.maximum(np.maximum(self.diaphragm(-1, x, y), self.diaphragm(1, x, y)), -22) - 7
            # In mm / 30, about the slope of the organs' own functions, which have no unit.
            return np.maximum(part.solid(x, y, z), np.maximum(wall(x, y, z), z - roof) / 30)

        return replace(part, solid=solid)

    def _hollow(self, centre: Triple, radii: Triple) -> Iterator[Part]:
        """Stomach or bowel: a wall, content with or without contrast, most often gas risen to the front."""
        inner, level = (radii[0] - 4, radii[1] - 4, radii[2] - 4), self.near(0, 10)
        yield self._kept(_ellipsoid("gut", centre, radii))
        content = self._kept(_ellipsoid("chyme", centre, inner, plus=self.near(20, 60)))
        yield content
        if self.rng.random() < 0.7:

            def gas(x: Array, y: Array, z: Array) -> Array:
                return np.maximum(content.solid(x, y, z), (y - centre[1] + level) / 20)

            yield replace(content, tissue="gas", solid=gas, extra_hu=0.0)

    def _kidney(self, side: int) -> Iterator[Part]:
        x, y, z = side * self.near(68, 4), self.near(42, 4), self.near(-108 + 6 * side, 5)  # the left one is higher
        width, depth, height, turn = self.near(30, 2), self.near(27, 2), self.near(52, 5), side * self.near(0.5, 0.2)
        yield self._kept(_ellipsoid("mesentery", (x, y, z), (width + 7, depth + 7, height + 8), turn=turn))
        yield self._kept(_ellipsoid("kidney", (x, y, z), (width, depth, height), turn=turn))
        hilum = (x - side * width * 0.75, y - 6, z)
        yield _ellipsoid("mesentery", hilum, (width * 0.4, 7, height * 0.3), turn=turn)

    def back(self) -> Iterator[Part]:
        """Muscles behind the spine, the great vessels, and the vertebral column with its arches and canal."""
        for side in (-1, 1):
            yield self._column("muscle", (side * 27, 38), (22, 18))
        yield self._column("vessel", (self.near(10, 4), -36), (11, 11))
        yield self._column("vessel", (self.near(-22, 3), -32), (12, 9), extra_hu=-15)
        period, phase = self.near(30, 2), self.near(0, 15)

        def height(z: Array) -> Array:  # 0 amid a vertebral body, half the period amid a disc
            return np.abs((z + phase + 600) % period - period / 2)

        yield self._column("disc", (0, 0), (26, 21))
        yield self._column("cortex", (0, 0), (26, 21), only=lambda z: height(z) - period / 2 + 3)
        yield self._column("marrow", (0, 0), (22.5, 17.5), only=lambda z: height(z) - period / 2 + 6)
        yield self._column("cortex", (0, 27), (20, 16))
        yield self._column("cortex", (0, 28), (38, 7), only=lambda z: height(z) - 7)  # transverse processes
        yield self._column("cortex", (0, 45), (6, 17), only=lambda z: height(z) - 9)  # spinous process
        yield self._column("cord", (0, 27), (10, 8))

    def _column(
        self, tissue: str, at: Pair, radii: Pair, only: Callable[[Array], Array] | None = None, extra_hu: float = 0.0
    ) -> Part:
        """An elliptic cylinder that follows the spine; `only` (in mm) keeps the heights where it is negative."""

        def solid(x: Array, y: Array, z: Array) -> Array:
            along_x, along_y = self.spine_at(z)
            u, v = (x - along_x - at[0]) / radii[0], (y - along_y - at[1]) / radii[1]
            around = (np.sqrt(u * u + v * v) - 1) * min(radii)
            return np.asarray(around if only is None else np.maximum(around, only(z)), dtype=np.float32)

        reach = abs(at[0]) + radii[0] + 6
        low, high = (-reach, -90, -400), (reach, self.half_depth + 20, 400)
        return Part(tissue=tissue, solid=solid, low=low, high=high, extra_hu=extra_hu)


def phantom_folder(patients: int = 20, seed: int = 0) -> Path:
    """Returns where the phantom is cached: `$XDG_CACHE_HOME` or `~/.cache`, then `medckpt/phantom-v1`.

    Another number of patients or another seed has a folder of its own, so that no run changes the data of another.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    if not base.is_absolute():  # the XDG rule: a relative path is to be ignored
        base = Path.home() / ".cache"
    variant = "" if (patients, seed) == (20, 0) else f"-{patients}-patients-seed-{seed}"
    return base / "medckpt" / f"phantom-v{PHANTOM_VERSION}{variant}"


def make_phantom(
    folder: Path, patients: int = 20, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> Path:
    """Makes the phantom in `folder`, or finds it there, and returns `folder`.

    What is there already is checked by content; only patients that are missing or differ are made again, each beside
    its place and then renamed into it, so that neither an interrupted run nor a second one at the same time leaves half
    a patient. `dataset.json`, written last, says that all are there. `progress` is called with (done, total).

    Raises ConfigError for numbers out of range, DataError when the folder holds something else or cannot be written.
    """
    folder = Path(folder)
    if not 1 <= patients <= 999:
        raise ConfigError(f"phantom: patients is {patients}, it must be from 1 to 999.")
    if seed < 0:
        raise ConfigError(f"phantom: seed is {seed}, it must not be negative.")
    request = {"phantom_version": PHANTOM_VERSION, "seed": seed, "patients": patients}
    names = [f"patient_{number:03d}" for number in range(1, patients + 1)]
    digests: dict[str, disk.Digest] = {}
    pool = ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1))
    try:
        known = disk.claim_folder(folder, request)
        jobs = [pool.submit(_ensure_patient, folder / name, i, seed, known.get(name)) for i, name in enumerate(names)]
        for name, job in zip(names, jobs, strict=True):
            digests[name] = job.result()
            if progress is not None:
                progress(len(digests), patients)
        head = {"name": "phantom CT", "channel_names": {"0": "CT"}, "labels": PHANTOM_LABELS, "licence": "CC0-1.0"}
        disk.finish_folder(folder, {**head, **request, "files": digests})
    except OSError as error:
        raise DataError(
            f"phantom: cannot write to {folder} ({error}). Give a folder of your own, with room."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
    return folder


def _ensure_patient(target: Path, index: int, seed: int, known: disk.Digest | None) -> disk.Digest:
    """Returns the digest of a patient's folder, which is made anew unless it has the digest that is known for it."""
    if known is not None and disk.folder_digest(target) == known:
        return known
    return disk.place_folder(target, lambda new: disk.write_patient(new, *draw_patient(index, seed)))


def draw_patient(index: int, seed: int) -> tuple[Array, NDArray[np.uint8], disk.Grid, disk.SeriesNames]:
    """Draws the patient `index` (from 0): HU (slices, rows, columns) float32, labels uint8, their grid, their names.

    Depends on `index` and `seed` only, never on how many patients are made. Patient 2 is stored with turned axes; the
    slice numbers run from the head, from the feet, or (every fourth patient) at random.
    """
    rng = np.random.default_rng([PHANTOM_VERSION, seed, index])
    phase = index % len(PHASES)
    trunk = Trunk(rng)
    grid, to_body = disk.place_on_table(rng, trunk.width_mm, trunk.size, turned=index == 2)
    mean_hu = {name: tissue.hu[phase] + rng.uniform(-1, 1) * tissue.spread for name, tissue in TISSUES.items()}
    parts = [*trunk.outside(), *trunk.shell(), *trunk.chest(), *trunk.abdomen(), *trunk.back()]
    hu, labels = _paint(parts, mean_hu, grid, to_body, rng)
    slices = np.arange(1, grid.shape[0] + 1)
    numbers = rng.permutation(slices) if index % 4 == 3 else slices[:: 1 if index % 2 else -1]
    names = disk.SeriesNames(
        key=f"medckpt phantom {PHANTOM_VERSION}, seed {seed}, patient {index + 1}",
        patient_id=f"PHANTOM-{index + 1:03d}",
        patient_name=f"Phantom^{index + 1:03d}",
        description=f"CT trunk, {PHASES[phase]}",
        instance_numbers=tuple(int(number) for number in numbers),
    )
    return hu, labels, grid, names


def _paint(
    parts: list[Part],
    mean_hu: dict[str, float],
    grid: disk.Grid,
    to_body: NDArray[np.float64],
    rng: np.random.Generator,
) -> tuple[Array, NDArray[np.uint8]]:
    """Paints `parts` one over the other with soft edges, adds noise and blurs as a scanner does."""
    from scipy.ndimage import gaussian_filter

    x, y, z = disk.body_coordinates(grid, to_body, rng)
    grain = rng.standard_normal(grid.shape, dtype=np.float32)
    texture = gaussian_filter(grain, [12 / mm for mm in grid.spacing_mm], truncate=2.5)
    texture /= texture.std()
    hu = np.full(grid.shape, mean_hu["air"], dtype=np.float32)
    labels = np.zeros(grid.shape, dtype=np.uint8)
    from_body = np.asarray(np.linalg.inv(to_body), dtype=np.float64)
    for part in parts:
        box = disk.index_box(part.low, part.high, from_body, grid.shape)
        if box is None:
            continue
        depth = part.solid(x[box], y[box], z[box])
        # Partial volume to first order: over one voxel the function runs through about `span`, by second moments.
        span = np.sqrt(sum(step * step for step in np.gradient(depth)))
        cover = np.clip(0.5 - depth / (span + np.float32(1e-6)), 0, 1)
        tissue = TISSUES[part.tissue]
        hu[box] += cover * (mean_hu[part.tissue] + part.extra_hu + tissue.texture * texture[box] - hu[box])
        labels[box][depth < 0] = PHANTOM_LABELS[tissue.label]
    hu += float(rng.uniform(15, 25)) * rng.standard_normal(grid.shape, dtype=np.float32)
    return gaussian_filter(hu, (0.35, 0.55, 0.55), truncate=3), labels
