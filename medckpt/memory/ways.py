"""How a step runs, beside what is done with its regions: whole, with a tail by samples, or in micro-batches."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from medckpt.errors import ConfigError
from medckpt.memory.bind import bind, call, find_tail
from medckpt.memory.graph import Op, StepGraph
from medckpt.memory.loss_trial import LossRaisedError, LossTrial
from medckpt.memory.measure import fake_copy
from medckpt.memory.target_loss import TargetLoss

_MOST_TRIED = 16
"""Micro-batches of a step that are tried by themselves: each count is traced part by part, and more bring little."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a step runs, beside what is done with its regions."""

    tail: bool = False
    micro_batches: int = 1


def ways_to_try(
    model: nn.Module, samples: int, *, by_samples: bool, micro_batches: int | None, tail: bool | None
) -> list[Way]:
    """Returns how a step of `samples` may run, in the order in which it is tried; not all may be exact for the model.

    `by_samples`: whether the loss is at hand, of (output, target). `micro_batches`, `tail`: what is asked for; None
    leaves it open.
    """
    by_samples = by_samples and samples > 1
    whole = micro_batches in (None, 1)
    found = [Way()] if whole and tail is not True else []
    if by_samples and whole and tail is not False and _has_tail(model):
        # Micro-batches of the whole network take more time for the same memory (B4 of the frontier study).
        return [*found, Way(tail=True)]
    if by_samples and tail is not True and micro_batches != 1:
        counts = [k for k in range(2, min(samples, _MOST_TRIED) + 1) if samples % k == 0]
        found += [Way(micro_batches=k) for k in (counts if micro_batches is None else [micro_batches])]
    return found


def exact_ways(
    wanted: Sequence[Way],
    model: nn.Module,
    loss: TargetLoss,
    inputs: Any,
    target: Any,
    *,
    run: bool,
    record: Callable[[], StepGraph],
) -> tuple[Way, ...]:
    """Returns those of `wanted` that give the plain step's gradients, as far as it shows before training.

    Args:
        wanted: at least one.
        model, loss, inputs, target: of the step; the model is left untouched.
        run: whether steps may be run with values, on copies: they show whether samples depend on one another.
        record: gives the record of the plain step.

    Raises:
        ConfigError: none of them does; with the reason of the last.
    """
    found, reason = [], "the step has no way to run."
    for way in wanted:
        try:
            if way != Way():
                step = bind(
                    copy.deepcopy(model) if run else model, loss, tail=way.tail, micro_batches=way.micro_batches
                )
                refuse_random(way, record())
                if run:
                    step(real_tensors(inputs), real_tensors(target))
                else:
                    refuse_loss(model, loss, inputs, target)
            found.append(way)
        except ConfigError as error:
            reason = str(error)
    if not found:
        raise ConfigError(reason)
    return tuple(found)


def refuse_impossible(
    model: nn.Module, loss: TargetLoss | None, target: Any, samples: int, micro_batches: Any, tail: bool | None
) -> None:
    """Raises ConfigError for a way to run that was asked for and cannot be."""
    if micro_batches is not None and (
        isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1
    ):
        raise ConfigError(f"micro_batches={micro_batches!r}: must be a whole number from 1 on, or 'auto'.")
    if loss is not None and target is None:
        raise ConfigError("target: with a loss of (output, target) the target is needed; on 'meta' it takes no memory.")
    split = "micro_batches" if micro_batches not in (None, 1) else "tail" if tail else None
    if split and loss is None:
        raise ConfigError(f"{split}: a step by samples needs a loss of (output, target). Give loss= and target=.")
    if split == "micro_batches" and samples % (micro_batches or 1):
        raise ConfigError(f"micro_batches={micro_batches}: does not divide the {samples} samples of a step.")
    if split == "tail" and loss is not None and find_tail(model) is None:
        bind(model, loss, tail=True)  # says what it needs


def _has_tail(model: nn.Module) -> bool:
    """Whether the per-sample tail is known and exact for this model."""
    try:
        return find_tail(model) is not None and bind(model, lambda output, _: output, tail=True) is not None
    except ConfigError:
        return False


def refuse_random(way: Way, graph: StepGraph) -> None:
    """Raises ConfigError for micro-batches of a network that draws at random in its step, whose record is `graph`."""
    if way.micro_batches == 1:
        return
    for op in graph.ops:
        if _draws(op):
            raise ConfigError(
                f"micro_batches: '{op.region}' draws at random ({op.name}), and part by part it would draw other "
                "numbers than for the whole batch. Use recompute instead."
            )


def refuse_loss(model: nn.Module, loss: TargetLoss, inputs: Any, target: Any) -> None:
    """Raises ConfigError for a loss that is no mean over samples, without a step: on outputs of the model's shapes.

    What cannot be tried so (a loss that wants the GPU, a model that computes constants for real) is tried by the first
    step.
    """
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            net = fake_copy(model, mode, device="cpu")
            output = call(net, tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype), inputs))
    except Exception:  # a model may raise anything
        return
    outputs = tree_map_only(Tensor, lambda t: torch.zeros(1, dtype=t.dtype).expand(t.shape), output)
    criterion: Any = copy.deepcopy(loss).cpu() if isinstance(loss, nn.Module) else loss
    with contextlib.suppress(LossRaisedError):
        LossTrial(criterion)(outputs, real_tensors(target))


def _draws(op: Op) -> bool:
    if op.call is None or torch.Tag.nondeterministic_seeded not in op.call[0].tags:
        return False
    func, args, kwargs = op.call
    names = [argument.name for argument in func._schema.arguments]
    # Attention counts as random, and is not without dropout.
    return (dict(zip(names, args, strict=False)) | kwargs).get("dropout_p", 1.0) != 0


class BoundModel(nn.Module):
    """A step with its loss inside, as a module that can be traced."""

    def __init__(self, model: nn.Module, loss: TargetLoss, way: Way) -> None:
        super().__init__()
        self.model = model
        self.step = bind(model, loss, tail=way.tail, micro_batches=way.micro_batches)

    def forward(self, inputs: Any, target: Any) -> torch.Tensor:
        return self.step(inputs, target)


def real_tensors(tree: Any) -> Any:
    """Returns tensors of the same shapes and dtypes that hold values: random ones where there are none."""

    def made(tensor: Tensor) -> Tensor:
        if tensor.device.type != "meta" and not isinstance(tensor, FakeTensor):
            return tensor
        shape, dtype = tensor.shape, tensor.dtype
        return torch.randn(shape, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)

    return tree_map_only(Tensor, made, tree)
