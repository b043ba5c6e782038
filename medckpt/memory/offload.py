"""Moves what chosen regions save for backward to host memory and back, from outside, with bit-identical results.

`apply_offload` gives each region an instance attribute `forward`, as recompute does (`memory/apply.py`), that runs the
class's forward under a pair of `torch.autograd.graph.saved_tensors_hooks`. What goes:

* whole *storages*, each once: views of one storage share one copy, and keep their strides and offsets;
* of a size at which a transfer is worth its latency, and while the host's limit has room; the others stay;
* no parameters, buffers or tensors that are there for their gradient, and no casts of weights that autocast made: these
  are shared by all uses of the weight. Of a frozen weight each use has its own cast, which goes like any other tensor;
* nothing that somebody else keeps on the device anyway. A tensor that turns out to be there still when it would be
  fetched is used as it is; and from then on its region leaves it there, if one forward pass calls the region once.

In backward the tensors come in reverse order, two ahead. On CUDA copies run on a stream of their own, between pinned
memory and the device. Elsewhere they are plain copies, which save no memory on a CPU: there this is for tests.

Exact means also: what was changed in place after it was saved is an error, as without hooks (torch itself leaves that
check out where there are hooks). As with recompute, writes through `.data` are not seen.

Hooks that surround a region do not see what it saves: `measure.saved_bytes` counts nothing for it.
"""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from medckpt.errors import ConfigError, listing, suggest
from medckpt.lean.forward import kernels_for
from medckpt.memory.apply import _is_parallel_wrapper, _recomputes_itself, applied
from medckpt.memory.host_memory import CudaLink, ForeseenLink, HostPool, Link
from medckpt.memory.offload_copies import Copy, Counter, Lane
from medckpt.memory.regions import find_regions

FLOOR_BYTES = 2**20
"""At 25 GB/s a transfer of 1 MiB takes 42 us, some four times its latency."""

_HALF = (torch.float16, torch.bfloat16)
_OF_ONE_WEIGHT = ("ToCopyBackward", "TBackward", "TransposeBackward", "PermuteBackward", "ViewBackward", "UnsafeView")


def apply_offload(
    model: nn.Module, regions: Sequence[str], *, host_limit_bytes: int | None = None, floor_bytes: int = FLOOR_BYTES
) -> nn.Module:
    """Lets `regions` keep in host memory what they save for backward; in place, and all or nothing.

    Loss, gradients, buffers and random states stay equal bit for bit. With gradients off a region runs as before.
    Regions hold one pool of host memory per device together, which stays for the next step. Lean operators and
    recompute may lie inside of a region. Wrap with DDP afterwards.

    Args:
        model: any module tree.
        regions: fully qualified module names; "" is the model as a whole. None inside another.
        host_limit_bytes: most host memory per device; what finds no room stays on the device. None: no limit.
        floor_bytes: storages that are smaller stay on the device.

    Returns:
        `model` itself.

    Raises:
        ConfigError: a name is unknown, given twice or nested in another; offload is applied already; a region is
            recomputed, or lies in a module that is; a region holds, or lies in, a compiled module, or holds a
            data-parallel wrapper; a region has no forward; a number is out of range. A region that turns out to run
            inside of a `torch.utils.checkpoint` raises it in the forward pass.
    """
    for name, value in (("host_limit_bytes", host_limit_bytes), ("floor_bytes", floor_bytes)):
        if value is not None and (not isinstance(value, int) or value < 0):
            raise ConfigError(f"Offload: {name} must be a number of bytes, 0 or more; not {value!r}.")
    modules = _resolve(model, regions)
    shared = _Offloader(host_limit_bytes, floor_bytes)
    for module in modules.values():
        module.__dict__["forward"] = _Offload(module, shared, module.__dict__.get("forward"))
    return model


def undo_offload(model: nn.Module) -> nn.Module:
    """Takes offload away from every region of `model`, in place, and returns it; lean operators stay."""
    for module in model.modules():
        offload = module.__dict__.get("forward")
        if isinstance(offload, _Offload):
            del module.__dict__["forward"]
            if offload.inner is not None:
                module.__dict__["forward"] = offload.inner
    return model


def offloaded(model: nn.Module) -> tuple[str, ...]:
    """Returns the regions of `model` that are offloaded, in module order; copies and loads keep them."""
    return tuple(n for n, m in model.named_modules() if isinstance(m.__dict__.get("forward"), _Offload))


