"""What goes wrong inside of a traced step, in words: which module or hook, what torch says, and the way out."""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from medckpt.errors import ConfigError, MedckptError
from medckpt.memory.graph import Phase

_HERE = Path(__file__).parent
_TORCHS_LOG = logging.getLogger("torch._subclasses.fake_tensor")
"""It tells of an error at length before it is raised."""
_HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
_WAYS_OUT = {
    ".numpy() is not supported": "Its values are only there in a real run: leave this part out of the forecast.",
    "Cannot access data pointer": "Its values are only there in a real run: leave this part out of the forecast.",
    "no fake impl registered": "Give the operator a fake kernel (torch.library.register_fake), or leave it out.",
    "storage of SparseTensorImpl": "Sparse tensors and gradients are not foreseen: use dense ones (sparse=False).",
}
"""What torch says, and what can be done."""
_HOOK_WAY_OUT = (
    "Hooks run in a forecast as they do in training, on tensors without values. Take this one off for the forecast "
    "(handle.remove()), or let it leave fake tensors alone (torch._subclasses.FakeTensor)."
)


class Culprit:
    """Which module, or which hook of the user's, an error left first.

    Errors are known by their ids, as they hold tensors.
    """

    def __init__(self, net: nn.Module) -> None:
        self._net = net
        self._module: tuple[int, str] | None = None
        self._hook: tuple[int, str] | None = None

    def forget(self) -> None:
        self._module = None

    def left_module(self, name: str, error: BaseException | None) -> None:
        """Says that `error`, if there is one, leaves the forward of module `name`."""
        if error is not None and (self._module is None or self._module[0] != id(error)):
            self._module = id(error), name

    def watch_hooks(self) -> None:
        """Wraps the hooks of the network, which must be a copy that is thrown away."""
        for name, module in self._net.named_modules():
            for attribute, kind in _HOOKS.items():
                hooks = getattr(module, attribute, {})
                for key, hook in hooks.items():
                    hooks[key] = self._watched(hook, f"the {kind} {_name(hook)} on {self._described(name)}")

    def _watched(self, hook: Callable[..., Any], description: str) -> Callable[..., Any]:
        @functools.wraps(hook, assigned=(), updated=())
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except Exception as error:
                if self._hook is None or self._hook[0] != id(error):
                    self._hook = id(error), description
                raise

        return run

    def place(self, error: BaseException, phase: Phase) -> str:
        """Returns where the error came from."""
        if self.is_hook(error):
            assert self._hook is not None
            return self._hook[1]
        if self._module is not None and self._module[0] == id(error):
            return self._described(self._module[1]) if self._module[1] else "the model's own forward"
        return f"the {phase}"

    def is_hook(self, error: BaseException) -> bool:
        return self._hook is not None and self._hook[0] == id(error)

    def _described(self, name: str) -> str:
        module = type(self._net.get_submodule(name)).__name__
        return f"module '{name}' ({module})" if name else f"the model ({module})"


@contextmanager
def clear_errors(culprit: Culprit, phase: Callable[[], Phase], inputs: str) -> Iterator[None]:
    """Turns what the model, the loss or torch raise in a step into a ConfigError with the place and the way out.

    Args:
        culprit: told by the trace where errors come from.
        phase: which phase is under way.
        inputs: what the step gets, in words.
    """
    silent, _TORCHS_LOG.disabled = _TORCHS_LOG.disabled, True
    try:
        yield
    except MedckptError:
        raise
    except Exception as error:
        place = culprit.place(error, phase())
        text = _explained(error, place)
        if text is None and (_is_ours(error) or phase() in ("clip", "optimizer", "average")):
            raise
        if text is None:
            text = f"{place} fails with {type(error).__name__}: {first_line(error)}"
            if not culprit.is_hook(error):
                text += (
                    f" The step is run as training runs it, with {inputs}: check that model, inputs and loss go "
                    "together, as loss(model(inputs))."
                )
        if culprit.is_hook(error):
            text += f" {_HOOK_WAY_OUT}"
        raise ConfigError(f"forecast: {text}") from error
    finally:
        _TORCHS_LOG.disabled = silent


def _explained(error: Exception, place: str) -> str | None:
    """Returns what is known of errors that only fake tensors have."""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return (
            f"{place} reads values in `{error.func}`, which only a real run has, so the step cannot be foreseen "
            "without one. Leave this part out of the forecast (another `loss=`, a fixed branch)."
        )
    if isinstance(error, UnsupportedOperatorException):
        return (
            f"{place} uses `{error.func}`, which says nothing of its result's shape without running. Give it a fake "
            "kernel (torch.library.register_fake), or leave it out."
        )
    way_out = next((words for found, words in _WAYS_OUT.items() if found in str(error)), None)
    return None if way_out is None else f"{place} cannot be traced ({first_line(error)}) {way_out}"


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text as a sentence, cut if it is long; its type if it has none."""
    line = next((text.strip() for text in str(error).splitlines() if text.strip()), type(error).__name__)
    line = line if len(line) <= 300 else f"{line[:299]}\N{HORIZONTAL ELLIPSIS}"
    return line if line.endswith((".", "!", "?")) else f"{line.rstrip(':')}."


def _is_ours(error: Exception) -> bool:
    """Whether the line that raised it is one of this room's: a fault of the forecast, not of what is forecast."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).parent == _HERE


def _name(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return f"'{getattr(hook, '__qualname__', type(hook).__qualname__)}'"
