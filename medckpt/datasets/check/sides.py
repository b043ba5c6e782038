"""Are left and right, front and back, up and down where the header says? Named organs raise a suspicion.

Every rule says that one organ lies further to the right (R), to the front (A) or to the head (S) than another one. A
header that is wrong about an axis breaks all rules of it; exchanged labels of a pair break one. Names are compared in
lower case with blanks for underscores. Rules hold for the usual body; situs inversus breaks those of the first axis.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from medckpt.datasets.check.findings import Finding
from medckpt.geometry import Volume

Point = tuple[float, float, float]

MARGIN_MM = 2.0
"""Centres nearer to each other than this along an axis say nothing about it."""

BODY_MARGIN_MM = 20.0
"""An organ counts as on one side of the body if its centre lies this far from the middle of the body."""

BODY_EXTENT_MM = 250.0
"""A scan must be this wide for the middle of the body to be that of the scan's."""

BODY_HU = -300.0

AXES = (("left", "right"), ("back", "front"), ("feet", "head"))
_LUNG = r"lungs?\b|heart|trachea"
_SPINE = r"spine|vertebra|spinal cord"
_LOW = r"urinary bladder|^bladder|prostate|femur|\bhip\b|sacrum"
_RULES: tuple[tuple[str, str, int], ...] = (  # the first lies further to the right / front / head than the second
    (r"^liver", r"^spleen|^stomach", 0),
    (r"^gall ?bladder", r"^spleen|^stomach", 0),
    (r"vena cava|postcava|^ivc$", r"^aorta", 0),
    (r"^liver|^stomach|^pancreas|^heart|^gall ?bladder|small bowel", _SPINE, 1),
    (r"urinary bladder|^bladder", r"sacrum|rectum", 1),
    (_LUNG, r"kidney|" + _LOW, 2),
    (r"^liver|^spleen|kidney|^pancreas", _LOW, 2),
    (_LUNG, r"^pancreas", 2),
)
_BODY_SIDES = ((r"^liver|^gall ?bladder", 1), (r"^spleen|^stomach", -1))
_PAIRS = (
    (r"\b(?:right|r)\b", r"\b(?:left|l)\b", 0),
    (r"\banterior\b", r"\bposterior\b", 1),
    (r"\b(?:superior|upper)\b", r"\b(?:inferior|lower)\b", 2),
)
_VERTEBRA = re.compile(r"^(?:vertebrae? )?(?P<part>[ctls])(?P<number>\d{1,2})$")


class Vote(NamedTuple):
    """`first` is `distance_mm` further to the right / front / head than `second`; negative where it is not."""

    first: str
    second: str
    axis: int
    distance_mm: float
    pair: bool


def pair_findings(centres_mm: Mapping[int, Point], labels: Mapping[str, int]) -> list[Finding]:
    """Compares the centres (RAS mm) of named label values with each other; one finding per axis that looks wrong."""
    votes = _votes({name: centres_mm[value] for name, value in labels.items() if value in centres_mm})
    findings = []
    for axis in range(3):
        along = [vote for vote in votes if vote.axis == axis and abs(vote.distance_mm) > MARGIN_MM]
        wrong = sorted((vote for vote in along if vote.distance_mm < 0), key=lambda vote: vote.distance_mm)
        if not wrong:
            continue
        if 2 * len(wrong) > len(along):
            findings.append(_flip(axis, _words(wrong[0]), len(wrong), len(along)))
        elif any(vote.pair for vote in wrong):
            findings.append(_exchanged(next(vote for vote in wrong if vote.pair), len(along) - len(wrong)))
    return findings


def body_findings(image: Volume, label: Volume, labels: Mapping[str, int]) -> list[Finding]:
    """Compares liver, gallbladder, spleen and stomach with the middle of the body; for CT that shows all of it."""
    known = [(name, value, side) for name, value in labels.items() if (side := _body_side(name))]
    grid = image.grid
    extent = np.abs(grid.affine[0, :3]) @ np.array(grid.shape)
    if not known or label.array.shape != image.array.shape or extent < BODY_EXTENT_MM or image.array.min() > -500:
        return []
    coarse = image.array[::4, ::4, ::4] > BODY_HU
    if not coarse.any():
        return []
    middle = grid.affine[0, :3] @ (np.argwhere(coarse).mean(axis=0) * 4) + grid.affine[0, 3]
    offsets = []
    for name, value, side in known:
        voxels = np.argwhere(label.array == value)
        if len(voxels):
            x = grid.affine[0, :3] @ voxels.mean(axis=0) + grid.affine[0, 3]
            offsets.append((side * float(x - middle), name, side))
    wrong = [item for item in offsets if item[0] < -BODY_MARGIN_MM]
    if not wrong or 2 * len(wrong) <= len(offsets):
        return []
    distance, name, side = min(wrong)
    words = f"{name} lies {-distance:.0f} mm to the {AXES[0][side < 0]} of the middle of the body"
    return [_flip(0, words, len(wrong), len(offsets))]


def _votes(centres: Mapping[str, Point]) -> list[Vote]:
    plain = {re.sub(r"[\s_.-]+", " ", name.lower()).strip(): name for name in centres}
    found: dict[tuple[str, str, int], bool] = {}
    for first, second, axis in _RULES:
        for a in plain:
            for b in plain:
                if a != b and re.search(first, a) and re.search(second, b) and not re.search(second, a):
                    found[a, b, axis] = False
    for first, second, axis in _PAIRS:
        for a in plain:
            partner = next((b for b in plain if a != b and _partner(a, first, b, second)), None)
            if partner is not None:
                found[a, partner, axis] = True
    column = sorted((_level(name), name) for name in plain if _VERTEBRA.match(name))
    found |= {(a[1], b[1], 2): True for a, b in itertools.pairwise(column)}
    return [
        Vote(plain[a], plain[b], axis, centres[plain[a]][axis] - centres[plain[b]][axis], pair)
        for (a, b, axis), pair in found.items()
    ]


def _partner(a: str, first: str, b: str, second: str) -> bool:
    """Says whether two names differ only by a word and its opposite."""
    return bool(re.search(first, a) and re.search(second, b)) and re.sub(first, "", a) == re.sub(second, "", b)


def _level(name: str) -> tuple[int, int]:
    match = _VERTEBRA.match(name)
    assert match is not None
    return "ctls".index(match["part"]), int(match["number"])


def _body_side(name: str) -> int:
    plain = name.lower().replace("_", " ").strip()
    return next((side for pattern, side in _BODY_SIDES if re.search(pattern, plain)), 0)


def _words(vote: Vote) -> str:
    low, _ = AXES[vote.axis]
    way = {"left": "to the left of", "back": "behind", "feet": "below"}[low]
    return f"{vote.first} lies {-vote.distance_mm:.0f} mm {way} {vote.second}"


def _flip(axis: int, words: str, wrong: int, total: int) -> Finding:
    low, high = AXES[axis]
    text = (
        f"suspicion: {low} and {high} look exchanged: {words} ({wrong} of {total} signs). Compare with the picture in "
        "the report; if it is so, the header is wrong about this axis (convert the case again from DICOM, or correct "
        "the affine of image and label alike)."
    )
    if total == 1:
        text = text.removesuffix(".") + ", or the two labels are exchanged."
    return Finding(code="flip", severity="warn", text=text)


def _exchanged(vote: Vote, right: int) -> Finding:
    text = (
        f"suspicion: the labels {vote.first} and {vote.second} look exchanged: {_words(vote)}, while {right} other "
        "signs of this axis are in place. Compare with the picture in the report."
    )
    return Finding(code="exchanged", severity="warn", text=text)
