"""What lean operators ask of the modules that they take over, and the arithmetic rules that they share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

LIMIT_BYTES = 64 * 2**20
"""What an operator makes for a moment only is made in parts above this size."""


def is_monai(module: nn.Module, *names: str) -> bool:
    """Whether `module` is of MONAI's own class of one of these names; a subclass may compute something else."""
    kind = type(module)
    return kind.__name__ in names and kind.__module__.partition(".")[0] == "monai"


def is_plain(module: object, *kinds: type[nn.Module]) -> bool:
    """Whether `module` is exactly of one of torch's `kinds`: a subclass (LoRA, quantised) may compute otherwise."""
    return type(module) in kinds


def bypassed(module: nn.Module, *, but: tuple[str, ...] = ()) -> str | None:
    """Returns why modules inside of `module` must be called as they are, or None where nothing would be missed.

    An operator computes with their parameters and does not call them: hooks and forwards of their own (recompute,
    adapters, precision) would be passed over in silence. `but` names children that the operator does call.
    """
    for name, child in _inside(module, but):
        if "forward" in child.__dict__:
            return f"'{name}' inside of it has a forward of its own (recompute, or a patch)"
        if child._forward_hooks or child._forward_pre_hooks or child._backward_hooks or child._backward_pre_hooks:
            return f"'{name}' inside of it has hooks, which would not run"
    return None


def _inside(module: nn.Module, but: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if name not in but:
            for deeper, inner in child.named_modules():
                yield f"{name}.{deeper}".rstrip("."), inner


def lower_dtype(tensor: Tensor) -> torch.dtype | None:
    """Returns what autocast casts a convolution's or linear layer's operands to on `tensor`'s device; None: nothing."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def lowered(tensor: Tensor, lower: torch.dtype | None) -> Tensor:
    """Casts as autocast does, outside of its cache: autocast's own casts would stay until the end of forward."""
    return tensor if lower is None or tensor.dtype == torch.float64 else tensor.to(lower)


def no_autocast(tensor: Tensor) -> torch.autocast:
    """Returns a context in which every operator runs in the dtype of its operands."""
    return torch.autocast(tensor.device.type, enabled=False)


def draw_seed(like: Tensor) -> int:
    """Returns a seed from torch's global CPU generator, which recompute sets back; no GPU has to be waited for."""
    if isinstance(like, FakeTensor):
        return 0
    return int(torch.randint(2**62, (), device="cpu"))


def seeded(seed: int, like: Tensor) -> torch.Generator:
    """Returns a generator on the device of `like`."""
    return torch.Generator(device=like.device).manual_seed(seed)


def drawn(tensor: Tensor, p: float, generator: torch.Generator) -> Tensor:
    """Returns which elements dropout keeps: bool, of the shape of `tensor`, False with probability `p`."""
    return torch.empty(tensor.shape, dtype=torch.bool, device=tensor.device).bernoulli_(1 - p, generator=generator)


def drop_(tensor: Tensor, p: float, mask: Tensor) -> Tensor:
    """Dropout in place: zeros where `mask` is False, the rest divided by 1 - p."""
    return tensor.zero_() if p == 1 else tensor.mul_(mask).mul_(1 / (1 - p))
