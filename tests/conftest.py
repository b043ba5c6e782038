"""What every test may lean on: the real data beside the checkout, tiny data sets, and a cache of its own."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

# The suite runs one process per core; threads inside of each would only wait for one another.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

# The sizes at which every network still runs: seconds, not minutes.
TINY_SWIN = [
    "model.feature_size=12",
    "model.window_size=4",
    "sampler.patch_size=[64,32,32]",
    "sampler.patches_per_step=1",
]
TINY_UNETR = [
    "model=unetr",
    "model.feature_size=4",
    "model.hidden_size=24",
    "model.mlp_dim=24",
    "model.num_heads=2",
    "sampler.patch_size=[32,32,32]",
    "sampler.patches_per_step=1",
]


def shared_data(relative: str) -> Path:
    """Returns a file or folder of the real data laid beside the checkout; skips the test where it is not."""
    path = SHARED_DATA / relative
    if not path.exists():
        pytest.skip(f"real data is not here: {path}")
    return path


@pytest.fixture(autouse=True, scope="session")
def own_cache() -> Iterator[None]:
    """Keeps tests away from the user's cache."""
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory(prefix="medckpt-tests-") as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


def make_pairs(folder: Path, cases: int = 4, shape: tuple[int, int, int] = (40, 36, 30)) -> Path:
    """Writes an MSD-style data set of noisy volumes with two blobs each, in LPS voxel order and 1 x 1 x 1.5 mm."""
    generator = np.random.default_rng(7)
    affine = np.diag([-1.0, -1.0, 1.5, 1.0])
    affine[:3, 3] = [30, 40, -20]
    listed = []
    for number in range(cases):
        image = generator.normal(100, 10, shape).astype(np.float32)
        label = np.zeros(shape, np.uint8)
        label[8:20, 8:20, 8:18], label[22:34, 14:28, 10:22] = 1, 2
        image[label == 1] += 60
        image[label == 2] -= 60
        for kind, array in (("imagesTr", image), ("labelsTr", label)):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            nib.save(nib.Nifti1Image(array, affine), folder / kind / f"case_{number}.nii.gz")
        names = {"image": f"./imagesTr/case_{number}.nii.gz", "label": f"./labelsTr/case_{number}.nii.gz"}
        listed.append(names)
    facts = {"modality": {"0": "MR"}, "labels": {"0": "background", "1": "bright", "2": "dark"}, "training": listed}
    (folder / "dataset.json").write_text(json.dumps(facts))
    return folder


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of four small labelled volumes."""
    return make_pairs(tmp_path_factory.mktemp("pairs"))
