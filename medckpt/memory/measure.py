"""Measures memory: what a forward pass keeps for its backward pass, and the true peak of a piece of code.

What is kept is counted by *storage*: two saved views of one storage are one. Of a SwinUNETR, counting tensors would
give 1.56 times as much. Parameters and buffers are left out, they are there anyway. With recompute applied a region
counts with its inputs, which is what it keeps.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from medckpt.errors import ConfigError, suggest
from medckpt.memory.apply import ForwardState
from medckpt.memory.autocast import Precision as StepPrecision
from medckpt.memory.autocast import autocast
from medckpt.memory.refusals import first_line

Precision = Literal["fp32", "bf16", "fp16"]

_PRECISIONS: dict[Precision, StepPrecision] = {"fp32": "32", "bf16": "bf16-mixed", "fp16": "16-mixed"}
_ONE_AT_A_TIME = threading.Lock()
"""There is one profiler in a process."""


def saved_bytes(model: nn.Module, *inputs: object, precision: Precision = "fp32") -> int:
    """Returns the bytes that one forward pass of `model` keeps for its backward pass.

    Args:
        model: any module, in the mode (train or eval) to be measured. It is left as it was: buffers and the
            random states are set back.
        inputs: its positional arguments, real tensors or fake ones (made under a `FakeTensorMode`). With fake inputs
            a fake copy of `model` is run, which needs neither memory nor data. Both agree to the byte in float32; with
            bf16 on the CPU the fake count is 0.05 % low, as torch's fake LayerNorm keeps its statistics in bf16.
        precision: "fp32" runs as is, "bf16" and "fp16" under autocast of the inputs' device; saved weight casts then
            count too.

    Returns:
        The sum of the unique storages saved by autograd, in bytes, not rounded to an allocator's blocks; parameters
        and buffers excluded, saved inputs included.

    Raises:
        ConfigError: `precision` is not one of the three.
    """
    if precision not in get_args(Precision):
        raise ConfigError(f"precision: '{precision}' is not known. {suggest(str(precision), get_args(Precision))}")
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    mode = next((leaf.fake_mode for leaf in tensors if isinstance(leaf, FakeTensor)), None)
    net = model if mode is None else fake_copy(model, mode)
    owned: set[int] = set()
    # The storages are held until the end: a freed one could lend its address to the next.
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> None:
        if _key(tensor) not in owned:
            saved[_key(tensor)] = tensor.untyped_storage()

    def unpack(_: None) -> torch.Tensor:
        raise RuntimeError("saved_bytes counts a forward pass; what it saved is not kept, so it has no backward pass.")

    devices = sorted({t.get_device() for t in tensors if t.is_cuda and not isinstance(t, FakeTensor)})
    with mode or nullcontext(), torch.random.fork_rng(devices=devices), ForwardState(net).restored():
        owned.update(_key(tensor) for tensor in (*net.parameters(), *net.buffers()))
        context = autocast(_PRECISIONS[precision], device=tensors[0].device.type if tensors else "cpu")
        with torch.enable_grad(), context, saved_tensors_hooks(pack, unpack):
            net(*inputs)
        return sum(storage.nbytes() for storage in saved.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocations:
    """Bytes that some code took from torch's CPU allocator, over what was there when it began."""

    peak: int
    end: int
    """What it left allocated; below 0 if it freed more than it took."""


class AllocationRecorder:
    """Records the CPU allocator's own events, by `torch.profiler`, from `start` to `stop`.

    It slows down what runs meanwhile, and does not see the end of what is older than itself. On a GPU ask
    `torch.cuda.max_memory_allocated`.
    """

    def __init__(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would tell standard error that it starts and stops
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._counts_from_ns = 0

    def start(self) -> None:
        self._profiler.start()

    def count_from_here(self) -> None:
        """Leaves what was before out of the peak."""
        self._counts_from_ns = time.time_ns()

    def stop(self) -> Allocations:
        self._profiler.stop()
        profiler: Any = self._profiler.profiler
        events = profiler.kineto_results.events()
        changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
        now = peak = 0
        for moment, nbytes in sorted(changes, key=lambda change: change[0]):
            now += nbytes
            if moment >= self._counts_from_ns:
                peak = max(peak, now)
        return Allocations(peak=peak, end=now)


def allocations(code: Callable[[], object]) -> Allocations:
    """Runs `code` on the CPU and returns what it allocated. Other threads wait for their turn."""
    with _ONE_AT_A_TIME:
        recorder = AllocationRecorder()
        recorder.start()
        try:
            code()
        finally:
            found = recorder.stop()
    return found


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Returns the bytes of the storages of `tensors`, each counted once."""
    return sum({_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def fake_copy(model: nn.Module, mode: FakeTensorMode, *, device: str | None = None) -> nn.Module:
    """Returns a deep copy of `model` whose parameters, buffers and other tensor attributes are fake, made by `mode`.

    Ties between parameters, and recompute if it is applied, are kept; no values are copied. Some networks (MONAI's
    SwinUNETR) cannot be built under a `FakeTensorMode`, hence the way through a real one. A model that is fake
    already is copied as it is.

    Args:
        model: any module, on any device.
        mode: makes the fake tensors.
        device: where they are; None leaves them on the model's.

    Raises:
        ConfigError: it cannot be copied: TorchScript, parameters without a shape yet, tensors of inference mode, or
            what Python cannot copy.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: must be an nn.Module, not {type(model).__name__}.")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(f"model: '{name}' is TorchScript, which cannot be traced. Give the Python module.")
        if any(map(is_lazy, (*module._parameters.values(), *module._buffers.values()))):
            raise ConfigError(
                f"model: '{name}' ({type(module).__name__}) has no shapes yet. Call the model once on a small batch."
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_inference():
            raise ConfigError(
                f"model: '{name}' was made under torch.inference_mode(), and torch saves no such tensor for a backward "
                "pass. Build or load the model outside of it."
            )
    memo: dict[int, object] = {}
    for module in model.modules():
        tensors = [*module._parameters.values(), *module._buffers.values(), *module.__dict__.values()]
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or id(tensor) in memo:
                continue
            fake = tensor.detach() if isinstance(tensor, FakeTensor) else _made_fake(tensor.detach(), mode, device)
            if isinstance(tensor, nn.Parameter):
                memo[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            else:
                memo[id(tensor)] = fake.requires_grad_(tensor.requires_grad)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # a class may say for itself how it is copied
        raise ConfigError(
            f"model: {type(model).__name__} cannot be copied ({first_line(error)}) Take what Python cannot "
            "copy (locks, open files, results of an earlier forward) out of its attributes."
        ) from error


def _made_fake(tensor: torch.Tensor, mode: FakeTensorMode, device: str | None) -> torch.Tensor:
    if device is None or tensor.device.type == device:
        return mode.from_tensor(tensor)
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
