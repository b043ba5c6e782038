"""Memory profiles from files and from this machine: find, read, resolve, measure, save."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from medckpt import machine, search_path, typed
from medckpt.errors import ConfigError, suggest
from medckpt.files import write_text
from medckpt.memory.profile import MemoryProfile

Device = Literal["auto", "cpu", "cuda"]
Progress = Callable[[str, int, int], None]
"""Called with what is measured next, how many measurements are done, and how many there are."""

_SAME_CAPACITY = 0.1
"""Drivers, ECC and Windows change the capacity of one and the same card by up to 9 %; a MIG slice is far below."""
_MIB = 2**20
_GENERIC_CONTEXT = (100 * _MIB, 768 * _MIB)
"""From the lowest to the highest of the shipped profiles."""


def profile_names() -> list[str]:
    """Returns the shipped profiles by name, sorted; `auto` and `cpu` are among them."""
    return search_path.choices("memory")


def load_profile(memory: str | Path | MemoryProfile) -> MemoryProfile:
    """Returns a memory profile that can be forecast with.

    Args:
        memory: a shipped profile's name (`"a100_40gb"`), the path of a YAML file, or a profile. One that leaves its
            capacity open (`"auto"`, `"cpu"`) is completed with what this machine has; its own figures stay.

    Returns:
        A profile with `device` "cpu" or "cuda" and a capacity.

    Raises:
        ConfigError: no such name (with the closest one and the list) or file, not YAML, an unknown key, a wrong type
            or a broken rule (all at once), or a GPU without a capacity where there is no GPU to ask.
    """
    if isinstance(memory, MemoryProfile):
        return _complete(memory)
    text = str(memory)
    if isinstance(memory, Path) or text.endswith((".yaml", ".yml")) or "/" in text or os.sep in text:
        return _complete(read_profile(Path(memory)))
    if text not in profile_names():
        raise ConfigError(
            f"memory={text}: there is no such memory profile. {suggest(text, profile_names())} "
            f"A profile of your own goes by its path: memory=./{text}.yaml (`medckpt profile` writes one)."
        )
    return _complete(read_profile(search_path.configs_folder() / "memory" / f"{text}.yaml"))


def read_profile(path: Path) -> MemoryProfile:
    """Returns the profile in a YAML file as it stands there, read strictly.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or does not hold a profile; the file and key are named.
    """
    import yaml

    try:
        plain: Any = typed.read_yaml(path.expanduser().read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{path}: the memory profile cannot be read ({reason}). Give a shipped one by its name "
            f"({', '.join(profile_names())}), or the path of a YAML file."
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: this is not YAML. Every line is key: value.") from error
    try:
        return typed.read(MemoryProfile, plain)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from error


def unverified(profile: MemoryProfile) -> tuple[str, ...]:
    """Returns the figures of a profile that its own sources call not verified, in the order of its fields."""
    names = [item.name for item in dataclasses.fields(profile)]
    return tuple(name for name in names if "not verified" in profile.sources.get(name, ""))


def save_profile(profile: MemoryProfile, path: Path) -> None:
    """Writes a profile as YAML, atomically; an existing file is replaced. `load_profile(path)` gives it back.

    Raises:
        DataError: the file cannot be written.
    """
    import yaml

    plain = {key: value for key, value in typed.to_plain(profile).items() if value not in (None, "", [], {})}
    header = f"# {profile.title or profile.name}\n"
    if profile.measured:
        header = f"# Measured by `medckpt profile`: {profile.measured}.\n"
    # Intervals on one line, the long sources one a line.
    tail = {key: plain.pop(key) for key in ("workspaces", "sources") if key in plain}
    body = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, default_flow_style=None, width=118)
    body += (
        yaml.safe_dump(tail, sort_keys=False, allow_unicode=True, default_flow_style=False, width=118) if tail else ""
    )
    write_text(path, header + body)


def this_machine(device: Device = "auto") -> MemoryProfile:
    """Returns the profile of this machine's first GPU, or of its CPU; its capacity is the real one, in bytes.

    A GPU of which a profile is shipped has that one's figures. Of another GPU torch knows the capacity only, and the
    title says so. Of a CPU only the capacity is known without measuring: the memory of the machine, or the limit of the
    container if it is lower.

    Raises:
        ConfigError: `device` is "cuda" and torch sees no GPU.
    """
    import torch

    if device != "cpu" and torch.cuda.is_available():
        index = torch.cuda.current_device()
        return _of_gpu(torch.cuda.get_device_name(index), torch.cuda.get_device_properties(index).total_memory)
    if device == "cuda":
        raise ConfigError(
            "memory: this profile leaves capacity_bytes open and torch sees no CUDA GPU here that could be asked. "
            f"Give the capacity, or take a card's profile: {', '.join(profile_names())}."
        )
    sources = {"capacity_bytes": "this machine's memory, or its container's limit"}
    return MemoryProfile(name="cpu", device="cpu", title=cpu_name(), capacity_bytes=ram_bytes(), sources=sources)


def profile_machine(output: Path | None = None, progress: Progress | None = None) -> tuple[MemoryProfile, Path]:
    """Measures this machine's GPU, or its CPU where there is none, and writes the profile: the verb `profile`.

    Args:
        output: file (.yaml) to write, or a folder for it; by default a file here, named by GPU or host.
        progress: called before each measurement.

    Returns:
        The profile and its file. About 10 s on two cores, up to a minute on a GPU.

    Raises:
        ConfigError: the file exists (nothing is measured then), or is not named .yaml.
        DataError: it cannot be written.
    """
    import torch

    from medckpt.memory.calibrate import measure_profile

    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    path = _new_file(output, torch.cuda.get_device_name() if device == "cuda" else platform.node() or "cpu")
    machine.prepare_machine(device)  # as training sets it: threads, allocator
    known = this_machine(device)
    measured = measure_profile(device, progress=progress)
    # What the device is called and holds is asked, not measured.
    profile = dataclasses.replace(
        measured,
        name=path.stem,
        title=known.title,
        device_names=known.device_names,
        capacity_bytes=known.capacity_bytes,
        sources={**known.sources, **measured.sources},
    )
    save_profile(profile, path)
    return profile, path


def ram_bytes() -> int:
    """Returns the memory this process may use: the machine's, or the lowest limit of the control groups it is in."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *_cgroup_limits()])


