"""Runs one training step on fake tensors and writes down what it would allocate: no GPU, no data, no memory."""

from __future__ import annotations

import dataclasses
import sys
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch._dynamo  # the first fake operator would import it, in the middle of a trace
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from medckpt.errors import ConfigError, listing
from medckpt.lean.forward import foreseen_kernels
from medckpt.memory.apply import applied, apply_recompute
from medckpt.memory.autocast import cuda_rules
from medckpt.memory.fake_views import is_view, view_of
from medckpt.memory.graph import FIRST, HOST_COPIES, Kind, Op, Phase, StepGraph, Storage
from medckpt.memory.interrupt import interrupts_held
from medckpt.memory.isolation import no_collection, no_outer_autocast, others_casts_kept
from medckpt.memory.measure import fake_copy
from medckpt.memory.operands import (
    FakeOperands,
    InPlaceAsReal,
    as_cpu_keeps,
    flops_of,
    moved_bytes,
    real_constants,
    spec_of,
    tensors_in,
)
from medckpt.memory.refusals import Culprit, clear_errors
from medckpt.memory.step import Loss, Step, StepRunner


def trace_step(
    model: nn.Module, inputs: Any, step: Step, loss: Loss | None = None, *, recompute: Sequence[str] = ()
) -> StepGraph:
    """Returns the record of one training step of `model`, which is left untouched.

    Of more than two micro-batches two are recorded, and `StepGraph.repeats` says how much longer the step is. Forward
    and backward hooks of the model run, on fake tensors. One trace runs at a time: other threads wait.

    Args:
        model: any module, in the mode (train or eval) that training would have it in.
        inputs: a tuple of positional arguments, a mapping of keyword arguments, or the only argument; tensors in
            nested containers, real or fake. Values are not read.
        step: precision, optimizer and the like.
        loss: output -> scalar; None takes the mean of the squares of all floating tensors in the output. Tensors
            that it holds (labels, class weights) count as inputs.
        recompute: regions to recompute, as `find_regions` returns them; what is applied to `model` counts anyway.

    Raises:
        ConfigError: the model or the loss decides by values that only a real run has, uses an operator that cannot be
            traced, or fails on these inputs; the message names operator, and module or hook.
        KeyboardInterrupt: Ctrl-C, at the next operator.
    """
    with _ONE_AT_A_TIME, interrupts_held() as interrupted:
        # A function of its own: what it made is freed while Ctrl-C waits, as weak references have callbacks.
        return _traced(model, inputs, step, loss, recompute, interrupted)


_ONE_AT_A_TIME = threading.RLock()
"""Rules, the collector and torch's answers for fake tensors belong to the process."""

_PASSES = 2
"""Forward and backward passes per step that are traced: the third takes no more memory than the second."""


def _traced(
    model: nn.Module,
    inputs: Any,
    step: Step,
    loss: Loss | None,
    recompute: Sequence[str],
    interrupted: Callable[[], None],
) -> StepGraph:
    traced = dataclasses.replace(step, accumulate=min(step.accumulate, _PASSES))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    net = fake_copy(model, mode, device="cpu")
    if recompute:
        apply_recompute(net, recompute)
    # A copy as well: the backward pass would leave fake gradients in its parameters.
    criterion = fake_copy(loss, mode, device="cpu") if isinstance(loss, nn.Module) else loss
    with torch.inference_mode(False), torch.device("cpu"), mode:
        runner = StepRunner(net, _fake_inputs(inputs, mode), criterion, traced)
    # Clipping and optimizer, which run once, are a small share of a step of several passes.
    graph = StepGraph(rules=step.rules, repeats=step.accumulate / traced.accumulate, notes=_notes(model))
    recorder = _Recorder(graph, net, interrupted)
    recorder.on_host = {tensor.untyped_storage()._cdata: tensor for tensor in runner.on_host()}
    for kind, tensors in runner.held().items():
        recorder.hold(kind, tensors)
    with (
        no_collection(),
        clear_errors(recorder.culprit, lambda: recorder.phase, _shapes(inputs)),
        _calls_watched(net, recorder),
        _device_rules(step),
        # Whoever calls may have switched gradients or autocast, or chosen a device, for work of his own.
        torch.inference_mode(False),
        torch.enable_grad(),
        no_outer_autocast(),
        others_casts_kept(step.weight_cache),
        torch.device("cpu"),
        mode,
        real_constants(),
        FakeOperands(mode),
        InPlaceAsReal(),
        recorder,
    ):
        runner.run(recorder.begin)
    _refuse_absurd(graph, inputs)
    recorder.mark("gradients", runner.gradients())
    recorder.references.clear()  # what is freed from here on is not the step's
    if step.rules == "cpu":
        _add_random_states(graph, applied(net).regions)
    # What is freed at one moment (autocast's casts) goes in an order that depends on addresses.
    graph.events.sort(key=lambda event: (event[0], -event[2], event[1]))
    return graph


