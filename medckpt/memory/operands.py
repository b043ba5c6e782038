"""What operators are given during a trace: function modes that bridge real and fake tensors; and what is noted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from medckpt.lean import dice_ce
from medckpt.memory.graph import TensorSpec


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
        if real and len(real) == len(tensors) and all(t.numel() <= _SMALL and not t.is_meta for t in real):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if real:
            args, kwargs = tree_map_only(Tensor, self._fake, (args, kwargs))
        return func(*args, **kwargs)

    def _fake(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor) or tensor.requires_grad:
            return tensor
        if id(tensor) not in self._made:
            self._made[id(tensor)] = tensor, self._converted(tensor)
        return self._made[id(tensor)][1]

    def _converted(self, tensor: Tensor) -> Tensor:
        if tensor.is_cpu:
            return self._mode.from_tensor(tensor)
        # Made where the trace runs, and not by an operator of the step: labels may be of "meta", which takes no memory.
        with _disable_current_modes(), self._mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


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


class _RealConstants(torch.overrides.TorchFunctionMode):
    """Gives a fake `torch.arange` of numbers its values, as torch does for `torch.tensor`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.arange and isinstance(out, FakeTensor) and out.numel() <= 1024:
            with torch._subclasses.fake_tensor.unset_fake_temporarily():
                # `constant` is read wherever a fake tensor is asked for a value, and dropped when it is written to.
                out.constant = torch.arange(*args, **{**kwargs, "device": "cpu"})
        return out


def real_constants() -> torch.overrides.TorchFunctionMode:
    """Returns a context in which a small fake `torch.arange(...)` knows its values: `.tolist()`, `.item()`, `int()`.

    MONAI's DiceLoss lists its axes by `torch.arange(2, n).tolist()`, which fake tensors refuse as data-dependent.
    """
    return _RealConstants()


def tensors_in(values: tuple[Any, ...]) -> Iterator[Tensor]:
    """Yields the tensors in nested lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(tuple(value))


def spec_of(value: Any) -> Any:
    """Returns arguments of an operator with what is to be known of a tensor in its place."""
    if isinstance(value, Tensor):
        return TensorSpec(tuple(value.shape), tuple(value.stride()), value.dtype)
    if isinstance(value, list | tuple):
        return tuple(spec_of(item) for item in value)
    if isinstance(value, dict):
        return {key: spec_of(item) for key, item in value.items()}
    return value


def moved_bytes(func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Returns the bytes that an operator's kernels read and write."""
    if func.namespace == "medckpt" and func._opname.startswith("dice_ce"):
        backward = func._opname == "dice_ce_backward"
        logits = inputs[-2]
        return dice_ce.moved_bytes(logits.shape, logits.dtype, backward=backward)
    # What `out=` names is among the arguments, and only written.
    given = any(a.kwarg_only and a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
    return sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *(() if given else outputs)))


def as_cpu_keeps(func: Any, args: Any, result: Any) -> Any:
    """Returns a fake norm's result with the statistics that a CPU keeps: float32 where any weight is.

    Torch's fake kernels say the dtype of the input, half as much under bfloat16 autocast (`is_mixed_type` in
    `aten/src/ATen/native/cpu/mixed_data_type.h`).
    """
    if func.overloadpacket.__name__ not in _NORMS or result[0].dtype == torch.float32:
        return result
    weights = [argument.dtype for argument in args[1:] if isinstance(argument, Tensor)]
    if torch.float32 not in weights:
        return result
    return result[0], *(statistic.to(torch.float32) for statistic in result[1:])


_NORMS = ("native_layer_norm", "native_group_norm", "native_batch_norm")


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Returns the multiplications and additions of an operator as torch counts them; 0 if it does not."""
    count = flop_registry.get(func.overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))
