"""A training step with the loss inside, so that it can run sample by sample: the per-sample tail and micro-batches.

Both levers run a part of forward *and* of backward at once, one piece of the batch at a time, and keep the gradients;
the outer backward pass multiplies them by what comes in (gradient in forward). They are exact where no sample's output
depends on another sample, so a network with batch statistics is refused. A loss that is a mean over samples is taken
piece by piece, and nothing is computed twice. One that says of itself that it is a function of sums over the batch
(`SummedLoss`: Dice over the batch) has its sums taken in a first pass without gradients, and each piece's gradient in a
second. Any other loss is refused.

* The *per-sample tail* is the full-resolution end of a U-shaped transformer: its first encoder, which reads nothing
  but the image, its last decoder, the head and the loss. The rest of the network runs on the whole batch.
* *Micro-batches* run the whole network on parts of the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves

from medckpt.errors import ConfigError
from medckpt.memory.loss_trial import LossTrial
from medckpt.memory.samples import find_tail, lever_of, refuse_coupled, refuse_dependence
from medckpt.memory.target_loss import TargetLoss, as_summed, sliced

log = logging.getLogger("medckpt")


class BoundStep:
    """`step(inputs, target)` returns the loss to call `backward()` on.

    With gradients off, or neither lever in use, it is `loss(model(inputs), target)`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: TargetLoss,
        *,
        tail: bool = False,
        micro_batches: int = 1,
        scale: Callable[[], float] | None = None,
    ) -> None:
        """`scale` is the loss scaling factor of the moment (a GradScaler's), for float16.

        Raises:
            ConfigError: the levers would not be exact for this model.
        """
        self.model = model
        self.loss = loss
        self.micro_batches = micro_batches
        self.scale = scale or (lambda: 1.0)
        self.summed = as_summed(loss)
        self.tail = find_tail(model) if tail else None
        if tail and self.tail is None:
            raise ConfigError(
                f"per-sample tail: {type(model).__name__} has no full-resolution end that is known (SwinUNETR and "
                "UNETR have). Use micro_batches instead."
            )
        if tail and micro_batches > 1:
            raise ConfigError("per-sample tail: not together with micro_batches, which splits more already.")
        if tail or micro_batches > 1:
            refuse_dependence(model, self.tail)
        self._checked = False
        """Whether the first step has shown that samples may run apart."""
        self._trial = LossTrial(loss)

    def __call__(self, inputs: Any, target: Any) -> Tensor:
        trained = any(p.requires_grad for p in self.model.parameters())
        if not torch.is_grad_enabled() or not trained or not (self.tail or self.micro_batches > 1):
            return self.loss(call(self.model, inputs), target)
        batch = self._batch_of(inputs, target)
        self._trial.renew(target)
        loss = self._with_tail(inputs, target, batch) if self.tail else self._in_micro_batches(inputs, target, batch)
        self._checked = True
        return loss

    def _batch_of(self, inputs: Any, target: Any) -> int:
        """Returns the number of samples; refuses what would get no gradient, or a wrong one."""
        lever = lever_of(self.tail)
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves((inputs, target))):
            raise ConfigError(f"{lever}: an input requires a gradient, which would not come back. Detach it.")
        batch = _batch(inputs, f"{lever}: every input")
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(target)):
            found = _batch(target, f"{lever}: every tensor of the target")
            if found != batch:
                raise ConfigError(f"{lever}: the inputs have {batch} samples, the target has {found}.")
        hooked = [name for name, p in self.model.named_parameters() if p._backward_hooks and p.requires_grad]
        if hooked:
            raise ConfigError(
                f"{lever}: the parameter '{hooked[0]}' has a hook, which would run for every part and once more. Use "
                "register_post_accumulate_grad_hook, or recompute instead."
            )
        if not self._checked and _outside_ddp():
            log.warning(
                "This step runs outside of DistributedDataParallel, which then does not average its gradients. Wrap a "
                "module whose forward calls the step: DDP sees what is called through it alone."
            )
        return batch

    def _with_tail(self, image: Any, target: Any, batch: int) -> Tensor:
        assert self.tail is not None
        if not isinstance(image, Tensor):
            raise ConfigError("per-sample tail: the network takes one tensor (B, C, ...) here, and nothing else.")
        early, last, head = (getattr(self.model, name) for name in self.tail.names)
        with _cut_out(early, last, head) as caught:
            self.model(image)
        features = caught["features"]

        def output(part: Tensor, pixels: Tensor) -> Any:
            return head(last(part, early(pixels)))

        def run(piece: slice, part: Tensor) -> Tensor:
            return self._loss(output(part, image[piece]), sliced(target, piece), target)

        if not self._checked:
            refuse_coupled("per-sample tail", self.model, output, [features.detach(), image])
        weights = [p for module in (early, last, head) for p in module.parameters() if p.requires_grad]
        return self._apply(run, batch, batch, [features], weights)

    def _in_micro_batches(self, inputs: Any, target: Any, batch: int) -> Tensor:
        if batch % self.micro_batches:
            raise ConfigError(f"micro_batches={self.micro_batches}: does not divide the {batch} samples of a step.")

        def run(piece: slice) -> Tensor:
            return self._loss(call(self.model, sliced(inputs, piece)), sliced(target, piece), target)

        if not self._checked:
            refuse_coupled("micro_batches", self.model, lambda trees: call(self.model, trees), [inputs])
        return self._apply(run, batch, self.micro_batches, [], [p for p in self.model.parameters() if p.requires_grad])

    def _loss(self, output: Any, target: Any, whole: Any) -> Tensor:
        """Returns the loss of one piece, or what is summed of it; `whole` is the target of all pieces."""
        self._trial(output, whole)
        return self.loss(output, target) if self.summed is None else self.summed.statistics(output, target)

    def _apply(
        self,
        run: Callable[..., Tensor],
        batch: int,
        pieces: int,
        features: Sequence[Tensor],
        weights: Sequence[nn.Parameter],
    ) -> Tensor:
        own = [p for p in self.loss.parameters() if p.requires_grad] if isinstance(self.loss, nn.Module) else []
        size = batch // pieces
        slices = [slice(start, start + size) for start in range(0, batch, size)]
        whole = None if self.summed is None else self.summed.of_statistics
        job = _Job(run, slices, float(self.scale()), len(features), whole)
        return _GradientInForward.apply(job, *features, *dict.fromkeys([*weights, *own]))


