"""What people do without a planner: policies that look at names and numbers of blocks, to compare a plan with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

from torch import nn

from medckpt.errors import ConfigError, suggest
from medckpt.lean.swap import OPERATORS
from medckpt.memory.options import twin
from medckpt.memory.regions import find_regions

Baseline = Literal["none", "block", "all", "sqrt", "log", "every-2", "every-3", "selective"]


def baseline(model: nn.Module, name: str) -> dict[str, str]:
    """Returns region -> option of a baseline; regions that it leaves alone may be missing.

    * `none` keeps all; `all` recomputes every block, `block` those whose kind repeats (`find_regions`).
    * `sqrt` keeps every block number round(sqrt(n)) of n and recomputes the others (Chen et al. 2016,
      arXiv:1604.06174, with blocks as units: a recomputed block's input is what is kept); `log` keeps blocks 1, 2, 4,
      8, ...; `every-k` keeps every k-th.
    * `selective` recomputes the attention modules alone (Korthikanti et al. 2022, arXiv:2205.05198).

    The network's own flag (MONAI's `use_checkpoint`) is no choice of regions: see `with_own_flag`.

    Raises:
        ConfigError: the name is not known, or the network has nothing that the baseline is about.
    """
    if name not in get_args(Baseline):
        raise ConfigError(f"policy: '{name}' is no baseline. {suggest(name, get_args(Baseline))}")
    regions = find_regions(model, "all")
    if name == "none":
        return dict.fromkeys(regions, "keep")
    if name in ("block", "all"):
        return dict.fromkeys(find_regions(model, name), "recompute_plain")  # type: ignore[arg-type]
    if name == "selective":
        return dict.fromkeys(_found(_attention(model), name, "attention that is known"), "recompute_plain")
    kept = _kept(len(regions), name)
    return {region: "keep" if number in kept else "recompute_plain" for number, region in enumerate(regions)}


def with_own_flag(model: nn.Module) -> nn.Module | None:
    """Returns a twin of `model` whose own recompute is on (MONAI's `use_checkpoint`), or None if it has none."""
    net = twin(model)
    flagged = [module for module in net.modules() if getattr(module, "use_checkpoint", None) is False]
    for module in flagged:
        module.use_checkpoint = True  # type: ignore[assignment]
    return net if flagged else None


def _kept(count: int, name: str) -> set[int]:
    if name == "log":
        return {2**power - 1 for power in range(count.bit_length())}
    step = max(round(math.sqrt(count)), 1) if name == "sqrt" else int(name.removeprefix("every-"))
    return set(range(step - 1, count, step))


def _attention(model: nn.Module) -> list[str]:
    kinds = [OPERATORS[name] for name in ("window_attention", "self_attention") if name in OPERATORS]
    return [name for name, module in model.named_modules() if any(kind.refusal(module) is None for kind in kinds)]


def _found(names: Sequence[str], baseline: str, what: str) -> Sequence[str]:
    if not names:
        raise ConfigError(f"policy={baseline}: this network has no {what}.")
    return names
