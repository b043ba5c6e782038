"""What operators are given during a trace: function modes that bridge real and fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only


class FakeOperands(torch.overrides.TorchFunctionMode):
    """Makes real tensors that a loss or a model holds (labels, class weights) fake where they meet fake ones.

    Small ones among themselves are computed with for real: they may be constants that decide something.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        """Real tensor and fake one by the real one's id: both live as long as the trace, as the real one would."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(tensors_in((*args, *kwargs.values())))
        real = [t for t in tensors if not isinstance(t, FakeTensor) and not t.requires_grad]
        if real and len(real) == len(tensors) and max(t.numel() for t in real) <= _SMALL:
            with _disable_current_modes():
                return func(*args, **kwargs)
        if real:
            args, kwargs = tree_map_only(Tensor, self._fake, (args, kwargs))
        return func(*args, **kwargs)

    def _fake(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor) or tensor.requires_grad:
            return tensor
        if id(tensor) not in self._made:
            self._made[id(tensor)] = tensor, self._mode.from_tensor(tensor)
        return self._made[id(tensor)][1]


_SMALL = 4096
"""Elements up to which a real tensor may be a constant."""


class InPlaceAsReal(torch.overrides.TorchFunctionMode):
    """Lets autograd go on after an in-place operator on a view as it does on real tensors: by `as_strided`.

    On fake tensors it replays the view instead, whose backward keeps the incoming gradient alive for longer. Code that
    drops the operator's result and goes on with its argument still takes that way.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        in_place = name.startswith("__i") if name.endswith("__") else name.endswith("_")
        if in_place and args and isinstance(args[0], FakeTensor) and torch.is_grad_enabled() and args[0]._is_view():
            view, base = args[0], args[0]._base
            if base is not None and base.requires_grad:
                args = (base.as_strided(view.shape, view.stride(), view.storage_offset()), *args[1:])
        return func(*args, **(kwargs or {}))


def tensors_in(values: tuple[Any, ...]) -> Iterator[Tensor]:
    """Yields the tensors in nested lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(tuple(value))
