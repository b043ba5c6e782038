"""One training step of a recipe as a run trains it, traced on fake tensors: network, loss, precision, devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from medckpt.blocks import LossConfig, Triple
from medckpt.config import RunConfig
from medckpt.errors import ConfigError
from medckpt.memory.buckets import add_buckets
from medckpt.memory.graph import StepGraph
from medckpt.memory.profile import MemoryProfile
from medckpt.memory.regions import find_regions
from medckpt.memory.step import Precision, Step
from medckpt.memory.trace import trace_step
from medckpt.models.build import build_model
from medckpt.training.losses import DiceCrossEntropy
from medckpt.training.precision import prepare_network, resolve_precision

Policy = Literal["none", "block", "all"]
MOST_NUMBERS = 2**40
"""Elements of a step's input or output above which nothing is foreseen: no device holds one such tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What the data decide of a network."""

    channels: int
    classes: int
    """Background included."""
    assumed: bool = False
    """Whether nobody said so: there are no data to look at."""


def check_size(config: RunConfig, task: Task, sides: Sequence[int] = ()) -> None:
    """Refuses a step whose input or output nothing could hold.

    Raises:
        ConfigError: it has more than `MOST_NUMBERS` elements.
    """
    sampler = config.sampler
    asked = [(sampler.patch_size, sampler.patches_per_step), *(((side, side, side), 1) for side in sides)]
    what, most = max(("channels", task.channels), ("classes", task.classes), key=lambda pair: pair[1])
    for patch, patches in asked:
        numbers = patches * math.prod(patch) * most
        if numbers > MOST_NUMBERS:
            raise ConfigError(
                f"sampler.patches_per_step={patches}, a patch of {'x'.join(map(str, patch))}, {what}={most}: that is a "
                f"tensor of {numbers:.1e} elements, and a plan takes up to 2^40 (1.1e+12). Make one of them smaller."
            )


def trace_run(
    config: RunConfig,
    profile: MemoryProfile,
    task: Task,
    patch_size: Triple,
    patches: int,
    policy: Policy,
    network: nn.Module,
) -> StepGraph:
    """Returns the record of one optimizer step of `config` with `patches` of `patch_size`.

    With several devices it is the step of each of them, the buckets of DDP included.
    """
    step = step_of(config, profile)
    with _sizes_refused():
        image = torch.empty((patches, task.channels, *patch_size), device="meta")
        criterion = _LabelledLoss(config.loss, (patches, 1, *patch_size))
        graph = trace_step(network, image, step, criterion, recompute=find_regions(network, policy))
    if config.trainer.devices > 1:
        add_buckets(graph, [p.numel() * p.element_size() for p in network.parameters() if p.requires_grad])
    return graph


def step_of(config: RunConfig, profile: MemoryProfile) -> Step:
    """Returns precision, clipping, passes and averages of a step, as a run trains it on the device."""
    return Step(
        precision=precision_on(config, profile),
        clip_norm=config.optimizer.clip_norm,
        accumulate=config.trainer.accumulate,
        averages=config.trainer.ema_decay is not None,
        weight_cache=False,  # as Lightning trains
        rules="cpu" if profile.device == "cpu" else "cuda",
    )


class _LabelledLoss(nn.Module):
    """The loss of a run with labels of its own, which take no memory."""

    def __init__(self, config: LossConfig, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.criterion = DiceCrossEntropy(config)
        self.register_buffer("label", torch.empty(shape, dtype=torch.uint8, device="meta"))

    def forward(self, logits: Tensor) -> Tensor:
        return self.criterion(logits, self.label)


def precision_on(config: RunConfig, profile: MemoryProfile) -> Precision:
    """Returns the precision that a run would train in on the device."""
    if profile.device == "cpu":
        resolved = resolve_precision(config.precision, "cpu")
        return "bf16-mixed" if resolved == "bf16-mixed" else "32"
    if config.precision == "auto":
        return "bf16-mixed" if profile.bf16_tflops else "32"
    if config.precision == "bf16-mixed" and profile.bf16_tflops is None and profile.fp32_tflops is not None:
        raise ConfigError(
            f"precision=bf16-mixed: {profile.title or profile.name} has no bfloat16 arithmetic. Use 16-mixed or 32."
        )
    return config.precision


def make_network(config: RunConfig, profile: MemoryProfile, task: Task, patch_size: Triple) -> nn.Module:
    """Returns the network without memory for its weights, and in no time: on the meta device."""
    with _sizes_refused(), torch.device("meta"), _RealSteps():
        network = build_model(config.model, in_channels=task.channels, out_channels=task.classes, patch=patch_size)
    prepare_network(network, config.precision, "cpu" if profile.device == "cpu" else "cuda")
    return network


class _RealSteps(TorchFunctionMode):
    """Lets MONAI's Swin transformer list its drop rates by `torch.linspace(...).item()`, which meta tensors refuse."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.linspace:
            return func(*args, **(kwargs or {}) | {"device": "cpu"})
        return func(*args, **(kwargs or {}))


@contextmanager
def _sizes_refused() -> Iterator[None]:
    """Says it in our words if torch cannot count the bytes of a tensor in 64 bits."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        line = str(error).splitlines()[0]
        if "overflow" not in line.casefold():
            raise
        raise ConfigError(
            f"model, sampler, channels, classes: a tensor of such a step is larger than a computer can count ({line}). "
            "Make the largest of them smaller."
        ) from error
