"""Plain mappings to frozen dataclasses, strictly: every unknown key and wrong type is named, all at once.

Used wherever outside text becomes a value: recipes, run folders, data set files. The accepted annotations are
`bool`, `int`, `float`, `str`, `Literal[...]`, `X | None`, `tuple[X, ...]`, `tuple[X, Y, Z]`, `dict[str, X]` and
other dataclasses. An `int` is accepted for a `float`; a number for the `Literal` text it
spells; nothing else is converted.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from medckpt.errors import ConfigError, suggest

T = TypeVar("T")


def read(kind: type[T], data: Mapping[str, Any], where: str = "") -> T:
    """Returns `data` as the dataclass `kind`; `where` is the key in front of every name in a message.

    Raises:
        ConfigError: one message with every unknown key, missing key, wrong type and broken rule.
    """
    problems: list[str] = []
    value = _read_dataclass(kind, data, where, problems)
    if problems:
        raise ConfigError("\n".join(problems))
    return value


def read_yaml(text: str, where: str) -> Any:
    """Returns what YAML text holds, as `yaml.safe_load` does, which would keep the last of two equal keys in silence.

    Raises:
        ConfigError: a key is there twice in one mapping; `where` (the file) stands in front.
        yaml.YAMLError: it is not YAML.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            lines: dict[Any, int] = {}
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue
                line = key.start_mark.line + 1
                if key.value != "<<" and lines.setdefault(key.value, line) != line:
                    raise ConfigError(
                        f"{where}, line {line}: the key '{key.value}' is there already, in line {lines[key.value]}. "
                        "Keep one of the two."
                    )
            return super().construct_mapping(node, deep)

    return yaml.load(text, Loader)


def to_plain(value: Any) -> Any:
    """Returns a dataclass (or a tuple or dict of them) as lists, dicts and scalars, fit for YAML or JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _read_dataclass(kind: Any, data: Any, where: str, problems: list[str]) -> Any:
    if not isinstance(data, Mapping):
        problems.append(f"{where or 'configuration'}: expected keys and values, got {_show(data)}.")
        return None
    fields = {field.name: field for field in dataclasses.fields(kind)}
    before = len(problems)
    problems += [f"{_join(where, key)}: unknown key. {suggest(str(key), fields)}" for key in data if key not in fields]
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _convert(_hints(kind)[name], data[name], _join(where, name), problems)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(f"{_join(where, name)}: missing, and it has no default.")
    if len(problems) > before:
        return None
    try:
        return kind(**values)
    except ConfigError as error:  # a rule across fields, checked in __post_init__
        problems += [f"{where}.{line}" if where else line for line in str(error).splitlines()]
        return None


def _convert(kind: Any, value: Any, where: str, problems: list[str]) -> Any:
    origin = get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, where, problems)
    if origin in (types.UnionType, Union):
        return _convert_union(get_args(kind), value, where, problems)
    if origin is Literal:
        # `precision=32` reaches us as a number; the choice is the text.
        same = [choice for choice in get_args(kind) if str(choice) == str(value)]
        if not same or isinstance(value, bool):
            problems.append(f"{where}: {_show(value)} is not a choice. {suggest(str(value), map(str, get_args(kind)))}")
            return None
        return same[0]
    if origin is tuple:
        return _convert_tuple(get_args(kind), value, where, problems)
    if origin is dict:
        if not isinstance(value, Mapping):
            problems.append(f"{where}: expected keys and values, got {_show(value)}.")
            return None
        return {str(key): _convert(get_args(kind)[1], item, _join(where, key), problems) for key, item in value.items()}
    if kind is Any or _is_scalar(kind, value):
        return float(value) if kind is float else value
    problems.append(f"{where}: expected {_name(kind)}, got {_show(value)}.")
    return None


def _convert_union(kinds: tuple[Any, ...], value: Any, where: str, problems: list[str]) -> Any:
    if value is None and type(None) in kinds:
        return None
    if isinstance(value, Mapping) and (blocks := _by_name(kinds)):
        name = value.get("name")
        if name in blocks:
            return _read_dataclass(blocks[name], value, where, problems)
        problems.append(f"{_join(where, 'name')}: {_show(name)} is not a choice. {suggest(str(name), blocks)}")
        return None
    first: list[str] = []
    for kind in kinds:
        if kind is type(None):
            continue
        found: list[str] = []
        result = _convert(kind, value, where, found)
        if not found:
            return result
        first = first or found
    if len([kind for kind in kinds if kind is not type(None)]) == 1:
        problems += first
    else:
        problems.append(f"{where}: expected {' or '.join(map(_name, kinds))}, got {_show(value)}.")
    return None


def _by_name(kinds: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the dataclasses of a union by the default of their `name` field, the one that tells them apart."""
    fields = {kind: dataclasses.fields(kind) for kind in kinds if dataclasses.is_dataclass(kind)}
    return {str(field.default): kind for kind, own in fields.items() for field in own if field.name == "name"}


def _convert_tuple(kinds: tuple[Any, ...], value: Any, where: str, problems: list[str]) -> Any:
    if not isinstance(value, list | tuple):
        problems.append(f"{where}: expected a list, got {_show(value)}. Write it as [a,b,c].")
        return None
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        problems.append(f"{where}: expected {len(kinds)} values, got {len(value)}: {_show(value)}.")
        return None
    pairs = enumerate(zip(kinds, value, strict=True))
    return tuple(_convert(kind, item, f"{where}[{index}]", problems) for index, (kind, item) in pairs)


def _is_scalar(kind: Any, value: Any) -> bool:
    if isinstance(value, bool):  # bool is an int in Python, but `true` steps are a mistake
        return kind is bool
    return isinstance(value, int | float) if kind is float else isinstance(kind, type) and isinstance(value, kind)


def _join(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def _name(kind: Any) -> str:
    if kind is type(None):
        return "null"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return names.get(kind) or getattr(kind, "__name__", str(kind)).replace("tuple", "a list")


def _show(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"
