"""`medckpt VERB key=value ...`: parses words, calls one function of run.py, prints errors as a person wants them.

Nothing heavy is imported before a verb really runs, so that `--help` answers at once.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import io
import json
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from medckpt.errors import ConfigError, MedckptError, suggest
from medckpt.help import HELP, RECIPES, TOP

INTERRUPTED = 130
DOES_NOT_FIT = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0 done, 1 our fault, 2 bad input, 3 does not fit, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a letter of a path is no reason to stop
            stream.reconfigure(errors="replace")
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(TOP, end="")
        return 0
    if words[0] == "--version":
        print(importlib.metadata.version("medckpt"))
        return 0
    verb, *rest = words
    verbs: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "plan": _plan,
        "predict": _predict,
        "evaluate": _evaluate,
        "recipes": _recipes,
        "profile": _profile,
    }
    try:
        if verb not in verbs:
            raise ConfigError(f"'{verb}' is not a verb. {suggest(verb, verbs)}")
        if "--help" in rest or "-h" in rest:
            print(HELP[verb], end="")
            return 0
        _log_to_stderr()
        return verbs[verb](rest)
    except MedckptError as error:
        _print_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _print_error("interrupted")
        return INTERRUPTED
    except Exception:
        file = _traceback_file()
        _print_error(f"this is our own fault, not yours: {sys.exc_info()[1]!r}\nThe traceback is in {file}.")
        return 1


def _train(words: list[str]) -> int:
    as_json = _take_flag(words, "--json")
    keys = {word.partition("=")[0]: word.partition("=")[2] for word in words if not word.startswith("-")}
    if "resume" in keys:
        if "recipe" in keys:
            raise ConfigError("recipe= and resume= exclude each other: a resumed run keeps its own recipe.")
        return _resume(Path(keys["resume"]), [word for word in words if not word.startswith("resume=")], as_json)
    if "recipe" not in keys:
        from medckpt.search_path import recipe_names

        for key in keys:
            if difflib.get_close_matches(key, ("recipe", "resume"), cutoff=0.7):
                raise ConfigError(f"{key}: unknown key. {suggest(key, ('recipe', 'resume'))}")
        raise ConfigError(f"say which recipe: medckpt train recipe=NAME. {suggest('', recipe_names())}")
    rest = [word for word in words if not word.startswith("recipe=")]
    return _train_by_hydra(keys["recipe"], rest, as_json)


def _train_by_hydra(recipe: str, words: list[str], as_json: bool) -> int:
    """Hands the words to Hydra, so that --cfg, --multirun and --info are its own."""
    from medckpt import config as configuration
    from medckpt import search_path

    flags, overrides = _split_flags(words)
    overrides = configuration.normalize(overrides)
    multirun = not {"-m", "--multirun"}.isdisjoint(flags)
    composed, fitted = None, overrides
    # Every mistake is found here, before Hydra says it in its own words and before the first job of a sweep runs.
    if multirun:
        configuration.check_sweep(recipe, overrides)  # each job is fitted to the machine by itself
    else:
        _refuse_sweeps(overrides)
        composed = configuration.compose_here(recipe, overrides)
        fitted = [*composed.machine_words, *overrides]
    path = search_path.find_recipe(recipe)
    codes: list[int] = []
    stops: list[BaseException] = []  # Hydra would print these in its own way, and go on after them

    def job(settings: Any) -> float | None:
        if stops or INTERRUPTED in codes:
            return None
        sys.argv = sys_argv  # Lightning starts its other processes with the words that the user typed
        try:
            here = composed or configuration.compose_here(recipe, _job_words())
            _say_scaled(recipe, here.scaled, as_json)
            code, dice = _run_training(here.config, None, as_json)
        except MedckptError as error:  # one bad job of a sweep does not take the others with it
            _print_error(str(error))
            code, dice = error.exit_code, None
        except (Exception, KeyboardInterrupt) as error:
            stops.append(error)
            return None
        codes.append(code)
        return dice

    import hydra

    sys_argv, sys.argv = sys.argv, ["medckpt train", *flags, *fitted]
    try:
        hydra.main(version_base="1.3", config_path=str(path.parent), config_name=path.stem)(job)()
    finally:
        sys.argv = sys_argv
    if stops:
        raise stops[0]
    return max(codes, default=0)


def _job_words() -> list[str]:
    """Returns the words of the sweep's job that runs now."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    words = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)  # a literal ${ stays escaped
    assert isinstance(words, list)
    return [str(word) for word in words]


