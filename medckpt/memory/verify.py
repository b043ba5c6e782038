"""Shows that a planned step computes what the plain step computes: loss, every gradient, buffers, random states."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from medckpt.errors import MedckptError, listing
from medckpt.memory.bind import bind
from medckpt.memory.options import OPTIONS, lay_on, take_off
from medckpt.memory.step import Precision, autocast, mean_of_squares
from medckpt.memory.target_loss import TargetLoss

LOSS_TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
"""Relative difference of the loss that re-ordered arithmetic may make."""
GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}
"""The same of a gradient, relative to the plain gradient's largest value over all parameters."""
LOWER_PRECISION = 0.05
"""Both, where autocast rounds to 8 or 11 bits: there the plain step itself is no closer to exact arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How far a planned step is from the plain one."""

    exact: bool
    """Whether the plan's levers must agree bit for bit: it recomputes and keeps, and re-orders no sum."""
    loss_difference: float
    """Relative."""
    gradient_differences: Mapping[str, float] = field(repr=False)
    """Parameter -> largest absolute difference over the largest absolute value of all plain gradients."""
    buffers_equal: bool
    random_states_equal: bool
    tolerance: tuple[float, float]
    """Of loss and gradients."""
    note: str = ""
    """What else is to be known."""

    @property
    def worst(self) -> tuple[str, float]:
        """The parameter whose gradient differs most."""
        return max(self.gradient_differences.items(), key=lambda item: item[1], default=("", 0.0))

    @property
    def bit_identical(self) -> bool:
        return not self.loss_difference and not self.worst[1] and self.buffers_equal and self.random_states_equal

    @property
    def passed(self) -> bool:
        """Whether every difference is within tolerance (none at all where the plan is exact)."""
        if self.exact:
            return self.bit_identical
        within = self.loss_difference <= self.tolerance[0] and self.worst[1] <= self.tolerance[1]
        return within and self.buffers_equal

    def __str__(self) -> str:
        if self.bit_identical:
            return f"verified: loss and {len(self.gradient_differences)} gradients are equal bit for bit"
        name, worst = self.worst
        verdict = "verified" if self.passed else "NOT equal"
        return (
            f"{verdict}: loss differs by {self.loss_difference:.1e}, gradients by at most {worst:.1e} of the largest "
            f"('{name}'; {len(self.gradient_differences)} parameters){self.note}"
        )


def verify_choices(
    model: nn.Module,
    inputs: Any,
    choices: Mapping[str, str],
    *,
    loss: TargetLoss | None = None,
    target: Any = None,
    tail: bool = False,
    micro_batches: int = 1,
    precision: Precision = "32",
    seed: int = 0,
) -> Verification:
    """Runs one plain and one planned step on copies of `model`, and compares them.

    Rounding alone can tip a unit of a leaky ReLU over, which changes a gradient by far more than rounding. So where a
    float32 step with re-ordered sums is not within tolerance, the same in float64 decides, within float64's tolerance.

    Args:
        model: any module, plain or with a policy laid on; it is left untouched.
        inputs: real tensors: the only argument, a tuple, or a mapping.
        choices: region -> option.
        loss: of output and target; None takes the mean of squares of the output.
        tail, micro_batches: as `bind` takes them.
        precision: autocast or none.
        seed: of torch's, Python's and NumPy's generators before each step; they are set back afterwards.

    Raises:
        MedckptError: a parameter has a gradient in one of the steps only.
    """
    how: dict[str, Any] = {"tail": tail, "micro_batches": micro_batches, "precision": precision, "seed": seed}
    found = _compared(model, inputs, choices, loss, target, **how)
    single = all(p.dtype == torch.float32 for p in model.parameters() if p.is_floating_point())
    if found.passed or found.exact or precision != "32" or not single:
        return found
    wide = copy.deepcopy(loss).double() if isinstance(loss, nn.Module) else loss
    tensors, labels = (tree_map_only(Tensor, _doubled, tree) for tree in (inputs, target))
    try:
        again = _compared(copy.deepcopy(model).double(), tensors, choices, wide, labels, **how)
    except (RuntimeError, TypeError, MedckptError):  # something in it is float32 alone
        return found
    note = f", in float64; float32's rounding makes {found.worst[1]:.1e} of it"
    return dataclasses.replace(again, note=note) if again.passed else found


