"""One training step of a module with and without its lean operator, and how far apart they are."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from medckpt.lean.swap import apply_lean


class Step(NamedTuple):
    out: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def volume(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def one_step(module: nn.Module, x: Tensor, *args: object, bf16: bool = False, times: int = 1) -> Step:
    """A step from a fixed seed with a loss that weighs every element by itself; `times` backward passes."""
    torch.manual_seed(7)
    module.zero_grad(set_to_none=True)
    leaf = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        out = module(leaf * 1, *args)
    weights = volume(*out.shape, seed=2).to(out.dtype)
    loss = (out * weights).sum()
    for left in reversed(range(times)):
        loss.backward(retain_graph=left > 0)
    gradients = {name: p.grad for name, p in module.named_parameters()} | {"input": leaf.grad}
    return Step(out.detach(), gradients, {name: b.clone() for name, b in module.named_buffers()})


def both(module: nn.Module, x: Tensor, *args: object, bf16: bool = False) -> tuple[Step, Step]:
    """The step of a copy as it is and of one with every lean operator."""
    return one_step(copy.deepcopy(module), x, *args, bf16=bf16), one_step(
        apply_lean(copy.deepcopy(module)), x, *args, bf16=bf16
    )


def assert_equal(one: Step, other: Step) -> None:
    assert torch.equal(one.out, other.out)
    assert one.gradients.keys() == other.gradients.keys()
    for name, gradient in one.gradients.items():
        twin = other.gradients[name]
        assert (gradient is None and twin is None) or torch.equal(gradient, twin), name
    for name, buffer in one.buffers.items():
        assert torch.equal(buffer, other.buffers[name]), name


def distance(one: Step, truth: Step) -> float:
    """The largest difference of output or gradients, as a share of the largest gradient (output) of the truth."""
    top = max(float(g.abs().max()) for g in truth.gradients.values() if g is not None)
    found = [float((one.out.double() - truth.out.double()).abs().max() / truth.out.abs().max())]
    for name, gradient in truth.gradients.items():
        twin = one.gradients[name]
        assert (twin is None) == (gradient is None), name
        if gradient is not None and twin is not None:
            found.append(float((twin.double() - gradient.double()).abs().max()) / top)
    return max(found)