def _refuse_sweeps(words: Sequence[str]) -> None:
    from medckpt import config as configuration

    for word in words:
        if configuration.is_sweep(word):
            key, _, value = word.partition("=")
            raise ConfigError(
                f"{word}: several values ask for several runs. Add -m for a sweep, or quote the value if it is one: "
                f"\"{key}='{value}'\"."
            )


def _resume(run: Path, words: list[str], as_json: bool) -> int:
    from medckpt import config as configuration
    from medckpt import typed
    from medckpt.run_folder import load_config

    flags, overrides = _split_flags(words)
    if flags:
        raise ConfigError(f"resume= does not take {' '.join(flags)}.")
    changed = configuration.change(typed.to_plain(load_config(run)), overrides)
    return _run_training(configuration.from_plain(changed), run, as_json)[0]


def _run_training(config: Any, resume: Path | None, as_json: bool) -> tuple[int, float | None]:
    from medckpt import console, run

    console.speak_on(stderr=as_json)
    trained = run.train(config, resume=resume, command=" ".join(["medckpt", *sys.argv[1:]]))
    if trained.interrupted:
        return INTERRUPTED, None
    if trained.metrics is None:  # one of the other processes of a run on several GPUs
        return 0, None
    if as_json:
        print(json.dumps(trained.metrics | {"folder": str(trained.folder)}))
    return 0, trained.metrics["dice_mean"]


def _plan(words: list[str]) -> int:
    as_json = _take_flag(words, "--json")
    own, settings = {}, []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key in ("recipe", "channels", "classes", "sides", "output"):
            own[key] = value
        elif word.startswith("-"):
            raise ConfigError(f"{word}: not understood.\nSee medckpt plan --help.")
        else:
            settings.append(word)
    if "recipe" not in own:
        from medckpt.search_path import recipe_names

        raise ConfigError(f"say which recipe: medckpt plan recipe=NAME. {suggest('', recipe_names())}")
    from medckpt import console, machine, run

    console.speak_on(stderr=as_json)
    planned = run.plan(
        own["recipe"],
        settings,
        channels=_whole(own, "channels"),
        classes=_whole(own, "classes"),
        sides=_sides(own.get("sides")),
        output=Path(own.get("output", "plans")),
        workers=machine.cpu_count(),
    )
    if as_json:
        print(json.dumps(planned.to_dict()))
    return 0 if planned.chosen.fits != "no" else DOES_NOT_FIT


def _whole(keys: dict[str, str], key: str) -> int | None:
    if key not in keys:
        return None
    if not (keys[key].isascii() and keys[key].isdigit()) or int(keys[key]) < 1:
        raise ConfigError(f"{key}={keys[key]}: must be a whole number, 1 or more.")
    return int(keys[key])


