"""What a run needs to go on: weights, optimizer, averaged weights, scaler, random state and the step, in one file."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from medckpt.errors import DataError
from medckpt.files import write_atomic

FORMAT = 1


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far a run has come."""

    step: int = 0
    """Optimizer steps done."""
    seconds: float = 0.0
    """Seconds spent in training steps; validation is not counted."""
    best_dice: float | None = None
    """Highest mean Dice seen at a validation."""
    best_step: int = 0


def save(path: Path, content: dict[str, Any], progress: Progress) -> None:
    """Writes weights (and whatever else `content` holds) with the progress, atomically."""
    whole = {"format": FORMAT, "progress": asdict(progress), **content}
    write_atomic(path, lambda stream: torch.save(whole, stream))


def load(path: Path) -> tuple[dict[str, Any], Progress]:
    """Reads a weights file; only tensors and plain values are accepted, never code.

    Raises:
        DataError: the file is missing, torn, of another format, or holds more than weights.
    """
    if not path.is_file():
        raise DataError(f"{path}: there is no such weights file.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises a different kind for each way in which a file can be broken
        raise DataError(f"{path}: it cannot be read as weights ({str(error).splitlines()[0]}).") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or "network" not in content:
        raise DataError(f"{path}: it is not a weights file of this version of medckpt (format {FORMAT}).")
    return content, Progress(**content["progress"])


def load_weights(path: Path, network: torch.nn.Module) -> None:
    """Loads the weights that a prediction should use into `network`: the averaged ones where a run keeps them.

    Raises:
        DataError: as `load`, or the weights are another network's.
    """
    content, _ = load(path)
    try:
        network.load_state_dict(content["network"])
    except RuntimeError as error:
        raise DataError(
            f"{path}: these are another network's weights ({str(error).splitlines()[1].strip()})"
        ) from error
    if content.get("average") is not None:
        average = AveragedWeights(network, 0.5)
        average.load(content["average"])
        average.swap()


class AveragedWeights:
    """An exponential moving average of a network's parameters (Polyak and Juditsky 1992), for validation and use.

    The decay rises from 0 to `decay` as (1 + n) / (10 + n), so that the first steps do not stay in the average.
    """

    def __init__(self, network: torch.nn.Module, decay: float) -> None:
        self.decay = decay
        self._parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self.average = [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes in the weights after optimizer step number `step` (from 1)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.average, [parameter.detach() for parameter in self._parameters], 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges the network's weights with the average; a second call undoes it."""
        for parameter, average in zip(self._parameters, self.average, strict=True):
            held = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(held)

    def load(self, average: list[torch.Tensor]) -> None:
        for own, saved in zip(self.average, average, strict=True):
            own.copy_(saved)
