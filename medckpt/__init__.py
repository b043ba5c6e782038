"""Train 3D ViT, Swin-UNETR and MAE models on CT and MR that do not fit your GPU.

The public names are in `__all__`; each is loaded when it is first used, so importing medckpt costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medckpt.config import RunConfig as RunConfig
    from medckpt.config import compose as compose
    from medckpt.errors import InfeasibleBudget as InfeasibleBudget
    from medckpt.errors import MedckptError as MedckptError
    from medckpt.fitting import apply as apply
    from medckpt.fitting import bind as bind
    from medckpt.fitting import plan as plan
    from medckpt.fitting import remove as remove
    from medckpt.fitting import verify as verify
    from medckpt.forecasting import Forecast as Forecast
    from medckpt.forecasting import forecast as forecast
    from medckpt.memory.apply import apply_recompute as apply_recompute
    from medckpt.memory.apply import undo as undo
    from medckpt.memory.plan import MemoryPlan as MemoryPlan
    from medckpt.memory.profile import MemoryProfile as MemoryProfile
    from medckpt.memory.regions import find_regions as find_regions
    from medckpt.run import evaluate as evaluate
    from medckpt.run import predict as predict
    from medckpt.run import train as train

_HOMES = {
    "Forecast": "medckpt.forecasting",
    "InfeasibleBudget": "medckpt.errors",
    "MedckptError": "medckpt.errors",
    "MemoryPlan": "medckpt.memory.plan",
    "MemoryProfile": "medckpt.memory.profile",
    "RunConfig": "medckpt.config",
    "apply": "medckpt.fitting",
    "apply_recompute": "medckpt.memory.apply",
    "bind": "medckpt.fitting",
    "compose": "medckpt.config",
    "evaluate": "medckpt.run",
    "find_regions": "medckpt.memory.regions",
    "forecast": "medckpt.forecasting",
    "plan": "medckpt.fitting",
    "predict": "medckpt.run",
    "remove": "medckpt.fitting",
    "train": "medckpt.run",
    "undo": "medckpt.memory.apply",
    "verify": "medckpt.fitting",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'medckpt' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
