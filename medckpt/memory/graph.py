"""The record of one training step: its operators in order, and every storage from birth to death.

Storages are counted, never tensors: two views of one storage are one. Nothing here runs a model; `trace` makes a
StepGraph and `simulate` reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

import medckpt.lean.attention_products
import medckpt.lean.dice_ce  # noqa: F401 (both: a record that is read from a file names their operators)

Phase = Literal["forward", "loss", "backward", "recompute", "clip", "optimizer", "average"]
"""`recompute` is a forward that runs again inside of the backward pass; `average` updates averaged weights."""

Kind = Literal["parameters", "gradients", "buckets", "optimizer", "averages", "inputs", "weight_casts", "activations"]
"""What a storage is. Activations are everything that a step makes and is none of the others; buffers count as
parameters; buckets are DDP's (`buckets.py`)."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What has to be known of a tensor argument to run an operator alone: layout and dtype, no values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        dense = "" if self.stride == contiguous_stride(self.shape) else "@" + "x".join(map(str, self.stride))
        return f"{str(self.dtype).removeprefix('torch.')}[{'x'.join(map(str, self.shape))}]{dense}"

    @property
    def nbytes(self) -> int:
        """Bytes of its elements (of a view: not of the whole storage)."""
        count = 1
        for side in self.shape:
            count *= side
        return count * self.dtype.itemsize


@dataclass(slots=True)
class Op:
    """One operator as the dispatcher saw it, below autograd and autocast."""

    name: str
    region: str
    """Fully qualified name of the module whose call it belongs to; "" outside of every module."""
    phase: Phase
    call: tuple[Any, tuple[Any, ...], dict[str, Any]] | None
    """Operator, arguments and keyword arguments, each tensor as a TensorSpec; None for views and in-place changes
    of bookkeeping, which allocate nothing."""
    flops: int
    """Floating-point operations: 2 per multiply-add; 0 where only bytes count."""
    bytes_moved: int
    """Bytes of all tensor arguments and results."""
    reads: tuple[int, ...] = ()
    """Indices of the storages of its tensor arguments."""

    def signature(self) -> str:
        """Returns text that is equal for equal work: operator, layouts, dtypes and the other arguments."""
        if self.call is None:
            return self.name
        _, args, kwargs = self.call
        words = [*map(_word, args), *(f"{key}={_word(value)}" for key, value in kwargs.items())]
        return f"{self.name}({', '.join(words)})"

    def specs(self) -> list[TensorSpec]:
        """Returns its tensor arguments."""
        return [] if self.call is None else list(_specs((self.call[1], tuple(self.call[2].values()))))

    @property
    def dtype(self) -> torch.dtype:
        """The floating type it computes in: that of its first floating argument, else float32."""
        return next((s.dtype for s in self.specs() if s.dtype.is_floating_point), torch.float32)


@dataclass(slots=True)
class Storage:
    """A block of memory. `born` is -1 for what is there before the step; `died` is None for what outlives it."""

    nbytes: int
    kind: Kind
    born: int
    region: str = ""
    phase: Phase | None = None
    died: int | None = None
    """Index of the operator after which it was freed."""


@dataclass(slots=True)
class StepGraph:
    """A step: operators in order of execution; storages; and births and deaths in their exact order."""

    ops: list[Op] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    events: list[tuple[int, int, int]] = field(default_factory=list)
    """(operator index, storage index, +1 birth or -1 death), in order; the births of an operator come first."""
    rules: Literal["cuda", "cpu"] = "cuda"
    repeats: float = 1.0
    """How many times as long as its operators the step takes, where passes like its own were left out."""
    notes: dict[str, str] = field(default_factory=dict)
    """What the record leaves out of account, and why."""

    def saved_for_backward(self, storage: Storage) -> bool:
        """Whether forward made it and it lives on into the backward pass."""
        first = storage.phase in ("forward", "loss")
        return first and (storage.died is None or self.ops[min(storage.died, len(self.ops) - 1)].phase not in FIRST)


FIRST: tuple[Phase, ...] = ("forward", "loss")

HOST_COPIES = ("medckpt_link.to_host.default", "medckpt_link.from_host.default")
"""The operators of a traced step that stand for copies to host memory and back (`host_memory.py`)."""


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of a dense row-major tensor."""
    stride, step = [], 1
    for side in reversed(shape):
        stride.append(step)
        step *= max(side, 1)
    return tuple(reversed(stride))


def _word(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_word, value)) + "]"
    return str(value).removeprefix("torch.")


def _specs(value: Any) -> Iterator[TensorSpec]:
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _specs(item)