def _sides(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    words = [word for word in text.strip("[]").replace(" ", "").split(",") if word]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise ConfigError(f"sides={text}: must be whole numbers, for example sides=[64,96,128].")
    return tuple(map(int, words))


def _profile(words: list[str]) -> int:
    as_json = _take_flag(words, "--json")
    keys = _read_keys("profile", words, required=(), optional=("output",))
    from medckpt import console, run, typed

    console.speak_on(stderr=as_json)
    profile = run.profile(Path(keys["output"]) if "output" in keys else None)
    if as_json:
        print(json.dumps(typed.to_plain(profile)))
    return 0


def _predict(words: list[str]) -> int:
    as_json = _take_flag(words, "--json")
    keys = _read_keys("predict", words, required=("run", "input", "output"), optional=("weights",))
    from medckpt import console, run

    console.speak_on(stderr=as_json)
    files = run.predict(
        Path(keys["run"]), Path(keys["input"]), Path(keys["output"]), weights=keys.get("weights", "best")
    )
    if as_json:
        print(json.dumps([str(file) for file in files]))
    return 0


def _evaluate(words: list[str]) -> int:
    as_json = _take_flag(words, "--json")
    keys = _read_keys("evaluate", words, required=("run",), optional=("data", "output", "weights"))
    from medckpt import console, run

    console.speak_on(stderr=as_json)
    output = Path(keys["output"]) if "output" in keys else None
    metrics = run.evaluate(Path(keys["run"]), data=keys.get("data"), output=output, weights=keys.get("weights", "best"))
    if as_json:
        print(json.dumps(metrics))
    return 0


def _recipes(words: list[str]) -> int:
    from medckpt.search_path import find_recipe, recipe_names

    as_json = _take_flag(words, "--json")
    match words:
        case [] | ["list"]:
            first = {name: find_recipe(name).read_text().splitlines()[0].lstrip("# ") for name in recipe_names()}
            print(json.dumps(first) if as_json else "\n".join(f"{name:12} {text}" for name, text in first.items()))
        case ["show", name]:
            print(find_recipe(name).read_text(), end="")
        case ["copy", name, target]:
            _copy_recipe(find_recipe(name), Path(target))
        case _:
            raise ConfigError(f"medckpt recipes {' '.join(words)}: not understood.\n{RECIPES.rstrip()}")
    return 0


def _copy_recipe(source: Path, target: Path) -> None:
    if target.is_dir():
        target = target / source.name
    if target.suffix != ".yaml":
        raise ConfigError(f"{target}: a recipe is a .yaml file.")
    try:
        with target.open("x") as stream:  # never over somebody's own recipe
            stream.write(source.read_text())
    except FileExistsError:
        raise ConfigError(f"{target}: it exists already; choose another name.") from None
    except OSError as error:
        raise ConfigError(f"{target}: it cannot be written ({error}).") from error
    print(f"{target}\nTrain with it: medckpt train recipe={target if target.is_absolute() else f'./{target}'}")


def _read_keys(verb: str, words: Sequence[str], *, required: Sequence[str], optional: Sequence[str]) -> dict[str, str]:
    problems, keys = [], {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value:
            problems.append(f"'{word}' is not key=value.")
        elif key not in (*required, *optional):
            problems.append(f"{key}: unknown key. {suggest(key, (*required, *optional))}")
        else:
            keys[key] = value
    problems += [f"{key}=... is missing." for key in required if key not in keys]
    if problems:
        raise ConfigError("\n".join(problems) + f"\nSee medckpt {verb} --help.")
    return keys


def _split_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates Hydra's flags (with the word that follows --cfg and its like) from key=value words."""
    flags: list[str] = []
    overrides: list[str] = []
    takes_value = {"--cfg", "-c", "--package", "-p"}
    may_take_value = {"--info", "-i"}
    for word in words:
        if word.startswith(("--config", "-cd", "-cn", "-cp")):
            raise ConfigError(f"{word}: recipe= chooses the file. Give your own as recipe=./FILE.yaml instead.")
        if word.startswith("--experimental-rerun"):
            raise ConfigError(f"{word}: not supported. A run goes on with resume=RUN.")
        last = flags[-1] if flags else ""
        if word.startswith("-") or last in takes_value or (last in may_take_value and "=" not in word):
            flags.append(word)
        else:
            overrides.append(word)
    shows = [flag for flag in flags if flag.partition("=")[0] in ("--cfg", "-c", "--info", "-i")]
    if shows and not {"-m", "--multirun"}.isdisjoint(flags):
        raise ConfigError(f"{shows[0]} shows one run: leave out -m.")
    return flags, overrides


def _take_flag(words: list[str], flag: str) -> bool:
    found = flag in words
    while flag in words:
        words.remove(flag)
    return found


def _say_scaled(recipe: str, changes: dict[str, Any], as_json: bool) -> None:
    from medckpt import console

    console.speak_on(stderr=as_json)
    console.scaled(recipe, changes)


def _print_error(message: str) -> None:
    bold = "\033[1;31merror\033[0m" if sys.stderr.isatty() else "error"
    print(f"{bold} {message}", file=sys.stderr)


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger = logging.getLogger("medckpt")
    logger.handlers = [handler]
    logger.propagate = False


def _traceback_file() -> Path:
    descriptor, name = tempfile.mkstemp(prefix="medckpt-", suffix=".log")
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as stream:
        stream.write(f"medckpt {' '.join(sys.argv[1:])}\n\n{traceback.format_exc()}")
    return Path(name)


if __name__ == "__main__":
    sys.exit(main())
