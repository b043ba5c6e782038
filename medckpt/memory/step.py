"""One training step of any module, as training runs it: the same code for fake tensors and for real ones.

Forward under autocast, loss, backward, gradient accumulation, clipping, optimizer, averaged weights. The model's output
is released after the loss, as Lightning's training step does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from medckpt.errors import ConfigError, suggest
from medckpt.memory.autocast import Precision, autocast
from medckpt.memory.graph import Kind, Phase

OptimizerName = Literal["adamw", "sgd"]
Loss = Callable[[Any], Tensor]

_STATES: dict[str, tuple[str, ...]] = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """How a step is trained, beside model, inputs and loss."""

    precision: Precision = "bf16-mixed"
    optimizer: OptimizerName | None = "adamw"
    """AdamW, or SGD with momentum; None stops after the backward pass."""
    clip_norm: float | None = None
    accumulate: int = 1
    """Micro-batches (forward and backward passes) per optimizer step."""
    averages: bool = False
    """Whether an exponential average of the weights is kept on the device."""
    weight_cache: bool = True
    """Whether autocast casts a weight once per forward pass, as `torch.autocast` does, or at each use (Lightning)."""
    rules: Literal["cuda", "cpu"] = "cuda"
    """Whose autocast, attention kernels and optimizer implementation: a CUDA device's, or this CPU's."""

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise ConfigError(f"precision: '{self.precision}' is not known. {_choices(self.precision, Precision)}")
        if self.optimizer is not None and not isinstance(self.optimizer, str):
            raise ConfigError(
                f"optimizer: must be a name or None, not {_a(self.optimizer)}. The step makes an optimizer of its own. "
                f"{_choices('', OptimizerName)}"
            )
        if self.optimizer is not None and self.optimizer not in get_args(OptimizerName):
            raise ConfigError(f"optimizer: '{self.optimizer}' is not known. {_choices(self.optimizer, OptimizerName)}")
        if self.precision == "16-mixed" and self.rules == "cpu":
            raise ConfigError("precision=16-mixed: float16 training needs a GPU's GradScaler. Use 32 or bf16-mixed.")
        if self.clip_norm is not None:
            if isinstance(self.clip_norm, bool) or not isinstance(self.clip_norm, Real):
                raise ConfigError(f"clip_norm: must be a number above 0, or None; not {_a(self.clip_norm)}.")
            if not self.clip_norm > 0:
                raise ConfigError(f"clip_norm: must be above 0, or None; not {self.clip_norm}.")
        if isinstance(self.accumulate, bool) or not isinstance(self.accumulate, int):
            raise ConfigError(f"accumulate: must be a whole number of passes, not {_a(self.accumulate)}.")
        if self.accumulate < 1:
            raise ConfigError(f"accumulate: must be at least 1, not {self.accumulate}.")
        for name in ("averages", "weight_cache"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: must be True or False, not {_a(getattr(self, name))}.")


class StepRunner:
    """Model, inputs and optimizer of a step, ready to run it.

    Optimizer states exist from the start, as from the second step of a training on.
    """

    def __init__(self, net: nn.Module, inputs: Any, loss: Loss | None, step: Step, *, device: str = "cpu") -> None:
        """`inputs` is a tuple of positional arguments, a mapping of keyword arguments, or the only argument."""
        self.net = net
        self.args, self.kwargs = _arguments(inputs)
        if loss is not None and not callable(loss):
            raise ConfigError(f"loss: must be a callable on the model's output, or None; not {_a(loss)}.")
        self.loss = mean_of_squares if loss is None else loss
        self.step = step
        self.device = device
        self.trained = [p for p in net.parameters() if p.requires_grad]
        self.optimizer = self._make_optimizer()
        self.averages = [p.detach().clone() for p in self.trained] if step.averages else []

    def run(self, phase: Callable[[Phase], None] = lambda name: None) -> None:
        """Runs one step; `phase` is told what begins. Gradients are left in place, and there must be none before."""
        for _ in range(self.step.accumulate):
            self._pass(phase)
        foreach = self.step.rules == "cuda"
        if self.step.clip_norm is not None and self.trained:
            phase("clip")
            torch.nn.utils.clip_grad_norm_(self.trained, self.step.clip_norm, foreach=foreach)
        if self.optimizer is not None:
            phase("optimizer")
            with _StepCountIsOne():
                self.optimizer.step()
        if self.averages:
            phase("average")
            with torch.no_grad():
                torch._foreach_lerp_(self.averages, [p.detach() for p in self.trained], 0.01)

    def held(self) -> dict[Kind, list[Tensor]]:
        """Returns what is there on the device between two steps, gradients apart."""
        on_host = {id(tensor) for tensor in self.on_host()}
        states = [] if self.optimizer is None else [list(state.values()) for state in self.optimizer.state.values()]
        own = [*self.loss.parameters(), *self.loss.buffers()] if isinstance(self.loss, nn.Module) else []
        return {
            "parameters": [*self.net.parameters(), *self.net.buffers()],
            "optimizer": [tensor for tensor in _tensors(states) if id(tensor) not in on_host],
            "averages": self.averages,
            "inputs": _tensors((self.args, self.kwargs, own)),
        }

    def on_host(self) -> list[Tensor]:
        """Returns the optimizer's states that are not on the device: AdamW keeps its step counters on the CPU.

        Unless it is `fused` or `capturable` (torch.optim.Adam._init_group), which it is not by default.
        """
        if self.optimizer is None or self.step.rules == "cpu":
            return []
        return [state["step"] for state in self.optimizer.state.values() if "step" in state]

    def gradients(self) -> list[Tensor]:
        """Returns the gradients that there are."""
        return [p.grad for p in self.trained if p.grad is not None]

    def _pass(self, phase: Callable[[Phase], None]) -> None:
        phase("forward")
        with autocast(self.step.precision, device=self.device, weight_cache=self.step.weight_cache):
            output = self.net(*self.args, **self.kwargs)
            phase("loss")
            value = self.loss(output)
            del output
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ConfigError(f"loss: must return one number to minimise, not {_describe(value)}.")
        phase("backward")
        if value.requires_grad:
            # Not Tensor.backward, which function modes would see.
            torch.autograd.backward([value / self.step.accumulate if self.step.accumulate > 1 else value])
        elif self.trained:
            raise ConfigError(
                "loss: what it returns has no gradient, so nothing would be trained. Leave .detach(), .item() and "
                "torch.no_grad() away between the model's parameters and the loss."
            )

    def _make_optimizer(self) -> torch.optim.Optimizer | None:
        """Returns the optimizer in the implementation that torch picks on the device, with its states in place."""
        name, foreach = self.step.optimizer, self.step.rules == "cuda"
        if name is None or not self.trained:
            return None
        if name == "sgd":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(self.trained, lr=1e-6, momentum=0.9, foreach=foreach)
        else:
            optimizer = torch.optim.AdamW(self.trained, lr=1e-6, foreach=foreach)
        for parameter in self.trained:
            state = {name: torch.zeros_like(parameter) for name in _STATES[name]}
            optimizer.state[parameter] = state | ({"step": torch.ones(())} if name == "adamw" else {})
        return optimizer


def mean_of_squares(output: Any) -> Tensor:
    """Returns the mean of the squares of every floating tensor in `output`, summed: the loss of no task."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not tensors:
        raise ConfigError(
            f"loss: the model's output ({_describe(output)}) holds no floating tensor whose squares could be taken. "
            "Give a loss of your own: loss=callable on the output."
        )
    return torch.stack([tensor.float().square().mean() for tensor in tensors]).sum()