class _Offload:
    """The `forward` of a region. A class and not a closure, so that it can be copied and pickled with its module."""

    __slots__ = ("__weakref__", "calls", "inner", "kept_anyway", "module", "offloader")

    def __init__(self, module: nn.Module, offloader: _Offloader, inner: Callable[..., Any] | None = None) -> None:
        self.module = module
        self.offloader = offloader
        self.inner = inner
        self.calls: weakref.WeakSet[_Call] = weakref.WeakSet()
        """Those whose copies are still there."""
        self.kept_anyway: dict[tuple[int, tuple[int, ...], torch.dtype], bool] = {}
        """By number in the call, shape and dtype of a saved tensor: True leaves it where others keep it, False does not
        although they were once seen to."""

    def __getstate__(self) -> tuple[Any, ...]:
        return self.module, self.offloader, self.inner

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The forward without offload: the instance's own if it had one, else the class's."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.jit.is_tracing() or torch.compiler.is_exporting():
            return self.plain(*args, **kwargs)
        if _in_checkpoint():
            raise ConfigError(
                f"Offload of a {type(self.module).__name__}: it runs inside of a recomputed region, which does not "
                "keep what could be offloaded. Take one of the two away: undo(model) or undo_offload(model)."
            )
        try:
            with saved_tensors_hooks(_Call(self).pack, _unpack):
                return self.plain(*args, **kwargs)
        finally:
            self.offloader.flush()


def _in_checkpoint() -> bool:
    """Whether the hooks that surround what runs now are those of a non-reentrant `torch.utils.checkpoint`."""
    if torch.compiler.is_compiling():  # cannot ask, and runs what is offloaded outside of its graphs
        return False
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


class _Call:
    """One call of a region: decides what goes. It holds neither module nor tensors, as autograd holds it."""

    __slots__ = ("__weakref__", "_count", "_offloader", "_owned", "_region")

    def __init__(self, region: _Offload) -> None:
        self._region = weakref.ref(region)
        self._offloader = region.offloader
        self._count = 0
        tensors = (*region.module.parameters(), *region.module.buffers())
        self._owned = {tensor.untyped_storage()._cdata for tensor in tensors if _is_plain(tensor)}
        region.calls.add(self)

    def pack(self, tensor: Tensor) -> _Stays | _Saved:
        if not self._goes(tensor):
            return _Stays(tensor)
        self._count += 1
        kept = _KeptAnyway(self, (self._count, tuple(tensor.shape), tensor.dtype))
        return _Saved(tensor, self._offloader.lane(tensor).put(tensor, kept))

    def region(self) -> _Offload | None:
        return self._region()

    def _goes(self, tensor: Tensor) -> bool:
        if not _is_plain(tensor) or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        if storage.nbytes() < max(self._offloader.floor_bytes, 1) or storage.nbytes() % tensor.element_size():
            return False
        if storage._cdata in self._owned or _waits_for_gradient(tensor):
            return False
        return tensor.dtype not in _HALF or not _is_weight_cast(tensor)


class _KeptAnyway:
    """What is known of one saved tensor of a region: whether others keep it on the device."""

    __slots__ = ("_call", "_place")

    def __init__(self, call: _Call, place: tuple[int, tuple[int, ...], torch.dtype]) -> None:
        self._call = call
        self._place = place

    @property
    def known(self) -> bool:
        region = self._call.region()
        return region is not None and region.kept_anyway.get(self._place, False)

    def learn(self) -> None:
        region = self._call.region()
        if region is not None:  # what is true of one of several calls may not be true of another
            alone = len(region.calls) == 1
            region.kept_anyway[self._place] = region.kept_anyway.get(self._place, True) and alone

    def forget(self) -> None:
        region = self._call.region()
        if region is not None:
            region.kept_anyway[self._place] = False  # and it will not be tried again


class _Offloader:
    """What the regions of a model have in common: limits, and a lane per device."""

    def __init__(self, host_limit_bytes: int | None, floor_bytes: int) -> None:
        self.host_limit_bytes = host_limit_bytes
        self.floor_bytes = floor_bytes
        self._lanes: dict[tuple[torch.device, FakeTensorMode | None], Lane] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _Offloader, (self.host_limit_bytes, self.floor_bytes)

    def lane(self, tensor: Tensor) -> Lane:
        mode = tensor.fake_mode if isinstance(tensor, FakeTensor) else None
        key = tensor.device, mode
        if key not in self._lanes:
            self._lanes[key] = Lane(self._link(tensor))
        return self._lanes[key]

    def flush(self) -> None:
        """Sends what was saved last."""
        for lane in self._lanes.values():
            lane.flush()

    def _link(self, tensor: Tensor) -> Link:
        if isinstance(tensor, FakeTensor) and kernels_for(tensor) == "cuda":
            return ForeseenLink(HostPool(self.host_limit_bytes, virtual=True))
        if tensor.device.type == "cuda":
            return CudaLink(HostPool(self.host_limit_bytes, pinned=True), tensor.device)
        return Link(HostPool(self.host_limit_bytes))