def _add_random_states(graph: StepGraph, regions: Iterable[str]) -> None:
    """Adds what a recomputed region keeps of torch's generator: in the host's memory, and made outside of operators."""
    nbytes = torch.get_rng_state().numel()
    for region in regions:
        inside = [i for i, op in enumerate(graph.ops) if op.region == region or op.region.startswith(region + ".")]
        born = next((i for i in inside if graph.ops[i].phase in FIRST), None)
        died = next((i for i in reversed(inside) if graph.ops[i].phase in ("recompute", "backward")), None)
        if born is not None and died is not None:
            graph.events += [(born, len(graph.storages), 1), (died, len(graph.storages), -1)]
            graph.storages.append(Storage(nbytes, "activations", born, region, graph.ops[born].phase, died))


def _notes(model: nn.Module) -> dict[str, str]:
    """Returns what a model's own set-up changes that a trace of its eager operators does not see."""
    notes = {}
    for module in model.modules():
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            notes["torch.compile"] = "the model is foreseen as eager; what the compiler fuses or keeps is not known"
        if type(module).__name__ in ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"):
            notes[type(module).__name__] = "one device is foreseen, without buckets, copies or shards"
    return notes


@contextmanager
def _device_rules(step: Step) -> Iterator[None]:
    with foreseen_kernels(step.rules), nullcontext() if step.rules == "cpu" else cuda_rules(step.precision):
        yield


class _Recorder(TorchDispatchMode):
    """Follows every operator, and every storage from birth to death."""

    def __init__(self, graph: StepGraph, net: nn.Module, interrupted: Callable[[], None]) -> None:
        super().__init__()
        self.graph = graph
        self.interrupted = interrupted
        self.culprit = Culprit(net)
        self.phase: Phase = "forward"
        self.calls: list[str] = []
        """Names of the modules whose forward is running, outermost first."""
        self.known: dict[int, int] = {}
        """Storage address to its index, as long as it lives."""
        self.references: dict[int, Any] = {}
        self.depth = 0
        """How many calls were running when the backward pass under way began."""
        self.sequence: list[int] = [0]
        self.region_at: list[str] = [""]
        """Which module was running when autograd gave out the node numbers from `sequence` on."""
        self.on_host: dict[int, Tensor] = {}
        """Tensors that a device's step has in the host's memory, by storage address."""
        self.region_of_parameter = {id(p): n.rpartition(".")[0] for n, p in net.named_parameters()}

    def begin(self, phase: Phase) -> None:
        self.phase = phase
        if phase in FIRST:
            self._note_region()

    def hold(self, kind: Kind, tensors: Iterable[Tensor]) -> None:
        """Registers what is there before the step."""
        for tensor in tensors:
            if tensor.untyped_storage()._cdata not in self.known:
                self._register(tensor.untyped_storage(), Storage(_bytes(tensor), kind, born=-1))

    def mark(self, kind: Kind, tensors: Iterable[Tensor]) -> None:
        """Says what storages that the step made have become."""
        for tensor in tensors:
            index = self.known.get(tensor.untyped_storage()._cdata)
            if index is not None:
                self.graph.storages[index].kind = kind

    def enter(self, name: str) -> None:
        self.culprit.forget()
        self.calls.append(name)
        self._note_region()

    def leave(self) -> None:
        self.culprit.left_module(self.calls.pop(), sys.exc_info()[1])
        self._note_region()

    def _note_region(self) -> None:
        if self.phase in (*FIRST, "backward"):  # backward: a reentrant checkpoint has nodes of its own
            self.sequence.append(torch._C._autograd._get_sequence_nr())
            self.region_at.append(self.calls[-1] if self.calls else self._outside())

    def _outside(self) -> str:
        return "loss" if self.phase == "loss" else ""

    def where(self) -> tuple[str, Phase]:
        """Returns the module and the phase that the operator under way belongs to."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            self.depth = len(self.calls)
            return (self.calls[-1] if self.calls else self._outside()), self.phase
        # A backward pass: the step's own, or one inside of its forward pass (gradient in forward).
        if len(self.calls) > self.depth:
            return self.calls[-1], "recompute"
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self.region_of_parameter.get(id(variable), ""), "backward"
        return self.region_at[bisect_right(self.sequence, node._sequence_nr()) - 1], "backward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # seven of ten calls, answered here in a tenth of the time
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in _WRONG_SHAPES:
            raise ConfigError(
                f"forecast: `{func}` (a recurrent network on a CPU) keeps a workspace that torch's fake tensors leave "
                "out. Measure this model by a real step instead."
            )
        if func.namespace == "prim":  # questions such as a tensor's device, which C++ asks where nothing may be raised
            return func(*args, **kwargs)
        self.interrupted()
        result = view_of(func, args) if is_view(func, args, kwargs) else func(*args, **kwargs)
        if self.graph.rules == "cpu":
            result = as_cpu_keeps(func, args, result)
        self._record(func, args, kwargs, result)
        return result

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        inputs, outputs = list(tensors_in((*args, *kwargs.values()))), list(tensors_in((result,)))
        if inputs and all(map(self._is_on_host, inputs)):
            self.on_host |= {tensor.untyped_storage()._cdata: tensor for tensor in outputs}
            return
        region, phase = self.where()
        index = len(self.graph.ops)
        cast = False
        for tensor in inputs:
            known = self.known.get(tensor.untyped_storage()._cdata)
            if known is None:  # a constant of the model or the loss
                if tensor.requires_grad and not isinstance(tensor, FakeTensor):
                    raise ConfigError(
                        f"forecast: the {phase} uses a real tensor of shape {tuple(tensor.shape)} that requires a "
                        "gradient, and is no part of model, inputs or loss: a parameter of the model that a function "
                        "holds? The forecast runs a copy of the model. Make the loss an nn.Module, or take "
                        ".detach() of the tensor."
                    )
                fresh = (
                    func is torch.ops.aten.lift_fresh.default
                )  # made here, by `torch.tensor(...)` or an assigned number
                made = Storage(_bytes(tensor), "activations", index, region, phase)
                held = Storage(_bytes(tensor), "inputs", born=-1)
                self._register(tensor.untyped_storage(), made if fresh else held)
            elif func is torch.ops.aten._to_copy.default and phase in ("forward", "recompute"):
                cast = self.graph.storages[known].kind == "parameters"
        born = 0
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.known:
                kind: Kind = "weight_casts" if cast else "activations"
                made = Storage(_bytes(tensor), kind, index, region, phase)
                self._register(storage, made)
                born += made.nbytes
        moves = born > 0 or _writes(func) or str(func) in HOST_COPIES
        self.graph.ops.append(
            Op(
                name=str(func).removeprefix("aten."),
                region=region,
                phase=phase,
                call=(func, spec_of(args), spec_of(kwargs)) if moves else None,
                flops=flops_of(func, args, kwargs, result) if moves else 0,
                bytes_moved=moved_bytes(func, inputs, outputs) if moves else 0,
                reads=tuple({self.known[t.untyped_storage()._cdata]: None for t in inputs}),
            )
        )

    def _is_on_host(self, tensor: Tensor) -> bool:
        # The optimizer of a device adds a number that it makes on the host (`torch.tensor(1.0)`) to its counters there.
        counts = self.phase == "optimizer" and self.graph.rules == "cuda" and not isinstance(tensor, FakeTensor)
        return counts or tensor.untyped_storage()._cdata in self.on_host

    def _register(self, storage: torch.UntypedStorage, made: Storage) -> None:
        index = len(self.graph.storages)
        self.graph.storages.append(made)
        self.known[storage._cdata] = index
        if made.born >= 0:
            self.graph.events.append((made.born, index, 1))
        address = storage._cdata
        self.references[index] = weakref.ref(storage, lambda _: self._freed(address, index))

    def _freed(self, address: int, index: int) -> None:
        if self.known.get(address) == index:
            del self.known[address]
        storage = self.graph.storages[index]
        storage.died = len(self.graph.ops) - 1
        self.graph.events.append((storage.died, index, -1))


@contextmanager
def _calls_watched(net: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Tells the recorder which module is running. The hooks go when the context does."""
    recorder.culprit.watch_hooks()
    with ExitStack() as hooks:
        for name, module in net.named_modules():
            hooks.callback(module.register_forward_pre_hook(_enter(recorder, name), prepend=True).remove)
            hooks.callback(module.register_forward_hook(_leave(recorder), always_call=True).remove)
        yield


