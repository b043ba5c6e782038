"""What can be done with a region, and how a choice per region is laid on a model and taken away."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from medckpt.errors import ConfigError, listing, suggest
from medckpt.lean.swap import OPERATORS, applied_lean, apply_lean, undo_lean
from medckpt.memory.apply import applied, apply_recompute, undo
from medckpt.memory.offload import apply_offload, offloaded, undo_offload

_ATTENTION = ("window_attention", "self_attention")
_BETWEEN = ("swin_layer", "window_mask")
"""Operators around regions: they are laid on whatever is done with the regions (`label_layers`)."""
_LEAN = tuple(operator for operator in OPERATORS if operator not in _BETWEEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What is done with a region: its lean operators, and whether it runs again in backward or saves in host memory."""

    meaning: str
    """In a few words, for people."""
    operators: tuple[str, ...] = ()
    recompute: bool = False
    offload: bool = False


OPTIONS: dict[str, Option] = {
    "keep": Option(meaning="the network's own operators, everything saved for backward"),
    "lean_attention": Option(meaning="attention that saves no scores", operators=_ATTENTION),
    "lean": Option(meaning="attention, norms and MLPs that save less for backward", operators=_LEAN),
    "recompute": Option(
        meaning="saves its input alone and runs again in backward, with lean attention",
        operators=_ATTENTION,
        recompute=True,
    ),
    "recompute_lean": Option(
        meaning="saves its input alone and runs again in backward, with lean operators", operators=_LEAN, recompute=True
    ),
    "recompute_plain": Option(meaning="saves its input alone and runs again in backward", recompute=True),
    "offload": Option(
        meaning="what it saves waits for backward in host memory, with lean operators", operators=_LEAN, offload=True
    ),
    "offload_plain": Option(meaning="what it saves waits for backward in host memory", offload=True),
}
"""By name. `keep` is the model as it is; `recompute_plain` runs the model's own operators again."""


_AS_IT_IS = ("recompute_plain", "offload_plain")
"""Options of networks without lean operators."""


def lay_on(model: nn.Module, choices: Mapping[str, str], *, lean: bool = True) -> nn.Module:
    """Applies an option to each region of `model`; in place, and all or nothing.

    Args:
        model: any module tree without lean operators or recompute.
        choices: option per region (fully qualified module names, none inside another).
        lean: whether what lies between the regions may be computed by lean operators too (`label_layers`).

    Raises:
        ConfigError: a region or an option does not exist, or cannot be applied.
    """
    for region, option in choices.items():
        if option not in OPTIONS:
            raise ConfigError(f"policy: '{option}' (of '{region}') is no option. {suggest(option, OPTIONS)}")
    present = {*applied(model).regions, *applied_lean(model), *offloaded(model)}
    if present:
        raise ConfigError(
            f"policy: something is applied to this model already ({listing(sorted(present), 3)}). Take it off first: "
            "medckpt.remove(model)."
        )
    try:
        operators = lean_modules(model, choices)
        if lean:
            operators |= label_layers(model, choices, operators)
        apply_lean(model, operators)
        apply_recompute(model, [region for region, option in choices.items() if OPTIONS[option].recompute])
        apply_offload(model, [region for region, option in choices.items() if OPTIONS[option].offload])
    except ConfigError:
        take_off(model)
        raise
    return model


def take_off(model: nn.Module) -> nn.Module:
    """Takes offload, recompute and lean operators away from every module of `model`, in place, and returns it."""
    undo_offload(model)
    undo(model)
    return undo_lean(model)


def lean_modules(model: nn.Module, choices: Mapping[str, str]) -> dict[str, str]:
    """Returns operator per module: inside of each region the outermost modules that its option has one for."""
    modules = dict(model.named_modules())
    found: dict[str, str] = {}
    for region, option in choices.items():
        if region not in modules:
            raise ConfigError(f"policy: the model has no module '{region}'. {suggest(region, filter(None, modules))}")
        taken: set[nn.Module] = set()
        for name, module in modules[region].named_modules(prefix=region):
            operator = None if module in taken else _operator_for(module, OPTIONS[option].operators)
            if operator is not None:
                found[name] = operator
                taken.update(module.modules())
    return found


def label_layers(model: nn.Module, choices: Mapping[str, str], operators: Mapping[str, str]) -> dict[str, str]:
    """Returns operator per module for the layers of Swin networks: labels in the place of the mask.

    What lies between regions must be the same under every option, or memory would not be a sum over regions. So blocks
    that are kept, or whose attention stays MONAI's own for another reason, are handed labels as well. Without choices,
    and where blocks are recomputed as they are (`recompute_plain`), there are none.

    Args:
        model: any module tree.
        choices: option per region.
        operators: what the options lay on, operator per module.
    """
    if not choices or any(option in _AS_IT_IS for option in choices.values()):
        return {}
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if OPERATORS["swin_layer"].refusal(module) is not None:
            continue
        found[name] = "swin_layer"
        for inner, part in module.named_modules(prefix=name):
            if inner not in operators and OPERATORS["window_mask"].refusal(part) is None:
                found[inner] = "window_mask"
    return found


def options_for(model: nn.Module, regions: Sequence[str], *, lean: bool, offload: bool = False) -> tuple[str, ...]:
    """Returns the options that make a difference somewhere in the model, `keep` first."""
    plain = ("keep", "recompute_plain", "offload_plain") if offload else ("keep", "recompute_plain")
    if not lean:
        return plain
    found = {"keep": lean_modules(model, dict.fromkeys(regions, "keep"))}
    for option in ("lean_attention", "lean"):
        modules = lean_modules(model, dict.fromkeys(regions, option))
        if modules not in found.values():
            found[option] = modules
    if len(found) == 1:
        return plain
    recomputed = {"lean_attention": "recompute", "lean": "recompute_lean"}
    again = [recomputed[option] for option in recomputed if option in found]
    return (*found, *again, *(["offload"] if offload else []))


def without_recompute(option: str) -> str:
    """Returns the option that does the same with a region but for running it again."""
    alike = dataclasses.replace(OPTIONS[option], recompute=False, meaning="")
    return next(name for name, other in OPTIONS.items() if dataclasses.replace(other, meaning="") == alike)


def twin(model: nn.Module) -> nn.Module:
    """Returns a copy of the module tree that shares every parameter and buffer: to lay a policy on for a trace."""
    memo: dict[int, object] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values(), *module.__dict__.values()):
            if isinstance(tensor, torch.Tensor):
                memo[id(tensor)] = tensor
    return copy.deepcopy(model, memo)


def _operator_for(module: nn.Module, operators: Sequence[str]) -> str | None:
    return next((name for name in operators if name in OPERATORS and OPERATORS[name].refusal(module) is None), None)
