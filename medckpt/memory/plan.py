"""A memory plan: what is done with each region of a model so that its step fits, and what that was foreseen to take."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from medckpt.errors import ConfigError, size, suggest
from medckpt.files import write_json
from medckpt.memory.options import OPTIONS

_VERSION = 1
Times = Literal["measured", "profile", "nominal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPlan:
    """One region's option, and its share of the step's time."""

    name: str
    option: str
    ms: float
    """Forward and backward together, its recompute included."""
    plain_ms: float
    """The same as the model is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Which option each region has, whether the tail runs per sample, and in how many micro-batches the step runs."""

    regions: tuple[RegionPlan, ...]
    tail: bool
    """Whether the full-resolution end of the network runs one sample at a time, its gradient taken in forward."""
    micro_batches: int
    predicted_peak_bytes: int
    """What the exact simulation of the planned step gives; counts as `Forecast.peak_bytes`."""
    predicted_step_ms: float
    plain_peak_bytes: int
    """The same of the model as it is."""
    plain_step_ms: float
    budget_bytes: int
    memory: str
    """Name of the memory profile."""
    samples: int
    """Samples per step."""
    inputs: str
    """Their dtypes and shapes."""
    precision: str
    times: Times
    """Where times come from: real steps on this machine, a roofline of the memory profile, or one of nominal rates,
    which is good for comparison alone."""
    key: str
    """Of the model and torch's version: a plan is applied to what it was made for."""

    @property
    def choices(self) -> dict[str, str]:
        """Region -> option."""
        return {region.name: region.option for region in self.regions}

    def table(self) -> str:
        """Returns the plan as text: regions that were treated alike in one line."""
        lines = [self.summary()]
        rows = [(_family(r.name), r.option, r.ms, r.plain_ms) for r in self.regions]
        counts = Counter((family, option) for family, option, _, _ in rows)
        timed = self.times != "nominal"
        heads = f" {'ms':>9} {'plain':>9}" if timed else ""
        lines.append(f"  {'regions':<32} {'count':>5}  {'option':<16}{heads}")
        for (family, option), count in counts.items():
            ms = sum(row[2] for row in rows if row[:2] == (family, option))
            plain = sum(row[3] for row in rows if row[:2] == (family, option))
            figures = f" {ms:>9.2f} {plain:>9.2f}" if timed else ""
            lines.append(f"  {family:<32} {count:>5}  {option:<16}{figures}".rstrip())
        return "\n".join(lines)

    def summary(self) -> str:
        """Returns what the plan gives, in one line."""
        levers = [f"{count} x {option}" for option, count in Counter(self.choices.values()).items()]
        levers += ["per-sample tail"] if self.tail else []
        levers += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        ratio = self.predicted_step_ms / self.plain_step_ms if self.plain_step_ms else 1.0
        time = f", step {self.predicted_step_ms:.1f} ms ({ratio:.2f}x plain)" if self.times != "nominal" else ""
        peaks = f"peak {size(self.predicted_peak_bytes)} (plain {size(self.plain_peak_bytes)})"
        return f"{peaks}{time}: {', '.join(levers)}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan, fit for JSON: a time that is not known is None."""
        plain = {"version": _VERSION, **dataclasses.asdict(self)}
        if self.times == "nominal":
            plain |= {"predicted_step_ms": None, "plain_step_ms": None}
            plain["regions"] = [region | {"ms": None, "plain_ms": None} for region in plain["regions"]]
        return {key: _without_nan(value) for key, value in plain.items()}

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, whole or not at all."""
        write_json(Path(path), self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> MemoryPlan:
        """Reads a plan.

        Raises:
            ConfigError: the file is missing, is no plan, is of another version, or holds what no plan can be.
        """
        try:
            read = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: cannot be read as a memory plan ({error}).") from error
        return _from_dict(read, str(path))


def model_key(model: nn.Module) -> str:
    """Returns a digest of a model's structure, its parameters' shapes and dtypes, and torch's version."""
    facts: list[object] = [".".join(torch.__version__.split(".")[:2])]
    facts += [(name, type(module).__name__) for name, module in model.named_modules()]
    facts += [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def shapes_of(inputs: Any) -> str:
    """Returns dtypes and shapes of all tensors in `inputs`, as text."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)


def _from_dict(read: Any, where: str) -> MemoryPlan:
    fields = {field.name: field for field in dataclasses.fields(MemoryPlan)}
    if not isinstance(read, dict) or read.get("version") != _VERSION:
        found = read.get("version") if isinstance(read, dict) else None
        raise ConfigError(f"{where}: is no memory plan of version {_VERSION} (version: {found}). Plan again.")
    given = {name: value for name, value in read.items() if name != "version"}
    for name in given:
        if name not in fields:
            raise ConfigError(f"{where}: '{name}' is no part of a memory plan. {suggest(name, fields)}")
    missing = sorted(fields.keys() - given.keys())
    if missing:
        raise ConfigError(f"{where}: '{missing[0]}' is missing in the memory plan. Plan again.")
    if not isinstance(given["regions"], list):
        raise ConfigError(f"{where}: 'regions' must be a list, not {given['regions']!r:.60}.")
    given["regions"] = tuple(_region(region, f"{where}: regions[{i}]") for i, region in enumerate(given["regions"]))
    names = [region.name for region in given["regions"]]
    if len(set(names)) < len(names):
        raise ConfigError(f"{where}: 'regions' names '{max(names, key=names.count)}' twice.")
    for name in fields.keys() - {"regions"}:
        given[name] = _checked(given[name], str(fields[name].type), f"{where}: '{name}'", least=name in _FROM_ONE)
        if given[name] == "":
            raise ConfigError(f"{where}: '{name}' must not be empty.")
    if given["samples"] % given["micro_batches"]:
        raise ConfigError(
            f"{where}: 'micro_batches' ({given['micro_batches']}) does not divide 'samples' ({given['samples']})."
        )
    return MemoryPlan(**given)


_FROM_ONE = ("micro_batches", "samples")


def _region(read: Any, where: str) -> RegionPlan:
    fields = {field.name: str(field.type) for field in dataclasses.fields(RegionPlan)}
    if not isinstance(read, dict) or read.keys() != fields.keys():
        raise ConfigError(f"{where}: must have {', '.join(fields)} and nothing else, not {read!r:.80}.")
    region = RegionPlan(**{name: _checked(read[name], kind, f"{where}.{name}") for name, kind in fields.items()})
    if region.option not in OPTIONS:
        raise ConfigError(f"{where}.option: '{region.option}' is no option. {suggest(region.option, OPTIONS)}")
    return region


def _checked(value: Any, kind: str, where: str, *, least: bool = False) -> Any:
    """Returns a value of a plan's file; a number is not below 0 (`least`: 1), and None is a time that is not known."""
    if kind == "float" and value is None:
        return math.nan
    if kind == "Times":
        if value not in get_args(Times):
            raise ConfigError(f"{where}: '{value}' is not a choice. {suggest(str(value), get_args(Times))}")
        return value
    kinds: dict[str, Any] = {"int": int, "float": (int, float), "str": str, "bool": bool}
    if not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "bool"):
        raise ConfigError(f"{where} must be of type {kind}, not {value!r:.60}.")
    if kind in ("int", "float") and not least <= value < math.inf:
        raise ConfigError(f"{where} must be a number from {int(least)} on, not {value!r}.")
    return value


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is no number")


def _without_nan(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _without_nan(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_without_nan(value) for value in tree]
    return None if isinstance(tree, float) and math.isnan(tree) else tree


def _family(name: str) -> str:
    """Returns a region's name with numbers left open: the blocks of one kind share it."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