def cpu_name() -> str:
    """Returns the processor as its maker calls it, where the system tells; else its architecture."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(errors="replace"), re.MULTILINE)
        if found:
            return found.group(1).strip()
    return platform.processor() or platform.machine() or "CPU"


def _cgroup_limits() -> list[int]:
    own = Path("/proc/self/cgroup")
    lines = own.read_text().splitlines() if own.is_file() else []
    files = [Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]  # version 1
    for group in (line[3:] for line in lines if line.startswith("0::")):
        folder = Path("/sys/fs/cgroup") / group.lstrip("/")
        files += [place / "memory.max" for place in (folder, *folder.parents) if place.is_relative_to("/sys/fs/cgroup")]
    limits = (_read_limit(file) for file in files)
    return [limit for limit in limits if limit]


def _read_limit(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" is no limit


def _complete(profile: MemoryProfile) -> MemoryProfile:
    if profile.capacity_bytes is not None and profile.device != "auto":
        return profile
    here = this_machine(profile.device)
    default = MemoryProfile()
    own = {
        item.name: getattr(profile, item.name)
        for item in dataclasses.fields(profile)
        if item.name not in ("device", "title", "sources")
        and getattr(profile, item.name) != getattr(default, item.name)
    }
    return dataclasses.replace(here, **own, sources={**here.sources, **profile.sources})


def _of_gpu(name: str, capacity_bytes: int) -> MemoryProfile:
    """Returns the shipped profile of the card that torch calls `name`, with its real capacity, or a bare one."""
    source = {"capacity_bytes": "torch.cuda.get_device_properties on this machine"}
    for choice in profile_names():
        card = read_profile(search_path.configs_folder() / "memory" / f"{choice}.yaml")
        spelled = name.casefold() in [spelling.casefold() for spelling in card.device_names]
        if spelled and card.capacity_bytes and abs(capacity_bytes / card.capacity_bytes - 1) <= _SAME_CAPACITY:
            other = "pcie" in name.casefold() and "pcie" not in card.device_names[0].casefold()
            return dataclasses.replace(
                card,
                title=f"{name} (with the figures of {card.title})" if other else card.title,
                capacity_bytes=capacity_bytes,
                sources={**card.sources, **source},
            )
    return MemoryProfile(
        name="cuda",
        device="cuda",
        title=f"{name} (no profile of this card: capacity only; `medckpt profile` measures it)",
        device_names=(name,),
        capacity_bytes=capacity_bytes,
        context_bytes=_GENERIC_CONTEXT,
        sources={**source, "context_bytes": "the range of the shipped profiles, not this card's"},
    )


def _new_file(output: Path | None, device_name: str) -> Path:
    own_name = re.sub(r"[^a-z0-9]+", "_", device_name.casefold()).strip("_") + ".yaml"
    path = Path(own_name) if output is None else output.expanduser()
    if path.is_dir():
        path = path / own_name
    if path.suffix != ".yaml":
        raise ConfigError(f"output={path}: a memory profile is a .yaml file. Name it {path.stem}.yaml.")
    if path.exists():
        raise ConfigError(f"{path}: this file exists, and it is not replaced. Give another one: output=PATH.yaml.")
    return path
