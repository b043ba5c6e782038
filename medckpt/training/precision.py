"""Which precision a run trains in, and what must stay in float32 for its gradients to be right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from medckpt.errors import ConfigError

Device = Literal["cpu", "cuda"]
Resolved = Literal["32-true", "bf16-mixed", "16-mixed"]

THIN = 2
"""Sides up to this many voxels are convolved in float32 on a CPU under bf16."""


def resolve_precision(wanted: str, device: Device) -> Resolved:
    """Returns Lightning's name of the precision; `auto` is bf16-mixed where the device computes in it, else 32.

    Raises:
        ConfigError: 16-mixed on a CPU.
    """
    if wanted == "16-mixed" and device == "cpu":
        raise ConfigError("precision=16-mixed: float16 needs a GPU (its gradients need a GradScaler). Use 32.")
    if wanted == "16-mixed":
        return "16-mixed"
    if wanted == "bf16-mixed" or (wanted == "auto" and computes_in_bf16(device)):
        return "bf16-mixed"
    return "32-true"


def computes_in_bf16(device: Device) -> bool:
    """Says whether the device has bfloat16 arithmetic of its own; elsewhere it is emulated, and slower than float32.

    A Swin-UNETR step on a CPU with AVX-512 BF16 was 1.15 times (12 channels) to 1.6 times (24) faster with it.
    """
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    read: Callable[[], Mapping[str, Any]] = getattr(torch.cpu, "get_capabilities", dict)  # not in every torch
    facts = read()
    return bool(facts.get("avx512_bf16") or facts.get("amx_bf16"))


class _Float32WhereThin:
    """The forward of a Conv3d that leaves autocast where a side of its input is thin."""

    def __init__(self, convolution: nn.Conv3d) -> None:
        self.convolution = convolution

    def __call__(self, image: Tensor) -> Tensor:
        forward: Any = type(self.convolution).forward
        if min(image.shape[2:]) > THIN:
            return forward(self.convolution, image)
        with torch.autocast(image.device.type, enabled=False):
            return forward(self.convolution, image.float())


def prepare_network(network: nn.Module, wanted: str, device: Device) -> None:
    """Makes a network's gradients right in the precision that a run would take on the device; in place."""
    if device == "cpu" and resolve_precision(wanted, device) == "bf16-mixed":
        keep_thin_convolutions_exact(network)


def keep_thin_convolutions_exact(network: nn.Module) -> int:
    """Makes every Conv3d with a kernel above 1 run in float32 where its input is thin; returns how many it found.

    oneDNN (torch 2.13, CPU, bfloat16) gives a weight gradient that is wrong by 100 % or infinite for a 3x3x3
    convolution over two voxels, which is the bottleneck of a Swin-UNETR at 64 voxels; from three voxels on it is
    right. Those convolutions cost next to nothing, so float32 is free. A second call changes nothing.
    """
    found = [module for module in network.modules() if type(module) is nn.Conv3d and max(module.kernel_size) > 1]
    for module in found:
        module.forward = _Float32WhereThin(module)  # type: ignore[method-assign,assignment]
    return len(found)
