"""Recompute chosen regions of a model in the backward pass, from outside, with bit-identical results.

`apply_recompute` gives each region an instance attribute `forward` that runs the class's forward through the
non-reentrant `torch.utils.checkpoint`. Nothing is wrapped or renamed: parameters, state-dict keys, module classes,
hooks, `copy.deepcopy` and `torch.save` stay as they are, and `undo` takes the attribute away.

`torch.utils.checkpoint` alone is not exact. What it leaves to its caller is done here, for each region call:

* every tensor, in keyword arguments and nested containers too, is handed over positionally: a tensor caught in a
  closure escapes the version check, and an in-place change would give wrong gradients without an error;
* buffers and frozen parameters that the forward may change (BatchNorm statistics, spectral-norm vectors, counters,
  codebooks) are seen by the recompute as the forward saw them, and are updated once. Integer tables and frozen
  weights are large and constant as a rule: a region's first call finds out which of them change, and only those are
  copied from then on. One that changes later, or a trainable parameter that changes, is an error;
* the global states of Python's `random` and of NumPy are set back for the recompute, as torch does for its own
  (all these together: about 0.15 ms in forward and 0.2 ms in backward per region call, 27 KiB of host memory);
* `training` flags are set back too, so `model.eval()` between forward and backward does no harm.

What cannot be seen from outside is left alone: Python attributes that a forward counts up, and random generators
that a module owns. Forward hooks on a region run once; those on modules inside it run again in the recompute, where
`recomputing()` is true. `torch.nn.DataParallel` copies the attribute without its module and is not supported.
"""

from __future__ import annotations

import difflib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from medckpt.errors import ConfigError, listing, suggest
from medckpt.memory.regions import find_regions

_local = threading.local()

_SMALL = 4096  # elements up to which a copy costs less than finding out whether it is needed