def _doubled(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype == torch.float32 else tensor


def _compared(
    model: nn.Module,
    inputs: Any,
    choices: Mapping[str, str],
    loss: TargetLoss | None,
    target: Any,
    *,
    tail: bool,
    micro_batches: int,
    precision: Precision,
    seed: int,
) -> Verification:
    criterion = loss if loss is not None else lambda output, _: mean_of_squares(output)
    plain = take_off(copy.deepcopy(model))
    planned = lay_on(take_off(copy.deepcopy(model)), choices)
    first = _run(plain, bind(plain, criterion), inputs, target, precision, seed)
    step = bind(planned, criterion, tail=tail, micro_batches=micro_batches)
    second = _run(planned, step, inputs, target, precision, seed)
    lean = any(OPTIONS[option].operators for option in choices.values())
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    tight = precision == "32"
    return Verification(
        exact=not (lean or tail or micro_batches > 1),
        loss_difference=_relative(first.loss, second.loss),
        gradient_differences=_differences(first.gradients, second.gradients),
        buffers_equal=all(torch.equal(first.buffers[name], second.buffers[name]) for name in first.buffers),
        random_states_equal=first.random_states == second.random_states,
        tolerance=(LOSS_TOLERANCE.get(dtype, LOWER_PRECISION), GRADIENT_TOLERANCE.get(dtype, LOWER_PRECISION))
        if tight
        else (LOWER_PRECISION, LOWER_PRECISION),
    )


@dataclass(frozen=True, slots=True)
class _Result:
    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    random_states: tuple[Any, ...]
    """Of torch (on the CPU, and on the model's device), Python and NumPy, after the step."""


def _run(model: nn.Module, step: Any, inputs: Any, target: Any, precision: Precision, seed: int) -> _Result:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with _seeded(seed, device):
        model.zero_grad(set_to_none=True)
        with torch.enable_grad():
            with autocast(precision, device=device.type):
                loss = step(inputs, target)
            loss.backward()
        states = _random_states(device)
    return _Result(
        loss.detach(),
        {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        dict(model.named_buffers()),
        states,
    )


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds every generator, and sets them back afterwards."""
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _random_states(device: torch.device) -> tuple[Any, ...]:
    own = torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else b""
    numpy = pickle.dumps(np.random.get_state(legacy=False))
    return torch.get_rng_state().numpy().tobytes(), own, random.getstate(), numpy


def _relative(plain: Tensor, planned: Tensor) -> float:
    if torch.equal(plain, planned) or (plain.isnan() and planned.isnan()):
        return 0.0
    return float((plain.double() - planned.double()).abs() / plain.double().abs().clamp(min=1e-30))


def _differences(plain: dict[str, Tensor], planned: dict[str, Tensor]) -> dict[str, float]:
    alone = sorted(plain.keys() ^ planned.keys())
    if alone:
        raise MedckptError(
            f"verify: {listing(alone)} have a gradient in one of the steps only. This is a fault of the plan; "
            "please report it with the model."
        )
    largest = max((float(g.abs().max()) for g in plain.values() if g.numel()), default=0.0) or 1.0
    found = {}
    for name, gradient in plain.items():
        other = planned[name]
        same = torch.equal(gradient, other) or (
            torch.equal(gradient.isnan(), other.isnan()) and not gradient.isfinite().any()
        )
        found[name] = 0.0 if same else float((gradient.double() - other.double()).abs().max() / largest)
    return found
