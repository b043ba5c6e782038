"""`compose`: a recipe's name and some overrides in, one typed `RunConfig` out. Hydra stops here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from medckpt import allowance, profiles, search_path, typed
from medckpt.blocks import (
    DataConfig,
    DicomConfig,
    LossConfig,
    OptimizerConfig,
    SamplerConfig,
    SwinUnetrConfig,
    TrainerConfig,
    UnetrConfig,
)
from medckpt.errors import ConfigError, suggest
from medckpt.memory.profile import MemoryProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One whole run: what `config.yaml` in the run folder holds."""

    recipe: str
    model: SwinUnetrConfig | UnetrConfig
    data: DataConfig = field(default_factory=DataConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    memory: MemoryProfile = field(default_factory=MemoryProfile)
    activation_ckpt: Literal["none", "block", "all"] = "none"
    """Recompute in backward: nothing, every repeated block, or every block."""
    budget: str | int | None = None
    """Bytes that a training step may take on the device: 8GiB, auto (what it has), min (as little as can be). The
    fastest exact plan under it is applied; None plans nothing."""
    offload: bool = False
    """Whether a plan under a budget may keep what is saved for backward in host memory; for a GPU."""
    precision: Literal["auto", "32", "bf16-mixed", "16-mixed"] = "auto"
    """auto: bf16-mixed where the device computes in it, 32 elsewhere."""
    seed: int = 0
    output: str = "runs"
    """Folder in which the run folder is made."""

    def __post_init__(self) -> None:
        problems = self.model.patch_problems(self.sampler.patch_size)
        if self.budget is not None:
            problems += _budget_problems(self.budget, self.memory)
        if self.budget is not None and self.activation_ckpt != "none":
            problems.append(
                f"budget={self.budget}: the plan decides what is recomputed; leave activation_ckpt="
                f"{self.activation_ckpt} out."
            )
        if not 0 <= self.seed < 2**32:
            problems.append("seed: must lie in 0..2^32 - 1.")
        if problems:
            raise ConfigError("\n".join(problems))


def _budget_problems(budget: str | int, memory: MemoryProfile) -> list[str]:
    if budget == "auto":
        return []  # what the device has; a finished run is read where there is no such device
    try:
        allowance.read_budget(str(budget), memory)
    except ConfigError as error:
        return [str(error)]
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """A recipe put together for one machine."""

    config: RunConfig
    device: Literal["cpu", "cuda"]
    scaled: dict[str, tuple[Any, Any]]
    """What the recipe's `on_cpu` block changed: key -> (value on a GPU, value here)."""
    machine_words: tuple[str, ...] = ()
    """The overrides that did it; they go in front of the user's own words."""


def compose(recipe: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Returns the configuration of a recipe with `key=value` overrides, fitted to this machine.

    The same words as on the command line: `compose("swin_ct", ["trainer.max_steps=20", "data=/scans"])`.

    Raises:
        ConfigError: unknown recipe, key or choice, wrong type, or a broken rule; all that is wrong at once.
    """
    return compose_here(recipe, overrides).config


def compose_here(recipe: str, overrides: Sequence[str] = (), *, elsewhere: bool = False) -> Composed:
    """Like `compose`, and says what was scaled for this machine.

    With `elsewhere` the device that `memory` names need not be here, and the data may be left open (their path is then
    "none"): the recipe is fitted to that device.
    """
    words = normalize(overrides)
    plain = compose_plain(recipe, words, open_data=elsewhere)
    device = resolve_device(plain, elsewhere=elsewhere)
    on_cpu = _on_cpu(plain) if device == "cpu" else []
    if not on_cpu:
        return Composed(config=from_plain(plain), device=device, scaled={})
    fitted = compose_plain(recipe, [*on_cpu, *words], open_data=elsewhere)
    keys = [word.partition("=")[0] for word in on_cpu]
    changes = {key: (_lookup(plain, key), _lookup(fitted, key)) for key in keys}
    changes = {key: pair for key, pair in changes.items() if pair[0] != pair[1]}
    return Composed(config=from_plain(fitted), device=device, scaled=changes, machine_words=tuple(on_cpu))


def from_plain(plain: Mapping[str, Any]) -> RunConfig:
    """Returns plain settings (a composed recipe, or a run's config.yaml) as a `RunConfig`."""
    return typed.read(RunConfig, {key: value for key, value in plain.items() if key != "on_cpu"})


def compose_plain(recipe: str, words: Sequence[str], *, open_data: bool = False) -> dict[str, Any]:
    """Lets Hydra put a recipe together and returns its settings as plain dictionaries, with `on_cpu` still in.

    With `open_data` a recipe that leaves `data.path` open gets "none" there instead of a complaint.
    """
    import yaml
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    path = search_path.find_recipe(recipe)
    search_path.register()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(path.parent), version_base="1.3", job_name="medckpt"):
            composed = hydra_compose(config_name=path.stem, overrides=list(words))
        if open_data and "data" in composed and OmegaConf.is_missing(composed.data, "path"):
            composed.data.path = "none"
        plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except yaml.YAMLError as error:
        raise ConfigError(_explain_yaml(path, error)) from error
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
        raise ConfigError(explain(recipe, error)) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items() if key != "hydra"}


def normalize(words: Sequence[str]) -> list[str]:
    """Returns a user's `key=value` words as Hydra understands them.

    `data=PATH` means `data.path=PATH`; a value that Hydra's grammar refuses (spaces, commas in a path, a second
    equals sign) is quoted; a word that is not `key=value` at all is refused with the form it should have.

    Raises:
        ConfigError: not `key=value`, a block that is deleted or set to what is no choice, or `data=NAME` where NAME
            is both a choice and a folder here.
    """
    return [normal for word in words for normal in (_profile_words(word) or [_normalize(word)])]


def _profile_words(word: str) -> list[str]:
    """Returns what `memory=FILE.yaml` stands for: a word for each figure in the file; none for any other word."""
    key, _, value = word.partition("=")
    if key != "memory" or not (value.endswith((".yaml", ".yml")) or "/" in value):
        return []
    profile = profiles.read_profile(Path(value))
    figures = {k: v for k, v in typed.to_plain(profile).items() if k not in ("sources", "workspaces")}
    return ["memory=auto", *(f"++memory.{k}={_literal(v)}" for k, v in figures.items())]


def _normalize(word: str) -> str:
    key, equals, value = word.partition("=")
    if key.startswith("~"):
        if key[1:].partition("@")[0] in _blocks():
            raise ConfigError(
                f"{word}: a run needs this block; it cannot be deleted. Set its keys: {key[1:]}.KEY=VALUE."
            )
        _parse(word, word)
        return word
    if not equals or not key:
        raise _not_an_override(word)
    if key in ("data", "+data"):
        if value not in search_path.choices("data"):
            key = "data.path"
        elif Path(value).is_dir():
            raise ConfigError(
                f"data={value}: this is a choice of settings and also a folder here. For the folder write "
                f"data=./{value} (or data.path=./{value}); for the choice start in another folder."
            )
    if key in ("data.path", "output") and value.startswith("~"):
        value = str(Path(value).expanduser())
    if key == "data.path" and not value.startswith(("'", '"')):
        value = _quote(value)
    try:
        parsed = _parse(f"{key}={value}", word)
    except ConfigError:
        value = _quote(value)
        parsed = _parse(f"{key}={value}", word)
    if key in _blocks() and not parsed.is_sweep_override() and parsed.value() not in search_path.choices(key):
        raise ConfigError(f"{word}: there is no such choice. {suggest(value, search_path.choices(key))}")
    return f"{key}={value}"


def _blocks() -> list[str]:
    return sorted(path.name for path in search_path.configs_folder().iterdir() if path.is_dir())


def _not_an_override(word: str) -> ConfigError:
    return ConfigError(f"'{word}' is not an override. Write key=value, for example trainer.max_steps=100.")


def _parse(text: str, word: str) -> Any:
    """Returns Hydra's `Override` for `text`, or complains about the `word` that the user typed."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:  # the lexer's errors are not OverrideParseExceptions
        raise _not_an_override(word) from error


def _quote(value: str) -> str:
    # OmegaConf would read ${...} as an interpolation, and halves the backslashes in front of it.
    value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return "'" + re.sub(r"(\\+)(?='|$)", r"\1\1", value).replace("'", "\\'") + "'"


def resolve_device(plain: Mapping[str, Any], *, elsewhere: bool = False) -> Literal["cpu", "cuda"]:
    """Returns where a composed recipe will run: what `memory.device` says, or what this machine has.

    Raises:
        ConfigError: a GPU is asked for and there is none, unless `elsewhere` says that it need not be here.
    """
    memory = plain.get("memory") or {}
    wanted = memory.get("device", "auto")
    if wanted == "cpu" or (wanted == "cuda" and elsewhere):
        return "cpu" if wanted == "cpu" else "cuda"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        raise ConfigError(
            f"memory={memory.get('name', 'cuda')}: this is a CUDA device and torch sees none here. Train with "
            "memory=auto (or install a CUDA build); `medckpt plan` forecasts a step for devices that are elsewhere."
        )
    return "cpu"


def _on_cpu(plain: Mapping[str, Any]) -> list[str]:
    block = plain.get("on_cpu") or {}
    if not isinstance(block, Mapping):
        raise ConfigError("on_cpu: expected key: value pairs such as `model.feature_size: 12`.")
    # A recipe's sizes are for its own network: after `model=other` those that the other lacks do not apply.
    network = plain.get("model") or {}
    fits = {key: value for key, value in block.items() if not key.startswith("model.") or key[6:] in network}
    return [f"{key}={_literal(value)}" for key, value in fits.items()]


def _literal(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(map(_literal, value)) + "]"
    return _quote(value) if isinstance(value, str) else str(value)


def _lookup(plain: Mapping[str, Any], dotted: str) -> Any:
    value: Any = plain
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def explain(recipe: str, error: Exception) -> str:
    """Returns Hydra's complaint about a recipe in our words: the key, the closest match, the list."""
    from omegaconf import MissingMandatoryValue

    text = str(error)
    unknown = re.search(r"Key '([^']+)' is not in struct\s+full_key: (\S+)", text)
    if unknown:
        return f"{unknown.group(2)}: unknown key. {suggest(unknown.group(1), _siblings(unknown.group(2)))}"
    choice = re.search(r"Could not find '([^'/]+)/([^']+)'", text)
    if choice:
        group, name = choice.groups()
        return f"{group}={name}: there is no such choice. {suggest(name, search_path.choices(group))}"
    if isinstance(error, MissingMandatoryValue):
        key = str(error.full_key)
        way_out = "Say which data: data=PATH." if key == "data.path" else f"Give {key}=VALUE."
        return f"{key}: recipe {recipe} leaves it open. {way_out}"
    group_key = re.search(r"Could not override '([^']+)'", text)
    if group_key:
        name = group_key.group(1)
        return f"{name}: unknown key. {suggest(name.rpartition('.')[2], _siblings(name))}"
    return f"recipe={recipe}: {text.splitlines()[0] if text else type(error).__name__}"


def _siblings(dotted: str) -> list[str]:
    """Returns the keys that could stand where the last part of `dotted` stands."""
    import dataclasses

    networks = (SwinUnetrConfig, UnetrConfig)
    blocks: dict[str, tuple[type, ...]] = {"": (RunConfig,), "model": networks, "memory": (MemoryProfile,)}
    for block in (DataConfig, SamplerConfig, LossConfig, OptimizerConfig, TrainerConfig):
        blocks[block.__name__.removesuffix("Config").lower()] = (block,)
    blocks["data.dicom"] = (DicomConfig,)
    parent = dotted.rpartition(".")[0]
    return sorted({item.name for kind in blocks.get(parent, (RunConfig,)) for item in dataclasses.fields(kind)})


def _explain_yaml(recipe: Path, error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"{mark.name}, line {mark.line + 1}" if mark else str(recipe)
    problem = getattr(error, "problem", None) or str(error)
    return f"{where}: this is not YAML ({problem}). Indent with spaces, never tabs; every line is key: value."


def is_sweep(word: str) -> bool:
    """Says whether a normalised `key=value` word asks for several runs (`seed=0,1,2`)."""
    return bool(_parse(word, word).is_sweep_override())


def expand_sweep(word: str) -> list[str]:
    """Returns the `key=value` words that a normalised sweep word stands for, one per value.

    Raises:
        ConfigError: the word names no values that could be listed, such as `interval(0,1)`.
    """
    from hydra.core.override_parser.types import Glob

    parsed = _parse(word, word)
    key, values = parsed.get_key_element(), parsed.value()
    if isinstance(values, Glob):
        found = values.filter(search_path.choices(key))
    elif parsed.is_discrete_sweep():
        found = list(parsed.sweep_string_iterator())
    else:
        found = []
    if not found:
        raise ConfigError(f"{word}: a sweep needs values, for example {key}=1,2,3.")
    return [f"{key}={value}" for value in found]


def check_sweep(recipe: str, words: Sequence[str]) -> None:
    """Composes every value of every sweep once (beside the first value of the others).

    Raises:
        ConfigError: as `compose`.
    """
    expanded = [expand_sweep(word) if is_sweep(word) else [word] for word in words]
    first = [values[0] for values in expanded]
    compose_here(recipe, first)
    for index, values in enumerate(expanded):
        for value in values[1:]:
            compose_here(recipe, [*first[:index], value, *first[index + 1 :]])


def change(plain: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Returns the settings of a run with `key=value` words put in; groups and sweeps have no meaning here."""
    import copy

    from omegaconf import OmegaConf

    changed = copy.deepcopy(plain)
    for word in normalize(words):
        parsed = _parse(word, word)
        if parsed.is_sweep_override() or parsed.is_delete():
            raise ConfigError(f"{word}: a resumed run takes one value per key.")
        *parents, last = parsed.key_or_group.split(".")
        block: Any = changed
        for parent in parents:
            block = block.setdefault(parent, {})
            if not isinstance(block, dict):
                raise ConfigError(f"{word}: {parent} is not a block of settings.")
        value = OmegaConf.to_container(OmegaConf.create({"value": parsed.value()}), resolve=True)
        block[last] = value["value"]  # type: ignore[index,call-overload]
    return changed