def _is_plain(tensor: Tensor) -> bool:
    known = type(tensor) in (Tensor, nn.Parameter, FakeTensor)
    return known and tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def _waits_for_gradient(tensor: Tensor) -> bool:
    """Whether it is a parameter, or anything else that outlives the backward pass to hold its gradient."""
    base = tensor if tensor._base is None else tensor._base
    return any(isinstance(t, nn.Parameter) or (t.is_leaf and t.requires_grad) for t in (tensor, base))


def _is_weight_cast(tensor: Tensor) -> bool:
    """Whether only casts and views lie between a parameter and the tensor."""
    node: Any = tensor.grad_fn
    while node is not None and node.name().startswith(_OF_ONE_WEIGHT):
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), nn.Parameter)


class _Stays:
    """A saved tensor that stays where it is. Detached: the tensor itself may hold the node that holds this."""

    __slots__ = ("counter", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.counter = Counter(tensor)


class _Saved:
    """A saved tensor: a view of a storage that has a copy."""

    __slots__ = ("copy", "counter", "dtype", "layout")

    def __init__(self, tensor: Tensor, copy: Copy) -> None:
        self.copy = copy
        self.counter = Counter(tensor)
        self.dtype = tensor.dtype
        self.layout = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def _unpack(packed: _Stays | _Saved) -> Tensor:
    packed.counter.check()
    if isinstance(packed, _Stays):
        return packed.tensor
    flat = packed.copy.lane.get(packed.copy)
    return (flat if flat.dtype == packed.dtype else flat.view(packed.dtype)).as_strided(*packed.layout)


def _resolve(model: nn.Module, regions: Sequence[str]) -> dict[str, nn.Module]:
    """Returns the modules by name; raises on unknown, double, nested and unfit ones."""
    if isinstance(regions, str):
        raise ConfigError(f"Offload: regions must be a sequence of module names, not the text '{regions}'.")
    present = offloaded(model)
    if present:
        raise ConfigError(
            f"Offload is applied to this model already ({listing(present)}). Call undo_offload(model) first, and give "
            "all regions in one call."
        )
    known = dict(model.named_modules(remove_duplicate=False))
    names: dict[nn.Module, str] = {}
    for name in regions:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3) or find_regions(model, "all")
            raise ConfigError(f"Offload: the model has no module '{name}'. {suggest(name, near)}")
        if known[name] in names:
            raise ConfigError(f"Offload: '{name}' and '{names[known[name]]}' are the same module. Name it once.")
        names[known[name]] = name
    for module, name in names.items():
        inner = next((names[m] for m in module.modules() if m is not module and m in names), None)
        if inner is not None:
            raise ConfigError(f"Offload: region '{inner}' lies inside region '{name}'. Keep one of the two.")
        _refuse_unfit(model, name, module)
    return {name: module for module, name in names.items()}


def _refuse_unfit(model: nn.Module, region: str, module: nn.Module) -> None:
    """Raises if `module` cannot be offloaded, or something around or inside it stands in the way."""
    where = f"Offload of '{region}' ({type(module).__name__})"
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(f"{where}: a TorchScript module has a fixed forward. Use the Python module.")
    if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
        raise ConfigError(f"{where}: a container is never called, so it saves nothing itself. Name its members.")
    inside = set(module.modules())
    recomputed = applied(model).regions
    for name, other in model.named_modules():
        around = module in set(other.modules())
        at = f"module '{name}'" if name else "the model"
        if around and (name in recomputed or (other is not module and _recomputes_itself(other))):
            raise ConfigError(
                f"{where}: {at} ({type(other).__name__}) recomputes it, so it saves nothing that could be offloaded. "
                "Choose one of the two for each region."
            )
        if not around and other not in inside:
            continue
        if type(other).__name__ == "OptimizedModule" or getattr(other, "_compiled_call_impl", None) is not None:
            raise ConfigError(f"{where}: {at} is compiled, and decides itself what it saves. Take the original model.")
        if other in inside and _is_parallel_wrapper(other, is_region=other is module):
            raise ConfigError(
                f"{where}: {at} is a data-parallel wrapper ({type(other).__name__}), which must stay outside of "
                "offload. Apply offload first, then wrap."
            )
