"""Logits of a volume on the training grid, window by window, handed on part by part as they are complete.

Windows, weights and the order of sums are those of MONAI's `sliding_window_inference`, so the logits are equal bit for
bit; but only the sums that a later window still adds to are held.
"""

from __future__ import annotations

import itertools
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from medckpt import machine
from medckpt.blocks import Triple
from medckpt.errors import DataError, size
from medckpt.inference.sums import Sums
from medckpt.inference.windows import Place, Windows, lay_windows

Network = Callable[[Tensor], Tensor]
Progress = Callable[[int, int], None]
"""Called with the windows that are done and their number."""

SUMS_BYTES = 576 * 2**20
"""Sums up to this size lie in memory (a GPU's own, where all of them are no larger), the others in a temporary file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the volume that no later window reaches."""

    place: Place
    logits: Tensor
    """(classes, x, y, z) float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a prediction takes beside the scan, its labels, and the network with its activations."""

    ram_bytes: int
    """On the CPU: one step's answers, sums, and the part that is handed on."""
    file_bytes: int
    """In the temporary folder, at the most."""


@torch.inference_mode()
def predict_parts(
    network: Network,
    image: Tensor,
    patch_size: Triple,
    *,
    overlap: float,
    device: torch.device,
    mirror_axes: Sequence[int] = (),
    windows: int = 1,
    progress: Progress | None = None,
) -> Iterator[Part]:
    """Yields the logits of an image (C, X, Y, Z), in parts that tile it.

    Windows overlap by `overlap` (0..1) and are blended with a Gaussian (as nnU-Net does); the network sees `windows` of
    them at once. A volume smaller than the patch is padded with its minimum, as in training, and the padding is never
    handed on. With `mirror_axes` (0..2) each window is answered for every mirror image along them, and the answers,
    mirrored back, are averaged.

    Raises:
        DataError: the machine lacks the memory or the disk; known as soon as the first window says how many classes
            there are.
    """
    layout = lay_windows(image.shape[1:], patch_size, overlap)
    fill = float(image.min())
    sums: Sums | None = None
    done, order = 0, iter(layout)
    batch = torch.empty((windows, len(image), *patch_size), device=device)
    try:
        while group := list(itertools.islice(order, windows)):
            for place, window in zip(batch, group, strict=False):
                place.copy_(_cut(image, layout, window, fill))
            answers = _mirrored_mean(network, batch[: len(group)], mirror_axes)
            if answers.shape[0] != len(group) or answers.shape[2:] != patch_size:
                raise ValueError(f"windows of {patch_size} were answered with a tensor of {tuple(answers.shape)}")
            if sums is None:
                sums = _open_sums(layout, answers.shape[1], device, len(group), mirrored=bool(mirror_axes))
            for window, answer in zip(group, answers, strict=True):
                sums.add(window, answer.to(sums.weights.device))
            del answers, answer
            done += len(group)
            if progress:
                progress(done, len(layout))
            for window in group:
                for part in layout.completed(window):
                    yield Part(place=layout.place(part), logits=sums.complete(part, window))
    finally:
        if sums is not None:
            sums.close()


def need(
    shape: Triple, classes: int, patch_size: Triple, *, overlap: float, windows: int = 1, mirrored: bool = False
) -> Need:
    """Returns what `predict_parts` takes on the CPU for a volume of `shape` and a network of `classes` channels."""
    return _need(lay_windows(shape, patch_size, overlap), classes, windows, mirrored, SUMS_BYTES)


def winners(parts: Iterator[Part], shape: Triple) -> np.ndarray:
    """Returns the class of the largest logit (X, Y, Z), the first of equals, in the smallest unsigned integers."""
    labels: np.ndarray | None = None
    for part in parts:
        if labels is None:
            labels = np.zeros(shape, dtype=np.min_scalar_type(len(part.logits) - 1))
        labels[part.place] = _winner(part.logits)
    assert labels is not None
    return labels


def _winner(logits: Tensor) -> np.ndarray:
    if logits.device.type != "cpu":
        return logits.argmax(0).cpu().numpy()
    # Class by class, for the processor's cache: torch's argmax over the first axis is several times slower.
    best = logits[0].clone()
    winner = torch.zeros(best.shape, dtype=torch.int32)
    for index in range(1, len(logits)):
        winner.masked_fill_(logits[index] > best, index)
        torch.maximum(best, logits[index], out=best)
    return logits.argmax(0).numpy() if best.isnan().any() else winner.numpy()


def _open_sums(layout: Windows, classes: int, device: torch.device, windows: int, *, mirrored: bool) -> Sums:
    from monai.data.utils import compute_importance_map

    weights = compute_importance_map(layout.patch, mode="gaussian", sigma_scale=0.125, device=device)
    if device.type != "cpu" and 4 * classes * layout.waiting_voxels() <= SUMS_BYTES:
        return Sums(layout, classes, weights, SUMS_BYTES)
    available = machine.available_bytes()
    limit = SUMS_BYTES if available is None else min(SUMS_BYTES, available // 4)
    needed = _need(layout, classes, windows, mirrored and device.type == "cpu", limit)
    what = f"a prediction of {' x '.join(map(str, layout.shape))} voxels in {classes} classes takes"
    if available is not None and needed.ram_bytes > available:
        raise DataError(
            f"{what} {size(needed.ram_bytes)} of memory beside the scan and the network, and {size(available)} are "
            "free. Free some, or use a larger spacing or a smaller patch (both need a network trained with them)."
        )
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if needed.file_bytes > free:
        raise DataError(
            f"{what} up to {size(needed.file_bytes)} of the temporary folder {folder}, and {size(free)} are free. "
            "Free some of it, or name another one by TMPDIR=FOLDER."
        )
    return Sums(layout, classes, weights.cpu(), limit)


def _need(layout: Windows, classes: int, windows: int, mirrored: bool, limit: int) -> Need:
    answers = 4 * classes * math.prod(layout.patch) * windows * (3 if mirrored else 1)
    sums = 4 * classes * layout.waiting_voxels()
    part = 4 * classes * layout.largest_part()
    weights = 4 * (layout.waiting_voxels() + math.prod(layout.patch))
    # A part that is added to is counted beside those that wait; what is handed on may be copied once.
    return Need(ram_bytes=answers + min(sums, limit) + 2 * part + weights, file_bytes=max(0, sums - limit))


def _cut(image: Tensor, layout: Windows, window: Triple, fill: float) -> Tensor:
    """Returns one window (C, x, y, z) of the image, filled up where the image ends before it does."""
    starts = [starts[number] for starts, number in zip(layout.starts, window, strict=True)]
    inside = [slice(max(start, 0), start + side) for start, side in zip(starts, layout.patch, strict=True)]
    cut = image[:, *inside]
    if cut.shape[1:] == layout.patch:
        return cut
    before = [max(-start, 0) for start in starts]
    after = [side - low - n for side, low, n in zip(layout.patch, before, cut.shape[1:], strict=True)]
    return functional.pad(cut, [n for axis in (2, 1, 0) for n in (before[axis], after[axis])], value=fill)


def _mirrored_mean(network: Network, window: Tensor, axes: Sequence[int]) -> Tensor:
    """Returns the mean logits (B, classes, X, Y, Z), float32, over all mirror images of a window along `axes`."""
    total = network(window).float()
    subsets = [subset for count in range(1, len(axes) + 1) for subset in itertools.combinations(axes, count)]
    for subset in subsets:
        dims = [axis + 2 for axis in subset]
        total = total + torch.flip(network(torch.flip(window, dims)).float(), dims)
    return total / (len(subsets) + 1) if subsets else total
