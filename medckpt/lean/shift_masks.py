"""The masks of shifted windows: one per window as MONAI makes them, of which at most eight (in 3D) differ.

Or in a compact form, *labels*: of each token the number of the region of the volume that it came from before the shift.
Tokens of one window attend to each other where their labels are equal; elsewhere MONAI adds -100 to the score.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

_SAMPLED_ROWS = 8
_COMPARED_AT_ONCE = 16
"""Windows."""
_APART = -100.0
"""What MONAI adds to the score of two tokens that came from different regions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftMasks:
    """Masks of windows without repeats."""

    distinct: Tensor
    """Shape (distinct masks, tokens, tokens), the dtype of the given mask."""
    which: tuple[int, ...]
    """For each window of one sample its place in `distinct`."""
    empty: tuple[bool, ...]
    """For each of `distinct` whether it is zero throughout."""
    reach: float
    """The largest magnitude among the highest values of all rows; infinite where values cannot be read."""

    def apart(self) -> tuple[Tensor, dict[str, Any]]:
        """Returns the tensor, which autograd is to save, and everything else."""
        return self.distinct, {"which": self.which, "empty": self.empty, "reach": self.reach}


@dataclass(frozen=True, slots=True)
class _Kinds:
    """Which windows have the same labels."""

    first: tuple[int, ...]
    """The first window of each kind."""
    which: tuple[int, ...]
    empty: tuple[bool, ...]
    """For each kind whether all of a window's labels are equal."""


_found: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By mask or labels, as long as they live: their version, and what was found. Blocks of one stage share them."""


def has_values(tensor: Tensor) -> bool:
    """Returns whether `tensor` is a real one."""
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta


# It reads values, at which the compiler would stop again and again.
@torch._disable_dynamo
def shift_masks(mask: Tensor, limit: int) -> ShiftMasks:
    """Finds the distinct masks among those of all windows, exactly.

    Args:
        mask: shape (windows, tokens, tokens), added to scores; or labels, shape (windows, tokens). Not changed and not
            kept.
        limit: how many there can be, used where values cannot be read (fake tensors): the result then has the sizes
            of this many, and no meaning. Any number is found in a real mask.

    Returns:
        The masks; what was found is kept with the mask until it is changed or freed.
    """
    if is_labels(mask):
        kinds = _kinds_of(mask, limit)
        distinct = mask_of(torch.stack([mask[window] for window in kinds.first]))
        # A token shares its own label: the highest value of a row is 0.
        return ShiftMasks(distinct=distinct, which=kinds.which, empty=kinds.empty, reach=0.0)
    if not has_values(mask):
        number = min(limit, mask.shape[0])
        which = tuple(window % number for window in range(mask.shape[0]))
        return ShiftMasks(distinct=mask[:number].clone(), which=which, empty=(False,) * number, reach=torch.inf)
    if mask.is_inference():  # has no version
        return _distinct(mask)
    known = _found.get(mask)
    if known is not None and known[0] == mask._version:
        return known[1]
    found = _distinct(mask.detach())
    _found[mask] = mask._version, found
    return found


def is_labels(mask: Tensor | None) -> bool:
    """Returns whether `mask` is the compact form of one."""
    return mask is not None and mask.dim() == 2 and not mask.is_floating_point()


def mask_of(labels: Tensor) -> Tensor:
    """Returns the masks that MONAI makes, shape (windows, tokens, tokens), torch's default dtype, from labels."""
    apart = labels[:, None] != labels[:, :, None]
    return torch.zeros(apart.shape, device=labels.device).masked_fill_(apart, _APART)


# It is told by sizes which windows are alike, and no value has to be read: a device would have to be waited for.
@torch._disable_dynamo
def shift_labels(sides: Sequence[int], window: Sequence[int], shift: Sequence[int], device: torch.device) -> Tensor:
    """Returns the labels of all windows of a shifted volume; `mask_of` them is MONAI's `compute_mask`.

    Args:
        sides: of the volume, multiples of the window's.
        window: its sides.
        shift: by how much the volume is shifted along each, 0 for not at all; less than the window's side.
        device: of the result.

    Returns:
        Shape (windows, tokens), uint8.
    """
    labels = torch.zeros((), dtype=torch.uint8, device=device)
    for side, size, step in zip(sides, window, shift, strict=True):
        along = torch.full((side,), 0 if step else 2, dtype=torch.uint8, device=device)
        if step:
            along[side - size : side - step] = 1
            along[side - step :] = 2
        labels = labels[..., None] * 3 + along
    for dim, size in enumerate(window):
        labels = labels.unflatten(2 * dim, (-1, size))
    dims = range(0, 2 * len(window), 2)
    labels = labels.permute(*dims, *[dim + 1 for dim in dims]).reshape(-1, math.prod(window))
    _found[labels] = labels._version, _kinds(tuple(sides), tuple(window), tuple(shift))
    return labels


@lru_cache(maxsize=64)
def _kinds(sides: tuple[int, ...], window: tuple[int, ...], shift: tuple[int, ...]) -> _Kinds:
    """Only the last window along a shifted side holds more than one region."""
    ends = []
    for side, size, step in zip(sides, window, shift, strict=True):
        many = side // size
        ends.append([step > 0 and place == many - 1 for place in range(many)])
    places: dict[tuple[bool, ...], int] = {}
    first: list[int] = []
    which: list[int] = []
    for number, kind in enumerate(itertools.product(*ends)):
        if kind not in places:
            places[kind] = len(first)
            first.append(number)
        which.append(places[kind])
    return _Kinds(tuple(first), tuple(which), tuple(not any(kind) for kind in places))


def _kinds_of(labels: Tensor, limit: int) -> _Kinds:
    known = None if labels.is_inference() else _found.get(labels)
    if known is not None and known[0] == labels._version:
        return known[1]
    if not has_values(labels):
        number = min(limit, labels.shape[0])
        which = tuple(window % number for window in range(labels.shape[0]))
        return _Kinds(tuple(range(number)), which, (False,) * number)
    first, places = _grouped(labels)
    found = _Kinds(tuple(first), tuple(places), tuple((labels[first] == labels[first][:, :1]).all(1).tolist()))
    if not labels.is_inference():
        _found[labels] = labels._version, found
    return found


def _distinct(mask: Tensor) -> ShiftMasks:
    # A few rows tell the masks of shifted windows apart; whether they do is then looked up in all rows.
    first, which = _grouped(mask[:, :: -(-mask.shape[1] // _SAMPLED_ROWS)])
    if not _same(mask, mask[first], which):
        first, which = _grouped(mask)
    distinct = mask[first]
    return ShiftMasks(
        distinct=distinct,
        which=tuple(which),
        empty=tuple((distinct == 0).flatten(1).all(1).tolist()),
        reach=distinct.amax(-1).abs().max().item(),
    )


def _grouped(rows: Tensor) -> tuple[list[int], list[int]]:
    """Returns the first window of each kind, and for each window the place of its kind among them."""
    places: dict[bytes, int] = {}
    first: list[int] = []
    which: list[int] = []
    for window, each in enumerate(rows):
        content = each.contiguous().cpu().view(torch.uint8).numpy().tobytes()
        if content not in places:
            places[content] = len(first)
            first.append(window)
        which.append(places[content])
    return first, which


def _same(mask: Tensor, distinct: Tensor, which: list[int]) -> bool:
    index = torch.tensor(which, device=mask.device)
    parts = zip(mask.split(_COMPARED_AT_ONCE), index.split(_COMPARED_AT_ONCE), strict=True)
    return all(torch.equal(part, distinct.index_select(0, places)) for part, places in parts)
