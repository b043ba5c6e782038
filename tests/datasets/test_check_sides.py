"""Organs on the wrong side: suspected where an axis is turned, silent where it is not."""

from __future__ import annotations

import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from medckpt.datasets.check.sides import body_findings, pair_findings
from medckpt.datasets.phantom import PHANTOM_LABELS, make_phantom
from medckpt.datasets.reading import read_label, read_volume
from medckpt.geometry import Volume
from tests.conftest import shared_data
from tests.datasets.check_maker import look, write

# A standing body, RAS mm: x to the right, y to the front, z to the head.
BODY = {
    "liver": (60, 10, 20),
    "spleen": (-90, -20, 25),
    "stomach": (-60, 20, 20),
    "kidney_right": (55, -40, -40),
    "kidney_left": (-55, -40, -35),
    "vertebrae_T12": (0, -60, 0),
    "vertebrae_L1": (0, -58, -30),
    "lung_upper_lobe_left": (-80, 0, 180),
    "lung_lower_lobe_left": (-80, -30, 110),
    "urinary_bladder": (0, 10, -250),
}
VALUES = {name: value for value, name in enumerate(BODY, start=1)}


def turned(*axes: int) -> dict[int, tuple[float, float, float]]:
    """The body's centres with some axes counted the other way."""
    signs = [-1 if axis in axes else 1 for axis in range(3)]
    return {VALUES[name]: tuple(s * p for s, p in zip(signs, point, strict=True)) for name, point in BODY.items()}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ((), []),
        ((0,), ["left and right"]),
        ((1,), ["back and front"]),
        ((2,), ["feet and head"]),
        ((0, 1), ["left and right", "back and front"]),  # RAS for LPS: N22
    ],
)
def test_turned_axes_are_suspected(axes: tuple[int, ...], words: list[str]) -> None:
    findings = pair_findings(turned(*axes), VALUES)
    assert [(f.code, f.severity) for f in findings] == [("flip", "warn")] * len(words)
    for finding, axis in zip(findings, words, strict=True):
        assert finding.text.startswith(f"suspicion: {axis} look exchanged")
    if axes == (0,):
        assert "liver lies 150 mm to the left of spleen" in findings[0].text


def test_two_exchanged_labels_are_no_turned_axis() -> None:
    centres = turned()
    right, left = VALUES["kidney_right"], VALUES["kidney_left"]
    centres[right], centres[left] = centres[left], centres[right]
    (finding,) = pair_findings(centres, VALUES)
    assert finding.code == "exchanged"
    assert "kidney_right and kidney_left" in finding.text


def test_order_of_vertebrae() -> None:
    centres = {1: (0.0, 0.0, 0.0), 2: (0.0, 0.0, 30.0), 3: (0.0, 0.0, 60.0)}
    (finding,) = pair_findings(centres, {"vertebrae_T12": 1, "vertebrae_L1": 2, "vertebrae_L2": 3})
    assert "feet and head look exchanged" in finding.text
    assert pair_findings(centres, {"vertebrae_L2": 1, "vertebrae_L1": 2, "vertebrae_T12": 3}) == []


def test_names_that_say_nothing() -> None:
    centres = {1: (0.0, 0.0, 0.0), 2: (9.0, 9.0, 9.0)}
    for names in (("tumour", "oedema"), ("label", "pool"), ("left ear", "right foot"), ("L1x", "bright")):
        assert pair_findings(centres, dict(zip(names, (1, 2), strict=True))) == []


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> tuple[Volume, Volume]:
    """Scan and label map of the phantom's first patient."""
    folder = make_phantom(tmp_path_factory.mktemp("phantom") / "set", patients=1)
    return read_volume(folder / "patient_001" / "ct"), read_label(folder / "patient_001" / "label.nii.gz")


@pytest.mark.parametrize(
    ("flips", "words"),
    [((), []), ((0,), ["left and right"]), ((1,), ["back and front"]), ((0, 1), ["left and right", "back and front"])],
)
def test_a_phantom_turned_under_its_affine(
    trunk: tuple[Volume, Volume], tmp_path: Path, flips: tuple[int, ...], words: list[str]
) -> None:  # N22
    for folder, volume in zip(("imagesTr", "labelsTr"), trunk, strict=True):
        name = "a_0000.nii.gz" if folder == "imagesTr" else "a.nii.gz"
        write(tmp_path / folder / name, np.flip(volume.array, flips) if flips else volume.array, volume.affine)
    facts = {"channel_names": {"0": "CT"}, "labels": PHANTOM_LABELS, "file_ending": ".nii.gz"}
    (tmp_path / "dataset.json").write_text(json.dumps(facts))
    (case,) = look(tmp_path).cases
    said = {next(w for w in [*words, ""] if w in finding.text) for finding in case.findings}
    assert said == set(words)
    assert case.result == ("warn" if words else "pass")


def test_the_middle_of_the_body_tells_of_a_single_organ(trunk: tuple[Volume, Volume]) -> None:  # as in MSD's Spleen
    image, label = trunk
    only = Volume(
        array=(label.array == PHANTOM_LABELS["spleen"]).astype(np.uint8), affine=label.affine, source=Path("l")
    )
    assert body_findings(image, only, {"background": 0, "spleen": 1}) == []
    turned = [Volume(array=np.flip(v.array, 0), affine=v.affine, source=v.source) for v in (image, only)]
    (finding,) = body_findings(*turned, {"background": 0, "spleen": 1})
    assert "to the right of the middle of the body" in finding.text


def test_real_anatomy_is_silent_and_a_mirrored_one_is_suspected() -> None:
    folder = shared_data("totalsegmentator")
    names = {"spleen": 1, "kidney_right": 2, "kidney_left": 3, "liver": 5, "stomach": 6, "pancreas": 7}
    names |= {"vertebrae_L1": 31, "vertebrae_T12": 32, "vertebrae_T11": 33, "spinal_cord": 79, "aorta": 52}
    tried = 0
    for path in sorted(folder.rglob("*.nii.gz")):
        if "seg" not in path.name:
            continue
        image = nib.load(path)
        array = np.asarray(image.dataobj)
        present = {name: value for name, value in names.items() if (array == value).sum() > 50}
        if array.ndim != 3 or not {"spleen", "liver"} <= set(present):
            continue
        tried += 1
        for flips, expected in (((), set()), ((0,), {0}), ((1,), {1}), ((0, 1), {0, 1})):
            centres = {}
            for value in present.values():
                index = np.argwhere(array == value).mean(axis=0)
                x, y, z = image.affine[:3, :3] @ index + image.affine[:3, 3]
                centres[value] = tuple(-c if a in flips else c for a, c in enumerate((float(x), float(y), float(z))))
            found = pair_findings(centres, present)  # type: ignore[arg-type]
            words = {0: "left and right", 1: "back and front"}
            assert {next(a for a, w in words.items() if w in f.text) for f in found} == expected, path.name
    assert tried