def bind(
    model: nn.Module,
    loss: TargetLoss,
    *,
    tail: bool = False,
    micro_batches: int = 1,
    scale: Callable[[], float] | None = None,
) -> BoundStep:
    """Returns `step(inputs, target) -> loss`; see `BoundStep`."""
    return BoundStep(model, loss, tail=tail, micro_batches=micro_batches, scale=scale)


@dataclass(frozen=True, slots=True)
class _Job:
    """What one call of `_GradientInForward` runs: pieces of a batch, and how many of its tensors are features."""

    run: Callable[..., Tensor]
    pieces: Sequence[slice]
    factor: float
    features: int
    whole: Callable[[Tensor], Tensor] | None
    """The loss of the sum of what `run` gives; None: `run` gives losses, of which the mean counts."""


class _GradientInForward(torch.autograd.Function):
    """The loss of a batch from `run` over its pieces, each one's backward pass run at once.

    The weights are inputs, so that their gradients go the usual way: hooks, and DDP's buckets, see them.
    """

    @staticmethod
    def forward(ctx: Any, job: _Job, *tensors: Tensor) -> Tensor:
        features, weights = tensors[: job.features], tensors[job.features :]
        found: list[Tensor | None] = [torch.empty_like(feature) for feature in features]
        found += [None] * len(weights)
        total, slope = _by_sums(job, features)
        for piece in job.pieces:
            # Autocast's cache would hand one piece's casts, and their nodes, on to the next, and keep them all.
            torch.clear_autocast_cache()
            with torch.enable_grad():
                parts = [feature[piece].detach().requires_grad_(feature.requires_grad) for feature in features]
                loss = job.run(piece, *parts)
                if slope is None:
                    loss = loss / len(job.pieces)
                scaled = loss * job.factor if job.factor != 1 and slope is None else loss
            gradients = _gradients(scaled, [*parts, *weights], slope)
            value = loss.detach()
            del loss, scaled, parts
            if slope is None:
                total = value if total is None else total + value
            for index in range(len(gradients)):
                _take(found, index, gradients, piece if index < job.features else None)
        torch.clear_autocast_cache()
        ctx.factor = job.factor
        ctx.present = [gradient is not None for gradient in found]
        ctx.save_for_backward(*_own([gradient for gradient in found if gradient is not None], len(job.pieces) == 1))
        assert total is not None
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        factor = incoming if ctx.factor == 1 else incoming / ctx.factor
        # In place: there is no second copy, and torch refuses a second backward pass, whose version count would differ.
        kept = iter([gradient.mul_(factor.to(gradient.dtype)) for gradient in ctx.saved_tensors])
        return (None, *[next(kept) if present else None for present in ctx.present])


