"""The verb `plan`: forecasts a step of a recipe, or finds the fastest plan for it under a budget; leaves files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medckpt import budget, console, plan_screen, planner, step_memory, typed
from medckpt.allowance import read_budget
from medckpt.config import RunConfig, compose_here
from medckpt.datasets import phantom
from medckpt.errors import ConfigError, listing
from medckpt.files import write_json
from medckpt.memory.profile import MemoryProfile
from medckpt.profiles import load_profile
from medckpt.recipe_step import Task
from medckpt.run import open_data


def plan(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    channels: int | None = None,
    classes: int | None = None,
    sides: Sequence[int] | None = None,
    output: Path = Path("plans"),
    workers: int = 1,
) -> planner.StepPlan:
    """Forecasts a recipe's training step on a device that need not be here, prints it, and leaves picture and JSON.

    Args:
        recipe: name or path.
        overrides: `key=value` words; `memory=` names the device, `data=` is read for channels and classes only.
        channels: of a scan; None takes the data's, or 1. Must agree with the data.
        classes: background included; None takes the data's, or 14. Must agree with the data.
        sides: of the cubes in the table, beside the recipe's own patch; None takes the usual ones.
        workers: processes that trace the table; above 1 a script needs the `if __name__ == "__main__"` guard.
        output: folder of the plan's own folder, which is named by recipe, device and a digest of all that was asked:
            the same question again replaces its answer, another one has a folder of its own.

    Raises:
        ConfigError: as `compose`; a device or precision that is not known; a network that cannot be traced; channels
            or classes that are not the data's; an `output` that is a file.
    """
    _refuse_file(output)
    composed = compose_here(recipe, overrides, elsewhere=True)
    config = composed.config
    profile = load_profile(config.memory)
    console.scaled(recipe, composed.scaled)
    task = _task(config, channels, classes)
    planner.check_sides(config, sides or ())
    sides = planner.SIDES if sides is None else sides
    command = _train_command(recipe, overrides)
    with console.bar("trace", planner.traces_of(config, sides)) as advance:
        found = planner.plan(config, profile, task, sides=sides, workers=workers, command=command, advance=advance)
    folder = _plan_folder(output, config, (config, profile, task), list(sides))
    found = dataclasses.replace(found, folder=str(folder), words=(f"recipe={recipe}", *overrides))
    found.chosen.plot(folder / "memory_timeline.png")
    write_json(folder / "plan.json", found.to_dict())
    plan_screen.planned(found, folder)
    return found


def plan_budget(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    channels: int | None = None,
    classes: int | None = None,
    output: Path = Path("plans"),
) -> budget.BudgetPlan:
    """Finds the fastest exact plan of a recipe's step under `budget=`, prints it, and leaves picture and JSON.

    Arguments are those of `plan`; a word `budget=` is among `overrides`.

    Raises:
        InfeasibleBudget: nothing fits; the error says how little would, and what to change.
        ConfigError: as `plan`.
    """
    _refuse_file(output)
    composed = compose_here(recipe, overrides, elsewhere=True)
    config = composed.config
    profile = load_profile(config.memory)
    console.scaled(recipe, composed.scaled)
    allowance = read_budget(str(config.budget or "auto"), profile)
    command = _train_command(recipe, overrides)
    task = _task(config, channels, classes)
    with console.bar("steps traced", None) as advance:
        found = budget.plan_budget(config, profile, task, allowance, command=command, advance=lambda what: advance())
    folder = _plan_folder(output, config, (config, profile, task))
    found.draw(folder / "frontier.png")
    found.chosen.save(folder / step_memory.PLAN_FILE)
    write_json(folder / "plan.json", found.to_dict())
    plan_screen.budgeted(found, folder)
    return found


def _train_command(recipe: str, overrides: Sequence[str]) -> str:
    # The profile is of a device that the training will find by itself.
    kept = [word for word in overrides if not word.startswith("memory=")]
    return shlex.join(["medckpt", "train", f"recipe={recipe}", *kept])


def _refuse_file(output: Path) -> None:
    if output.exists() and not output.is_dir():
        raise ConfigError(f"output={output}: this is a file, and the plan's own folder is made in a folder.")


def _plan_folder(output: Path, config: RunConfig, asked: tuple[RunConfig, MemoryProfile, Task], *more: Any) -> Path:
    """Returns the folder of a plan, named by recipe, device and a digest of all that was asked."""
    facts = [*(typed.to_plain(value) for value in asked), *more]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:6]
    return output / re.sub(r"[^\w.-]+|^\.+", "_", f"{config.recipe}-{asked[1].name}-{digest}")


def _task(config: RunConfig, channels: int | None, classes: int | None) -> Task:
    """Returns what the data say, or what is asked for where there are none, else one channel and 14 classes (BTCV).

    Raises:
        ConfigError: the data have another number of channels or classes than what is asked for.
    """
    if config.data.path == "none":
        assumed = channels is None or classes is None
        return Task(channels=channels or 1, classes=classes or 14, assumed=assumed)
    if config.data.path == "phantom":  # what a recipe has until there are data
        return Task(channels=channels or 1, classes=classes or len(phantom.PHANTOM_LABELS))
    dataset = open_data(config)
    facts = (("channels", channels, list(dataset.channel_names)), ("classes", classes, list(dataset.labels)))
    problems = [
        f"{key}={asked}: the data in {dataset.root} have {len(names)} ({listing(names)}). Leave out {key}=, or data=."
        for key, asked, names in facts
        if asked is not None and asked != len(names)
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    return Task(channels=len(dataset.channel_names), classes=len(dataset.labels))
