"""Finds the blocks of any `nn.Module` tree: the module calls that are worth recomputing as a whole.

Only the tree is looked at (classes, children), never a forward pass, so the answer is the same for a model on any
device, under fake tensors, and with recompute applied or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import nn

from medckpt.errors import ConfigError, suggest

Level = Literal["none", "block", "all"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_regions(model: nn.Module, level: Level) -> tuple[str, ...]:
    """Returns the names of the regions to recompute: never nested in one another, in module order.

    The tree is walked down from the root until a *block* is met. A block has children, is not the root, holds no
    more than half of all leaf modules, and is one of

    * a module with a forward of its own that is not a *stage*;
    * a `Sequential` (or a subclass without a forward of its own, such as MONAI's `Convolution`) of two or more leaf
      modules with no module with a forward of its own below it. A plain `Sequential` of several modules that have
      children themselves is walked through.

    A class is a *stage*, and walked through wherever it occurs, if one of its instances

    * is or holds a `ModuleList`, `ModuleDict` or `Sequential` with two or more modules of one class with a forward
      of their own (a Swin `BasicLayer`, a ViT, a ResNet stage);
    * is the only one of its class and holds two or more modules of one class with a forward of their own (a
      hand-written encoder, a wrapper around a network);
    * holds an instance of its own class (the recursive `SkipConnection` of MONAI's UNet).

    A `Sequential` that begins with a module that changes its input in place (`ReLU(inplace=True)`, as in the head of
    MONAI's DenseNet) is no block: what a region was given has to be there when it is recomputed.

    Args:
        model: any module tree; it is not changed and not called.
        level: "none" gives no region. "block" gives the blocks that repeat: the class occurs at least twice in the
            model (a plain `Sequential`: at least twice among the blocks), or the block wraps a module with a
            forward of its own whose class does. "all" adds the single ones: output convolution, patch embedding.

    Returns:
        Names as in `model.named_modules()`; of a module registered under several names the first. Empty if the tree
        has no block (a flat stack of leaf modules).

    Raises:
        ConfigError: `model` is no module, or `level` is not one of the three.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: must be an nn.Module, not {type(model).__name__}.")
    if level not in get_args(Level):
        raise ConfigError(f"regions: '{level}' is not a level. {suggest(str(level), get_args(Level))}")
    if level == "none":
        return ()
    tree = _Tree(model)
    blocks = tree.blocks()
    if level == "block":
        sequentials = sum(type(block) is nn.Sequential for block in blocks.values())
        blocks = {name: block for name, block in blocks.items() if tree.repeats(block, sequentials)}
    return tuple(blocks)


class _Tree:
    """The facts about one module tree that the rule needs, each found once."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.half = _leaf_count(model) / 2
        self.counts = Counter(type(module) for module in model.modules())
        self.stages = {type(m) for m in model.modules() if _has_own_forward(m) and self._is_stage(m)}

    def blocks(self) -> dict[str, nn.Module]:
        """Returns every block by name, in module order."""
        found: dict[str, nn.Module] = {}
        covered: set[nn.Module] = set()
        for name, module in _walk_down(self.model, "", covered):
            # A shared module may have been taken under an earlier name, and must not be nested in a later region.
            if module not in covered and self._is_block(module) and set(found.values()).isdisjoint(module.modules()):
                found[name] = module
                covered.update(module.modules())
        return found

    def repeats(self, block: nn.Module, sequentials: int) -> bool:
        """Whether `block`, or a module with a forward of its own inside it, is of a class that occurs again."""
        if type(block) is nn.Sequential:
            return sequentials > 1
        return self.counts[type(block)] > 1 or any(self.counts[type(m)] > 1 for m in _own_forward_below(block))

    def _is_block(self, module: nn.Module) -> bool:
        if module is self.model or _leaf_count(module) > self.half:
            return False
        if _has_own_forward(module):
            return type(module) not in self.stages
        return _is_sequential_block(module)

    def _is_stage(self, module: nn.Module) -> bool:
        inside = [type(m) for m in _own_forward_below(module)]
        if type(module) in inside:
            return True
        if self.counts[type(module)] == 1 and _has_pair(inside):
            return True
        lists = (m for m in module.modules() if isinstance(m, _CONTAINERS))
        return any(_has_pair([type(m) for m in each.children() if _has_own_forward(m)]) for each in lists)


def _walk_down(module: nn.Module, prefix: str, covered: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yields modules in module order; what the caller puts into `covered` is not entered."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        yield path, child
        if child not in covered:
            yield from _walk_down(child, f"{path}.", covered)


def _has_own_forward(module: nn.Module) -> bool:
    # Read from the class: an instance attribute `forward` is how recompute is applied, and must not change the answer.
    return bool(module._modules) and _class_forward(module) not in (nn.Module.forward, nn.Sequential.forward)


def _class_forward(module: nn.Module) -> object:
    # The class of a TorchScript module has none that can be read; such a module cannot be recomputed from outside.
    return nn.Module.forward if isinstance(module, torch.jit.ScriptModule) else type(module).forward


def _own_forward_below(module: nn.Module) -> list[nn.Module]:
    return [m for m in module.modules() if m is not module and _has_own_forward(m)]


def _is_sequential_block(module: nn.Module) -> bool:
    if _class_forward(module) is not nn.Sequential.forward or _leaf_count(module) < 2 or _own_forward_below(module):
        return False
    if _begins_in_place(module):
        return False
    return type(module) is not nn.Sequential or sum(bool(child._modules) for child in module.children()) < 2


def _begins_in_place(module: nn.Module) -> bool:
    """Whether the first module that a `Sequential` runs writes its result into its input."""
    while module._modules:
        module = next(child for child in module.children())
    return getattr(module, "inplace", False) is True


def _leaf_count(module: nn.Module) -> int:
    return sum(not m._modules for m in module.modules())


def _has_pair(classes: list[type]) -> bool:
    return any(count > 1 for count in Counter(classes).values())