def _by_sums(job: _Job, features: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Returns a batch's loss and its derivative by what is summed over the pieces; nothing for a mean of losses."""
    if job.whole is None:
        return None, None
    sums: Tensor | None = None
    for piece in job.pieces:
        torch.clear_autocast_cache()
        with torch.no_grad():
            found = job.run(piece, *(feature[piece] for feature in features))
        sums = found if sums is None else sums + found
    assert sums is not None
    with torch.enable_grad(), torch.autocast(sums.device.type, enabled=False):
        sums = sums.detach().requires_grad_()
        loss = job.whole(sums)
        (slope,) = torch.autograd.grad(loss * job.factor, sums)
    return loss.detach(), slope


def _gradients(loss: Tensor, tensors: Sequence[Tensor], slope: Tensor | None = None) -> list[Tensor | None]:
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    with torch.autocast(loss.device.type, enabled=False):  # a backward pass runs outside of autocast
        found = iter(torch.autograd.grad(loss, wanted, slope, allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in tensors]


def _take(found: list[Tensor | None], index: int, gradients: list[Tensor | None], piece: slice | None) -> None:
    """Adds one gradient to what is found, and lets go of it."""
    gradient, gradients[index] = gradients[index], None
    kept = found[index]
    if piece is not None:
        assert kept is not None
        if gradient is None:
            kept[piece].zero_()
        else:
            kept[piece].copy_(gradient)
    elif gradient is not None:
        # Not in place: two parameters may have one and the same gradient, and it may be somebody's own tensor.
        found[index] = gradient if kept is None else kept + gradient


def _own(gradients: Sequence[Tensor], single: bool) -> list[Tensor]:
    """Returns gradients that may be changed in place, each with a storage of its own (`single`: none is a sum)."""
    seen: set[int] = set()
    found = []
    for gradient in gradients:
        storage = gradient.untyped_storage()
        whole = storage.nbytes() == gradient.numel() * gradient.element_size() and storage._cdata not in seen
        found.append(gradient if whole and not single else gradient.clone())
        seen.add(storage._cdata)
    return found


def _outside_ddp() -> bool:
    """Whether there are several processes, and this step does not run in a forward of DDP's."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    active = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    return torch.distributed.get_world_size() > 1 and active is None


@contextmanager
def _cut_out(early: nn.Module, last: nn.Module, head: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Lets the network's own forward run without its tail, and catches the features that go into it."""
    caught: dict[str, Tensor] = {}
    before = [(module, module.__dict__.get("forward")) for module in (early, last, head)]

    def features(tensor: Tensor, _: Tensor) -> Tensor:
        caught["features"] = tensor
        return tensor

    try:
        early.__dict__["forward"] = lambda image: image
        last.__dict__["forward"] = features
        head.__dict__["forward"] = lambda tensor: tensor
        yield caught
    finally:
        for module, forward in before:
            module.__dict__.pop("forward")
            if forward is not None:
                module.__dict__["forward"] = forward


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def _batch(tree: Any, what: str) -> int:
    sizes = {leaf.shape[0] if leaf.dim() else 0 for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}
    if len(sizes) != 1:
        raise ConfigError(f"{what} must have the samples in its first dimension; found {sorted(sizes)}.")
    return int(next(iter(sizes)))