class _StepCountIsOne(torch.overrides.TorchFunctionMode):
    """Lets AdamW read its step counter on fake tensors, the only value that an update looks at."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.item and isinstance(args[0], FakeTensor):
            return 1.0
        return func(*args, **(kwargs or {}))


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    _refuse_shapes(inputs)
    if isinstance(inputs, tuple):
        return inputs, {}
    return ((), dict(inputs)) if isinstance(inputs, Mapping) else ((inputs,), {})


def _refuse_shapes(inputs: Any) -> None:
    """Refuses a shape or arrays in the place of tensors, which a model would refuse in words of its own."""
    leaves = tree_leaves(inputs)
    if isinstance(inputs, tuple | list) and len(inputs) > 2 and all(type(side) is int for side in inputs):
        shape = ", ".join(map(str, inputs))
        raise ConfigError(f"inputs: these are numbers. If they are a shape, give torch.empty({shape}, device='meta').")
    for leaf in leaves:
        if type(leaf).__module__.partition(".")[0] == "numpy":
            raise ConfigError("inputs: a NumPy array is no tensor. Give torch.from_numpy(array).")


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _a(value: Any) -> str:
    """Returns a setting and its type, as errors show it."""
    text = repr(value)
    return f"{text} ({type(value).__name__})" if len(text) <= 40 else f"a value of type {type(value).__name__}"


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _choices(value: Any, kind: Any) -> str:
    return suggest(str(value), get_args(kind))
