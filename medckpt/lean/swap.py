"""Puts lean operators into a model, and takes them away: from outside, as recompute (`memory/apply.py`).

Both may be applied to one model in either order. Where both are on one module, the operator runs inside the recompute.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from torch import nn

from medckpt.errors import ConfigError, suggest
from medckpt.lean.forward import LeanForward, laid_on
from medckpt.lean.mlp import LeanMLP
from medckpt.lean.norm_act import LeanNormAct
from medckpt.lean.self_attention import LeanSelfAttention
from medckpt.lean.swin_layer import LeanSwinLayer
from medckpt.lean.transformer_block import LeanTransformerBlock
from medckpt.lean.window_attention import LabelledWindowAttention, LeanWindowAttention

OPERATORS: dict[str, type[LeanForward]] = {
    kind.operator: kind
    for kind in (
        LeanTransformerBlock, LeanSelfAttention, LeanMLP, LeanNormAct, LeanWindowAttention, LabelledWindowAttention,
        LeanSwinLayer,
    )
}  # fmt: skip
"""Every operator by its name."""
LABELLED = LabelledWindowAttention.operator
"""It saves nothing by itself, and is not found."""


def find_lean(model: nn.Module) -> dict[str, str]:
    """Returns the operator per module name, for each module that one can stand in for, in module order.

    Of nested modules the outermost is named, except inside of those whose operator lets others in ("swin_layer").
    Modules that have an operator already are left out.
    """
    found: dict[str, str] = {}
    taken: set[nn.Module] = set()
    kinds = {key: kind for key, kind in OPERATORS.items() if key != LABELLED}
    for name, module in model.named_modules():
        if module in taken:
            continue
        present: type[LeanForward] | LeanForward | None = _operator_of(module)
        if present is None:
            operator = next((key for key, kind in kinds.items() if _refusal(module, kind) is None), None)
            if operator is None:
                continue
            found[name] = operator
            present = kinds[operator]
        if not present.holds_others:
            taken.update(module.modules())
    return found


def apply_lean(model: nn.Module, operators: Mapping[str, str] | None = None) -> nn.Module:
    """Lets lean operators compute modules of `model` while gradients are on; in place, and all or nothing.

    Parameters, state-dict keys, classes, hooks, copying and pickling stay as they are. With gradients off the modules
    run as before. Wrap with DDP afterwards.

    Args:
        model: any module tree.
        operators: operator per module name, as `find_lean` returns them; None takes all of these.

    Returns:
        `model` itself.

    Raises:
        ConfigError: a module or an operator of that name does not exist; the operator cannot stand in for the module;
            the module, or one around or inside of it, has an operator already or is named as well (inside of a
            "swin_layer" others may be).
    """
    wanted = find_lean(model) if operators is None else dict(operators)
    modules = _resolve(model, wanted)
    for module, name in modules.items():
        _refuse_unfit(name, module, wanted[name])
    for module, name in modules.items():
        kind = OPERATORS[wanted[name]]
        recompute = _innermost(module)
        if recompute is None:
            module.__dict__["forward"] = kind(module)
        else:
            recompute.inner = kind(module)
    return model


def undo_lean(model: nn.Module) -> nn.Module:
    """Takes all lean operators away from `model`, in place, and returns it; recompute stays."""
    for module in model.modules():
        recompute = _innermost(module)
        if _operator_of(module) is None:
            continue
        if recompute is None:
            del module.__dict__["forward"]
        else:
            recompute.inner = None
    return model


def applied_lean(model: nn.Module) -> dict[str, str]:
    """Returns the operator per module name; it is read from the model, so copies and loads keep it."""
    found = {name: _operator_of(module) for name, module in model.named_modules()}
    return {name: lean.operator for name, lean in found.items() if lean is not None}


def _operator_of(module: nn.Module) -> LeanForward | None:
    return next((forward for forward in laid_on(module) if isinstance(forward, LeanForward)), None)


def _innermost(module: nn.Module) -> Any:
    """Returns the innermost recompute on a module, None if there is none."""
    outer = [f for f in laid_on(module) if not isinstance(f, LeanForward) and hasattr(f, "inner")]
    return outer[-1] if outer else None


def _refusal(module: nn.Module, kind: type[LeanForward]) -> str | None:
    try:
        reason = kind.refusal(module)
    except AttributeError as error:  # another release of MONAI may have other attributes
        return f"it is not as expected ({error})"
    if reason is None and any(not hasattr(forward, "inner") for forward in laid_on(module)):
        return "it has a forward of its own, which would not run"
    return reason


def _resolve(model: nn.Module, wanted: Mapping[str, str]) -> dict[nn.Module, str]:
    """Returns the names by module; raises on unknown, double and nested ones."""
    known = dict(model.named_modules(remove_duplicate=False))
    names: dict[nn.Module, str] = {}
    for name, operator in wanted.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3) or find_lean(model)
            raise ConfigError(f"Lean: the model has no module '{name}'. {suggest(name, near)}")
        if operator not in OPERATORS:
            raise ConfigError(f"Lean: '{operator}' for '{name}' is no operator. {suggest(operator, OPERATORS)}")
        if known[name] in names:
            raise ConfigError(f"Lean: '{name}' and '{names[known[name]]}' are the same module. Name it once.")
        names[known[name]] = name
    operators = {module: OPERATORS[wanted[name]] for module, name in names.items()}
    present = {module: name for name, module in known.items() if _operator_of(module) is not None}
    closed = {module: set(module.modules()) for module in names if not operators[module].holds_others}
    closed |= {module: set(module.modules()) for module in present if not _operator_of(module).holds_others}  # type: ignore[union-attr]
    for module, name in names.items():
        if module in present:
            raise ConfigError(f"Lean: '{name}' has an operator already. Call undo_lean(model) first.")
        for other, at in (*names.items(), *present.items()):
            if other is not module and (other in closed.get(module, ()) or module in closed.get(other, ())):
                raise ConfigError(
                    f"Lean: of '{name}' and '{at}' one lies inside the other, and the outer operator does the work of "
                    "both. Keep one of the two."
                )
    return names


def _refuse_unfit(name: str, module: nn.Module, operator: str) -> None:
    reason = _refusal(module, OPERATORS[operator])
    if reason is not None:
        fits = [key for key, kind in OPERATORS.items() if key != LABELLED and _refusal(module, kind) is None]
        way_out = f"'{fits[0]}' fits it." if fits else "Leave it out."
        raise ConfigError(
            f"Lean: '{operator}' cannot stand in for '{name}' ({type(module).__name__}): {reason}. {way_out}"
        )
