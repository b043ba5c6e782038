from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
import torch
from torch import nn

from medckpt.config import RunConfig, compose
from medckpt.datasets.layouts import Case
from medckpt.errors import DataError
from medckpt.geometry import Grid, canonical_grid
from medckpt.inference.inputs import find_inputs
from medckpt.inference.predict import Predictor
from medckpt.inference.source_grid import to_source_grid
from medckpt.run import make_network, open_dataset
from tests.conftest import TINY_UNETR, shared_data
from tests.inference.test_sliding_window import assembled, cut


class Threshold(nn.Module):
    """Knows one thing: what is brighter than 0.5 is class 1. Any error of place shows in its answer."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return torch.cat([0.5 - image, image - 0.5], dim=1)


def predictor(network: nn.Module, config: RunConfig) -> Predictor:
    labels = {"background": 0, "thing": 5}
    return Predictor(network=network, config=config, labels=labels, channels=1, device=torch.device("cpu"))


@pytest.mark.parametrize("shape", [(20, 37, 51), (64, 33, 32), (97, 40, 31)])
def test_windows_cover_every_voxel_in_its_place(shape: tuple[int, int, int]) -> None:
    image = torch.from_numpy(np.random.default_rng(0).random((1, *shape)).astype(np.float32))
    logits = assembled(Threshold(), image, (32, 32, 32), overlap=0.5)
    assert logits.shape == (2, *shape)
    assert torch.equal(logits.argmax(0), (image[0] > 0.5).long())


@pytest.mark.parametrize("spacing", [(1.3, 0.9, 2.0), (0.7, 0.7, 1.1)])
@pytest.mark.parametrize("codes", ["RAS", "LPS", "AIR"])
def test_logits_return_to_where_they_came_from(spacing: tuple[float, float, float], codes: str) -> None:
    affine = np.diag([*spacing, 1.0])
    affine[:3, 3] = [3, -7, 11]
    plain = nib.Nifti1Image(np.zeros((31, 29, 17), np.uint8), affine)
    turned = plain.as_reoriented(nib.orientations.axcodes2ornt(codes))
    source = Grid(shape=turned.shape, affine=turned.affine)
    grid = canonical_grid(source, (1.0, 1.0, 1.5))
    inside = distance_from_centre(grid, source) - 8.0
    logits = torch.from_numpy(np.stack([inside, -inside]).astype(np.float32))
    winner = to_source_grid(cut(logits, 7), grid, source)
    distance = distance_from_centre(source, source) - 8.0
    clear = np.abs(distance) > 0.2  # linear interpolation of a distance is exact but for its curvature
    np.testing.assert_array_equal(winner[clear], (distance < 0)[clear])


def distance_from_centre(grid: Grid, scan: Grid) -> np.ndarray:
    """Distance in mm of each voxel of `grid` from the centre of `scan`."""
    voxels = np.stack(np.meshgrid(*map(np.arange, grid.shape), indexing="ij"), -1)
    places = voxels @ grid.affine[:3, :3].T + grid.affine[:3, 3]
    centre = scan.affine[:3, :3] @ ((np.array(scan.shape) - 1) / 2) + scan.affine[:3, 3]
    return np.linalg.norm(places - centre, axis=-1)


def test_mirrored_windows_are_answered_and_turned_back() -> None:
    class Ramp(nn.Module):
        """Answers with the place of a voxel in its window, which a mirror image must reverse."""

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            places = torch.linspace(0, 1, image.shape[2])[None, None, :, None, None].expand_as(image)
            return torch.cat([image, places], dim=1)

    image = torch.rand(1, 32, 32, 32)
    plain = assembled(Ramp(), image, (32, 32, 32), overlap=0.5)
    both = assembled(Ramp(), image, (32, 32, 32), overlap=0.5, mirror_axes=(0, 2))
    torch.testing.assert_close(plain[0], image[0])
    torch.testing.assert_close(both[0], image[0])
    torch.testing.assert_close(both[1], torch.full_like(both[1], 0.5))


def test_the_outermost_voxels_take_the_nearest_answer() -> None:
    source = Grid(shape=(204, 8, 8), affine=np.diag([0.5, 1, 1, 1]))
    grid = canonical_grid(source, (4.0, 1.0, 1.0))  # 25.5 voxels become 26 or 25: an edge is cut
    logits = torch.stack([torch.zeros(grid.shape), torch.ones(grid.shape)])
    assert to_source_grid(cut(logits, 5), grid, source).all()


def write_cube(path: Path, codes: str) -> np.ndarray:
    """Writes one cube at the same place in millimetres, whatever the order of voxels."""
    array = np.zeros((40, 44, 36), np.float32)
    array[6:18, 20:40, 5:15] = 1
    image = nib.Nifti1Image(array, np.diag([1.0, 1.2, 1.5, 1]))
    ornt = nib.orientations.ornt_transform(
        nib.orientations.io_orientation(image.affine), nib.orientations.axcodes2ornt(codes)
    )
    turned = image.as_reoriented(ornt)
    nib.save(turned, path)
    return np.asarray(turned.dataobj)


@pytest.mark.parametrize("codes", ["RAS", "LPS", "PIR", "SLA"])
def test_a_prediction_lies_on_the_input_whatever_its_orientation(tmp_path: Path, codes: str) -> None:
    config = compose("swin_ct", ["memory=cpu", *TINY_UNETR, "data.window_hu=[-1,1]", "data.spacing_mm=[1,1.2,1.5]"])
    path = tmp_path / "scan.nii.gz"
    expected = write_cube(path, codes)
    case = Case(name="scan", patient="scan", images=(path,), label=None)
    labels, volumes = predictor(Threshold(), config).predict(case)
    np.testing.assert_array_equal(labels, (expected > 0.5) * 5)
    np.testing.assert_allclose(volumes[0].affine, nib.load(path).affine)


def test_an_answer_that_is_no_number_is_no_label(tmp_path: Path) -> None:
    class Broken(nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return torch.cat([image, image / 0 * 0], dim=1)

    config = compose("swin_ct", ["memory=cpu", *TINY_UNETR, "data.window_hu=[-1,1]", "data.spacing_mm=[2,1.2,1.5]"])
    write_cube(tmp_path / "scan.nii.gz", "RAS")
    case = Case(name="scan", patient="scan", images=(tmp_path / "scan.nii.gz",), label=None)
    with pytest.raises(DataError, match=r"scan\.nii\.gz: the network's answer is not a number"):
        predictor(Broken(), config).predict(case)


REAL_SCANS = [
    "totalsegmentator/ct_dicom_j2k",
    "totalsegmentator/ct_abdomen_sm.nii.gz",
    "hippocampus_msd_task04/unlabelled",
]


@pytest.mark.parametrize("scan", REAL_SCANS)
def test_real_scans_get_labels_on_their_own_grid_as_simpleitk_reads_it(tmp_path: Path, pairs: Path, scan: str) -> None:
    from medckpt.datasets.reading import write_label

    path = shared_data(scan)
    config = compose("swin_ct", ["memory=cpu", *TINY_UNETR, "data.spacing_mm=[4,4,4]", f"data={pairs}"])
    network = make_network(config, open_dataset(pairs), "cpu")
    ready = Predictor(
        network=network, config=config, labels=open_dataset(pairs).labels, channels=1, device=torch.device("cpu")
    )
    (case,) = find_inputs(path, channels=1)
    labels, volumes = ready.predict(case)
    out = tmp_path / "out.nii.gz"
    write_label(out, labels, volumes[0].grid)

    if path.is_dir() and "dicom" in scan:
        reader = sitk.ImageSeriesReader()
        reader.SetFileNames(reader.GetGDCMSeriesFileNames(str(path)))
        expected = reader.Execute()
    else:
        expected = sitk.ReadImage(str(case.images[0]))
    written = sitk.ReadImage(str(out))
    assert written.GetSize() == expected.GetSize()
    np.testing.assert_allclose(written.GetSpacing(), expected.GetSpacing(), atol=1e-4)
    np.testing.assert_allclose(written.GetOrigin(), expected.GetOrigin(), atol=1e-3)
    np.testing.assert_allclose(written.GetDirection(), expected.GetDirection(), atol=1e-5)
