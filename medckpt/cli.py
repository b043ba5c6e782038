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

from medckpt import machine
from medckpt import words as parse
from medckpt.errors import ConfigError, DataError, MedckptError, suggest
from medckpt.help import HELP, RECIPES, TOP

FAILED, DOES_NOT_FIT, INTERRUPTED = 1, 3, 130  # FAILED: of `check`, a case


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code.

    0 done, 1 our fault (of `check`: a case fails), 2 bad input (or an output that cannot be written), 3 does not fit,
    130 interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a letter of a path is no reason to stop
            stream.reconfigure(errors="replace")
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
        print(end="", flush=True)  # not sys.stdout.flush(): a closed one (>&-) is None
        return code
    except MedckptError as error:
        _print_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _print_error("interrupted")
        return INTERRUPTED
    except Exception as error:
        lost = _lost_output() if isinstance(error, OSError) else None
        if lost is not None:
            _print_error(f"standard output cannot be written ({lost}). What is in files is complete.")
            return DataError.exit_code
        file = _traceback_file()
        _print_error(f"this is our own fault, not yours: {error!r}\nThe traceback is in {file}.")
        return 1


def _run(words: list[str]) -> int:
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
        "check": _check,
        "predict": _predict,
        "evaluate": _evaluate,
        "recipes": _recipes,
        "profile": _profile,
    }
    if verb not in verbs:
        raise ConfigError(f"'{verb}' is not a verb. {suggest(verb, verbs)}")
    if "--help" in rest or "-h" in rest:
        print(HELP[verb], end="")
        return 0
    _log_to_stderr()
    rest, repeated = parse.once(rest)
    if machine.rank() == 0:  # Lightning starts its other processes with the same words
        for line in repeated:
            print(f"note {line}", file=sys.stderr)
    return verbs[verb](rest)


def _train(words: list[str]) -> int:
    as_json = parse.take_flag(words, "--json")
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

    flags, overrides = parse.split_flags(words)
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

    flags, overrides = parse.split_flags(words)
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
    as_json = parse.take_flag(words, "--json")
    own: dict[str, str] = {}
    settings = []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key in ("recipe", "channels", "classes", "sides", "output"):
            if not value:
                raise ConfigError(f"{key}=: a value is missing.\nSee medckpt plan --help.")
            own[key] = value
        elif word.startswith("-"):
            raise ConfigError(f"{word}: not understood.\nSee medckpt plan --help.")
        else:
            settings.append(word)
    if "recipe" not in own:
        from medckpt.search_path import recipe_names

        raise ConfigError(f"say which recipe: medckpt plan recipe=NAME. {suggest('', recipe_names())}")
    from medckpt import console, machine, run_plan

    console.speak_on(stderr=as_json)
    allowed = next((word.partition("=")[2] for word in reversed(settings) if word.startswith("budget=")), "null")
    if not allowed:
        raise ConfigError("budget=: a value is missing.\nSee medckpt plan --help.")
    if allowed != "null":
        if parse.sides(own.get("sides")):
            raise ConfigError("sides=: a plan under a budget has no table of patch sizes. Leave sides= or budget= out.")
        found = run_plan.plan_budget(
            own["recipe"],
            settings,
            channels=parse.whole(own, "channels"),
            classes=parse.whole(own, "classes"),
            output=Path(own.get("output", "plans")),
        )
        if as_json:
            print(json.dumps(found.to_dict()))
        return 0
    planned = run_plan.plan(
        own["recipe"],
        settings,
        channels=parse.whole(own, "channels"),
        classes=parse.whole(own, "classes"),
        sides=parse.sides(own.get("sides")),
        output=Path(own.get("output", "plans")),
        workers=machine.cpu_count(),
    )
    if as_json:
        print(json.dumps(planned.to_dict()))
    return 0 if planned.chosen.fits != "no" else DOES_NOT_FIT


def _check(words: list[str]) -> int:
    as_json = parse.take_flag(words, "--json")
    keys = parse.read_check(words)
    from medckpt import console, run_check, typed

    console.speak_on(stderr=as_json)
    if keys.fixes:
        changes = run_check.fix(keys.data, keys.output, keys.fixes, remap=keys.remap)
        if as_json:
            print(json.dumps(typed.to_plain(changes)))
        return 0
    checked = run_check.check(keys.data, report=keys.report, reading=keys.reading)
    if as_json:
        print(json.dumps(run_check.to_dict(checked)))
    return FAILED if checked.failed else 0


def _profile(words: list[str]) -> int:
    as_json = parse.take_flag(words, "--json")
    keys = parse.read_keys("profile", words, required=(), optional=("output",))
    from medckpt import console, run, typed

    console.speak_on(stderr=as_json)
    profile = run.profile(Path(keys["output"]) if "output" in keys else None)
    if as_json:
        print(json.dumps(typed.to_plain(profile)))
    return 0


def _predict(words: list[str]) -> int:
    as_json = parse.take_flag(words, "--json")
    optional = (own := ("weights", "format", "seg_type")) + parse.READING_KEYS
    keys = parse.read_keys("predict", words, required=("run", "input", "output"), optional=optional)
    from medckpt import run_folder
    from medckpt.inference.inputs import require_input

    run_folder.load_config(Path(keys["run"]))  # a wrong path is said at once, before torch is loaded
    require_input(Path(keys["input"]))
    from medckpt import console, run

    console.speak_on(stderr=as_json)
    choices: dict[str, Any] = {key: keys[key] for key in own if key in keys}
    places = (Path(keys[key]) for key in ("run", "input", "output"))
    files = run.predict(*places, **choices, reading=parse.reading(keys))
    if as_json:
        print(json.dumps([str(file) for file in files]))
    return 0


def _evaluate(words: list[str]) -> int:
    as_json = parse.take_flag(words, "--json")
    optional = ("data", "output", "weights", *parse.READING_KEYS)
    keys = parse.read_keys("evaluate", words, required=("run",), optional=optional)
    from medckpt import run_folder

    run_folder.load_config(Path(keys["run"]))
    from medckpt import console, run

    console.speak_on(stderr=as_json)
    choices: dict[str, Any] = {key: keys[key] for key in ("data", "weights") if key in keys}
    output = Path(keys["output"]) if "output" in keys else None
    metrics = run.evaluate(Path(keys["run"]), output=output, **choices, reading=parse.reading(keys))
    if as_json:
        print(json.dumps(metrics))
    return 0


def _recipes(words: list[str]) -> int:
    from medckpt.search_path import find_recipe, recipe_names

    as_json = parse.take_flag(words, "--json")
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


def _say_scaled(recipe: str, changes: dict[str, Any], as_json: bool) -> None:
    from medckpt import console

    console.speak_on(stderr=as_json)
    console.scaled(recipe, changes)


def _print_error(message: str) -> None:
    bold = "\033[1;31merror\033[0m" if sys.stderr.isatty() else "error"
    print(f"{bold} {message}", file=sys.stderr)


def _lost_output() -> str | None:
    """Returns why standard output takes nothing more, None if it does.

    An error of a write does not say which file it was, so one more line is tried.
    """
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):  # replaced by what is no file
        return None
    try:
        os.write(number, b"\n")
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)  # for what Python still holds when it ends
        return error.strerror or type(error).__name__
    return None


def _log_to_stderr() -> None:
    handler, said = logging.StreamHandler(), set[str]()
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    # A header is read more than once; what is odd about it is said once.
    handler.addFilter(lambda record: (text := record.getMessage()) not in said and not said.add(text))  # type: ignore[func-returns-value]
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
