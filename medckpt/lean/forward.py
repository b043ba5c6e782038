"""What every lean operator shares: it takes the place of one module's `forward`, from outside, and can be taken away.

As with recompute (`memory/apply.py`) nothing is wrapped or renamed: the module gets an instance attribute `forward`, so
parameters, state-dict keys, module classes, hooks, `copy.deepcopy` and `torch.save` stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

Kernels = Literal["cpu", "cuda"]

_kernels: ContextVar[Kernels | None] = ContextVar("kernels", default=None)


class LeanForward:
    """The lean `forward` of a module. A class and not a closure, so that it can be copied and pickled with its module.

    A subclass says in `refusal` which modules it can stand in for and computes in `lean` what the module computes.
    Where nothing is saved for backward (gradients off, tracing by TorchScript) the module's own forward runs.
    """

    __slots__ = ("inner", "module")

    operator: ClassVar[str]
    """Its name in policies and plans, such as "window_attention"."""
    holds_others: ClassVar[bool] = False
    """Whether it calls the modules inside of its own as they are, so that these may have operators too."""

    def __init__(self, module: nn.Module, inner: Callable[..., Any] | None = None) -> None:
        """`inner` is an instance attribute `forward` that was there before."""
        self.module = module
        self.inner = inner

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        """Returns why it cannot stand in for `module`'s forward, or None where it can."""
        raise NotImplementedError

    def lean(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, with less saved for backward."""
        raise NotImplementedError

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.jit.is_tracing() or torch.compiler.is_exporting():
            return self.plain(*args, **kwargs)
        return self.lean(*args, **kwargs)


def laid_on(module: nn.Module) -> Iterator[Any]:
    """Yields the forwards laid on a module from outside, outermost first."""
    forward = module.__dict__.get("forward")
    while forward is not None:
        yield forward
        # What recompute and lean operators have in common; anything else is a forward that must run.
        forward = getattr(forward, "inner", None) if getattr(forward, "module", None) is module else None


def kernels_for(tensor: Tensor) -> Kernels:
    """Returns whose kernels an operator uses for `tensor`: its device's, or those of the device that is foreseen."""
    foreseen = _kernels.get()
    if foreseen is not None:
        return foreseen
    return "cuda" if tensor.device.type == "cuda" else "cpu"


@contextmanager
def foreseen_kernels(kernels: Kernels) -> Iterator[None]:
    """Lets lean operators run a device's own calls on fake CPU tensors: for the forecast of a step on that device."""
    token = _kernels.set(kernels)
    try:
        yield
    finally:
        _kernels.reset(token)