def _enter(recorder: _Recorder, name: str) -> Callable[..., None]:
    return lambda module, args: recorder.enter(name)


def _leave(recorder: _Recorder) -> Callable[..., None]:
    return lambda module, args, output: recorder.leave()


_MOST_BYTES = 2**60

_WRONG_SHAPES = ("mkldnn_rnn_layer",)
"""Their fake kernels return less than the real ones: of an LSTM's step more than half would be missing."""


def _fake_inputs(inputs: Any, mode: FakeTensorMode) -> Any:
    if inputs is None:
        raise ConfigError(
            "inputs: None says nothing of the step. Give what the model is called with: a tensor, a tuple, a mapping."
        )
    made: dict[int, Tensor] = {}  # one tensor that is given twice stays one

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = _fake(tensor, mode)
        return made[id(tensor)]

    return tree_map_only(Tensor, fake, inputs)


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake tensor of the same layout, with a dense storage of its own, which is what a loader would hand over."""
    if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode:
        return tensor
    if tensor.layout is not torch.strided or tensor.is_quantized:
        layout = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise ConfigError(
            f"inputs: a {layout} tensor of shape {tuple(tensor.shape)} cannot be foreseen. Give a dense one."
        )
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)


def _refuse_absurd(graph: StepGraph, inputs: Any) -> None:
    """Keeps every sum of bytes far inside of 64 bits."""
    if sum(storage.nbytes for storage in graph.storages) > _MOST_BYTES:
        raise ConfigError(
            f"inputs: a step with {_shapes(inputs)} would take more than an exbibyte. Give fewer or smaller ones."
        )


def _shapes(inputs: Any) -> str:
    shapes = [tuple(leaf.shape) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return f"tensors of shape {listing(shapes, 4)}" if shapes else "no tensor"


def _bytes(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())


def _writes(func: Any) -> bool:
    return bool(func._schema.is_mutable)
