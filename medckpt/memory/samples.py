"""Whether the samples of a batch may run apart: which network has a tail that is known, and what depends on others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from medckpt.errors import ConfigError
from medckpt.memory.target_loss import device_of, sliced, two_unlike

_TOLERANCE = 1e-3
"""Of the largest number of an output: kernels add in another order for another batch, and TF32 rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """The full-resolution end of a network, by the names of its modules."""

    early: str
    """Reads the image alone; what it makes goes to `last`."""
    last: str
    """Reads the decoder's features, and then what `early` made."""
    head: str
    """Makes the output of what `last` made, and nothing comes after it."""

    @property
    def names(self) -> tuple[str, str, str]:
        return self.early, self.last, self.head


_TAILS = {
    "SwinUNETR": Tail(early="encoder1", last="decoder1", head="out"),
    "UNETR": Tail(early="encoder1", last="decoder2", head="out"),
}
"""By class name, so that nothing has to be imported to recognise a network."""


def find_tail(model: nn.Module) -> Tail | None:
    """Returns the per-sample tail of `model`, or None if it has none that is known."""
    for kind in type(model).__mro__:
        tail = _TAILS.get(kind.__name__)
        if tail is not None and all(isinstance(getattr(model, name, None), nn.Module) for name in tail.names):
            # A subclass, or a patch, may do something before the known forward or after it.
            own = type(model).forward is not kind.__dict__.get("forward") or "forward" in model.__dict__
            return None if own else tail
    return None


def lever_of(tail: Tail | None) -> str:
    """Returns what a step by samples is called in messages."""
    return "micro_batches" if tail is None else "per-sample tail"


def refuse_dependence(model: nn.Module, tail: Tail | None) -> None:
    """Refuses modules whose results for a sample depend on others, or would if they saw parts of a batch.

    Raises:
        ConfigError: it names the first of them.
    """
    lever = lever_of(tail)
    if type(model).__name__ == "OptimizedModule":
        raise ConfigError(f"{lever}: bind the model first, and compile afterwards.")
    if tail is not None and _has_hooks(model):
        raise ConfigError(f"{lever}: the network has hooks, which would see it without its end. Remove them.")
    roots = {"": model} if tail is None else {name: getattr(model, name) for name in tail.names}
    for root, top in roots.items():
        for name, module in top.named_modules(prefix=root):
            batch = isinstance(module, nn.modules.batchnorm._BatchNorm)
            tracks = getattr(module, "track_running_stats", False)
            if batch or tracks:
                raise ConfigError(
                    f"{lever}: '{name}' ({type(module).__name__}) takes statistics over the batch, so samples depend "
                    "on one another. Use recompute instead."
                )
            if _draws(module):
                raise ConfigError(
                    f"{lever}: '{name}' ({type(module).__name__}) draws at random, and part by part it would draw "
                    "other numbers than for the whole batch. Use recompute instead, or switch it off."
                )
            if tail is not None and _has_hooks(module):
                raise ConfigError(f"{lever}: '{name}' has hooks, which would see parts of a batch. Remove them.")


def _draws(module: nn.Module) -> bool:
    """Whether it is a dropout that is switched on."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.training and module.p > 0
    return type(module).__name__ == "DropPath" and module.training and bool(getattr(module, "drop_prob", 0))


def refuse_coupled(lever: str, model: nn.Module, run: Callable[..., Any], tensors: Sequence[Any]) -> None:
    """Refuses a network whose samples depend on one another, tried on two random ones together and apart.

    Args:
        lever: as messages call it.
        model: whose buffers must stay as they are.
        run: forward on `tensors`.
        tensors: trees of what goes in; shapes and dtypes are read.

    Raises:
        ConfigError: outputs differ, or a buffer does.
    """
    if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(tensors)):
        return  # a forecast reads no values
    weights = next((p for p in model.parameters() if p.is_floating_point()), None)
    generator = torch.Generator().manual_seed(0)

    def made(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return torch.cat([tensor[:1], tensor[-1:]])
        return two_unlike(tensor, generator).to(tensor.device, tensor.dtype if weights is None else weights.dtype)

    before = [(name, buffer, buffer.clone()) for name, buffer in model.named_buffers()]
    two = tree_map_only(Tensor, made, tensors)
    with torch.no_grad(), torch.autocast(device_of(tensors), enabled=False):
        together = run(*two)
        apart = [run(*sliced(two, one)) for one in (slice(0, 1), slice(1, 2))]
    changed = [name for name, buffer, old in before if not torch.equal(buffer, old)]
    if changed:
        with torch.no_grad():
            for _, buffer, old in before:
                buffer.copy_(old)
        raise ConfigError(
            f"{lever}: a forward pass changes the buffer '{changed[0]}', and part by part it would change more often "
            "than for the whole batch. Use recompute instead."
        )
    pairs = zip(tree_leaves(together), *(tree_leaves(part) for part in apart), strict=False)
    if not all(_equal(whole, torch.cat(parts)) for whole, *parts in pairs if isinstance(whole, Tensor) and whole.dim()):
        raise ConfigError(
            f"{lever}: what {type(model).__name__} gives for a sample depends on the other samples of the batch, so it "
            "cannot run part by part. Use recompute instead."
        )


def _equal(whole: Tensor, parts: Tensor) -> bool:
    if whole.shape != parts.shape:
        return False
    whole, parts = whole.double(), parts.double()
    return bool((whole - parts).abs().max() <= _TOLERANCE * whole.abs().max())


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