# By class name, so that nothing has to be imported to recognise it. Value: what the module would do to a region.
_RECOMPUTING_WRAPPERS = {"CheckpointWrapper", "ActivationCheckpointWrapper"}
_RECOMPUTING_FLAGS = ("use_checkpoint", "use_checkpointing", "gradient_checkpointing")
_PARALLEL_WRAPPERS = {"FullyShardedDataParallel", "DistributedDataParallel", "DataParallel"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What is recomputed in a model: the names of its regions, in module order."""

    regions: tuple[str, ...]


def apply_recompute(model: nn.Module, regions: Sequence[str]) -> nn.Module:
    """Recomputes `regions` in the backward pass of `model`; in place, and all or nothing.

    Loss, gradients, buffers and random states of a training step stay equal bit for bit, wherever the operators
    themselves are repeatable. A region keeps its inputs and nothing else; with gradients off it runs as before. Wrap
    with DDP, FSDP or `torch.compile` afterwards.

    Args:
        model: any module tree.
        regions: fully qualified module names, as `find_regions` returns them; none inside another.

    Returns:
        `model` itself.

    Raises:
        ConfigError: a name is unknown, the root, given twice or nested in another; recompute is applied already, or
            the model brings its own (`use_checkpoint=True`, a checkpoint wrapper); a region holds, or lies in, a
            compiled module, or holds a data-parallel wrapper; a region has no forward to recompute.
    """
    if isinstance(regions, str):
        raise ConfigError(f"Recompute: regions must be a sequence of module names, not the text '{regions}'.")
    present = applied(model).regions
    if present:
        raise ConfigError(
            f"Recompute is applied to this model already ({listing(present)}), and a region inside a region would "
            "be run again for each level. Call undo(model) first, and give all regions in one call."
        )
    modules = _resolve(model, regions)
    for name, module in modules.items():
        _refuse_unfit(model, name, module)
    for module in modules.values():
        module.__dict__["forward"] = _Recompute(module, module.__dict__.get("forward"))
    return model


def undo(model: nn.Module) -> nn.Module:
    """Takes recompute away from every region of `model`, in place, and returns it; no regions, no change."""
    for module in model.modules():
        recompute = module.__dict__.get("forward")
        if isinstance(recompute, _Recompute):
            del module.__dict__["forward"]
            if recompute.inner is not None:
                module.__dict__["forward"] = recompute.inner
    return model


def applied(model: nn.Module) -> Applied:
    """Returns which regions of `model` are recomputed; it is read from the model, so copies and loads keep it."""
    names = (n for n, m in model.named_modules() if isinstance(m.__dict__.get("forward"), _Recompute))
    return Applied(regions=tuple(names))


def recomputing() -> bool:
    """Whether this thread is in the recompute of a region: for hooks and counters that must act once per step."""
    return getattr(_local, "depth", 0) > 0


class _Recompute:
    """The `forward` of a region. A class and not a closure, so that it can be copied and pickled with its module."""

    __slots__ = ("changing", "inner", "module")

    def __init__(self, module: nn.Module, inner: Callable[..., Any] | None = None) -> None:
        self.module = module
        self.inner = inner
        # By training flag, once it has been found out: what changes in training often does not in evaluation.
        self.changing: dict[bool, frozenset[str]] = {}

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The forward without recompute: the instance's own if it had one, else the class's."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.jit.is_tracing() or torch.compiler.is_exporting():
            return self.plain(*args, **kwargs)
        if torch.compiler.is_compiling():
            # The compiler functionalises the region: it sees every tensor, and writes buffers once by itself.
            return checkpoint(self.plain, *args, use_reentrant=False, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        call = _Call(self, spec)
        before = [(leaf, _version(leaf)) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        # Random operators on fake tensors draw nothing; the generator belongs to the process, where others may draw.
        draws = not any(isinstance(leaf, FakeTensor) for leaf, _ in before)
        marks = _device_marks(leaves, self.module)
        result = checkpoint(call, *leaves, *marks, use_reentrant=False, preserve_rng_state=draws)
        if any(_version(leaf) != version for leaf, version in before):
            raise ConfigError(
                f"Recompute of a {type(self.module).__name__}: its forward changes its input in place, and the "
                "recompute would begin with the changed one. Leave this region out, or build it with inplace=False."
            )
        return result


class _Call:
    """One call of a region: runs the forward at first, and later runs it again from the same state.

    The state is kept here and not in checkpoint's `context_fn`, which torch refuses together with its debug mode.
    It must not hold the arguments: checkpoint keeps those, under autograd's checks.
    """

    __slots__ = ("recompute", "spec", "state")

    def __init__(self, recompute: _Recompute, spec: TreeSpec) -> None:
        self.recompute = recompute
        self.spec = spec
        self.state: ForwardState | None = None

    def __call__(self, *leaves: Any) -> Any:
        args, kwargs = tree_unflatten(leaves[: self.spec.num_leaves], self.spec)
        if self.state is None:
            module, changing = self.recompute.module, self.recompute.changing
            training = module.training
            self.state = ForwardState(module, changing.get(training))
            result = self.recompute.plain(*args, **kwargs)
            changing[training] = self.state.settle(changing.get(training))
            return result
        _local.depth = getattr(_local, "depth", 0) + 1
        try:
            with self.state.restored():
                return self.recompute.plain(*args, **kwargs)
        finally:
            _local.depth -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A buffer or parameter as it was before a forward: where it is registered, the object and its version."""

    owner: dict[str, Any]
    key: str
    name: str
    tensor: torch.Tensor
    version: int

    def touched(self) -> bool:
        """Whether another object has its place, or it was written to (not seen: writes through `.data`)."""
        return self.owner.get(self.key) is not self.tensor or _version(self.tensor) != self.version


class ForwardState:
    """What a forward of `module` reads besides its inputs and constants, and torch does not set back by itself.

    `changing` names the large integer buffers and frozen parameters to copy as well. With None all are copied, and
    `settle`, after the forward, keeps those that have changed.
    """

    __slots__ = ("doubtful", "kept", "numpy", "python", "training", "watched")

    def __init__(self, module: nn.Module, changing: frozenset[str] | None = frozenset()) -> None:
        self.python = random.getstate()
        self.numpy = np.random.get_state(legacy=False)
        self.training = [(m, m.training) for m in module.modules()]
        self.kept: list[tuple[dict[str, Any], str, torch.Tensor | None]] = []
        self.doubtful: list[tuple[_Entry, torch.Tensor]] = []
        self.watched: list[_Entry] = []
        for path, m in module.named_modules():
            for key, buffer in m._buffers.items():
                if buffer is None or _may_change(buffer):
                    self.kept.append((m._buffers, key, None if buffer is None else buffer.detach().clone()))
                else:
                    self._doubt(m._buffers, key, f"{path}.{key}".lstrip("."), changing)
            for key, parameter in m._parameters.items():
                if parameter is None or is_lazy(parameter):
                    continue
                if type(parameter) is nn.Parameter and not parameter.requires_grad and parameter.numel() <= _SMALL:
                    self.kept.append((m._parameters, key, _copy(parameter)))
                else:
                    self._doubt(m._parameters, key, f"{path}.{key}".lstrip("."), changing)

    def _doubt(self, owner: dict[str, Any], key: str, name: str, changing: frozenset[str] | None) -> None:
        tensor = owner[key]
        entry = _Entry(owner=owner, key=key, name=name, tensor=tensor, version=_version(tensor))
        if changing is not None and name in changing:
            self.kept.append((owner, key, _copy(tensor)))
        elif changing is None and not tensor.is_meta and not isinstance(tensor, FakeTensor):
            self.doubtful.append((entry, _copy(tensor)))
        else:
            self.watched.append(entry)

    def settle(self, changing: frozenset[str] | None) -> frozenset[str]:
        """After the forward: returns `changing`, or which tensors have changed if that was None.

        Raises:
            ConfigError: a tensor has changed that the recompute could not set back.
        """
        # A trainable parameter may be written to without a change (cuDNN lays RNN weights out anew).
        lost = [e for e in self.watched if (e.owner.get(e.key) is not e.tensor if _trains(e) else e.touched())]
        found = [(e, c) for e, c in self.doubtful if _differs(e, c) or (e.touched() and not _trains(e))]
        self.kept += [(e.owner, e.key, copy) for e, copy in found if not _trains(e)]
        lost += [e for e, _ in found if _trains(e)]
        self.doubtful, self.watched = [], []
        if lost:
            raise ConfigError(
                f"Recompute: the forward of a region changed {listing([e.name for e in lost])}, a large constant or a "
                "trainable parameter until now; recomputing it would change it twice and give wrong gradients. Leave "
                "the region out, or hold what the forward changes in a floating-point buffer."
            )
        return frozenset(e.name for e, _ in found) if changing is None else changing

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Lays the state under one more forward. Also left by exception: checkpoint's early stop is one."""
        python, numpy = random.getstate(), np.random.get_state(legacy=False)
        switched = [(m, m.training) for m, training in self.training if m.training != training]
        # The entries are exchanged, not written to: no version counter moves, and infinite values do no harm.
        current = [(owner, key, owner[key]) for owner, key, _ in self.kept]
        try:
            for m, training in self.training:
                if m.training != training:
                    m.training = training
            for owner, key, tensor in self.kept:
                owner[key] = None if tensor is None else _copy(tensor)  # a retained graph recomputes again
            random.setstate(self.python)
            np.random.set_state(self.numpy)
            yield
        finally:
            for owner, key, original in current:
                owner[key] = original
            for m, training in switched:
                m.training = training
            random.setstate(python)
            np.random.set_state(numpy)


def _may_change(buffer: torch.Tensor) -> bool:
    # Integer tables (relative positions, indices) are large and constant; small integers may be counters.
    return buffer.is_floating_point() or buffer.is_complex() or buffer.numel() <= _SMALL


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy outside of the graph, which stays a frozen parameter if it was one."""
    copy = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        copy = nn.Parameter(copy, requires_grad=False)
        copy.__dict__.update(tensor.__dict__)
    return copy


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version  # inference tensors do not count


def _trains(entry: _Entry) -> bool:
    return entry.tensor.requires_grad


def _differs(entry: _Entry, copy: torch.Tensor) -> bool:
    now = entry.owner.get(entry.key)
    return now is not entry.tensor or not torch.equal(now.detach(), copy)


def _device_marks(leaves: Sequence[Any], module: nn.Module) -> list[torch.Tensor]:
    """Returns an empty tensor on the module's accelerator if no input lies there.

    checkpoint keeps the random state of the devices it sees among its tensor arguments only.
    """
    parameter = next(module.parameters(), None)
    if parameter is None or parameter.device.type in {"cpu", "meta"}:
        return []
    if any(isinstance(leaf, torch.Tensor) and leaf.device == parameter.device for leaf in leaves):
        return []
    return [torch.empty(0, device=parameter.device)]


def _resolve(model: nn.Module, regions: Sequence[str]) -> dict[str, nn.Module]:
    """Returns the modules by name; raises on unknown, double and nested ones."""
    known = dict(model.named_modules(remove_duplicate=False))
    names: dict[nn.Module, str] = {}
    for name in regions:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3) or find_regions(model, "all")
            raise ConfigError(f"Recompute: the model has no module '{name}'. {suggest(name, near)}")
        module = known[name]
        if module is model:
            raise ConfigError("Recompute: the whole model as one region saves nothing. Name modules inside it.")
        if module in names:
            raise ConfigError(f"Recompute: '{name}' and '{names[module]}' are the same module. Name it once.")
        names[module] = name
    for module, name in names.items():
        inner = next((names[m] for m in module.modules() if m is not module and m in names), None)
        if inner is not None:
            raise ConfigError(
                f"Recompute: region '{inner}' lies inside region '{name}' and would be run again for each level. "
                "Keep one of the two."
            )
    return {name: module for module, name in names.items()}


def _refuse_unfit(model: nn.Module, region: str, module: nn.Module) -> None:
    """Raises if `module` cannot be recomputed, or something around or inside it stands in the way."""
    where = f"Recompute of '{region}' ({type(module).__name__})"
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(f"{where}: a TorchScript module has a fixed forward. Use the Python module.")
    if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
        raise ConfigError(f"{where}: a container is never called, so there is nothing to recompute. Name its members.")
    inside = set(module.modules())
    for name, other in model.named_modules():
        if other not in inside and module not in set(other.modules()):
            continue
        at = f"module '{name}'" if name else "the model"
        if _recomputes_itself(other):
            raise ConfigError(
                f"{where}: {at} ({type(other).__name__}) brings its own activation checkpointing, and both together "
                "would run it twice. Build the model with use_checkpoint=False (or without the wrapper), or leave the "
                "region out."
            )
        if type(other).__name__ == "OptimizedModule" or getattr(other, "_compiled_call_impl", None) is not None:
            raise ConfigError(
                f"{where}: {at} is compiled. Recompute must be applied before torch.compile, on the original model."
            )
        if other in inside and _is_parallel_wrapper(other, is_region=other is module):
            raise ConfigError(
                f"{where}: {at} is a data-parallel wrapper ({type(other).__name__}), which must stay outside of "
                "recompute. Apply recompute first, then wrap."
            )


def _recomputes_itself(module: nn.Module) -> bool:
    if type(module).__name__ in _RECOMPUTING_WRAPPERS:
        return True
    return any(getattr(module, flag, False) is True for flag in _RECOMPUTING_FLAGS)


def _is_parallel_wrapper(module: nn.Module, is_region: bool) -> bool:
    names = {base.__name__ for base in type(module).__mro__}
    # FSDP2 works by hooks on the module's call, and these stay outside when the sharded module is the region itself.
    return bool(names & _PARALLEL_WRAPPERS) or ("FSDPModule" in names and not is_region)
