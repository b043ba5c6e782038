"""Where `configs/` and `recipes/` are: mapped into the wheel, or beside the package in a checkout."""

from __future__ import annotations

import os
from pathlib import Path

from medckpt.errors import ConfigError, MedckptError, suggest

PACKAGE = Path(__file__).resolve().parent


def configs_folder() -> Path:
    """Returns the folder of Hydra groups."""
    return _find("configs")


def recipes_folder() -> Path:
    """Returns the folder of whole runs, one YAML each."""
    return _find("recipes")


def recipe_names() -> list[str]:
    """Returns the shipped recipes by name, sorted."""
    return sorted(path.stem for path in recipes_folder().glob("*.yaml"))


def choices(group: str) -> list[str]:
    """Returns the choices of a block such as `model`, sorted; none if there is no such block."""
    return sorted(path.stem for path in (configs_folder() / group).glob("*.yaml"))


def find_recipe(recipe: str) -> Path:
    """Returns the YAML file of a shipped recipe by name, or of a user's own recipe by path.

    Raises:
        ConfigError: there is no such recipe (the message has the closest name and the list), or it is no `.yaml` file.
    """
    if recipe.endswith((".yaml", ".yml")) or "/" in recipe:
        path = Path(os.path.abspath(Path(recipe).expanduser()))  # a link keeps its own name
        if path.is_file():
            if path.suffix != ".yaml":  # Hydra looks for no other
                raise ConfigError(f"recipe={recipe}: only .yaml files are read. Rename it to {path.stem}.yaml.")
            return path
        raise ConfigError(f"recipe={recipe}: there is no file {path}. A shipped recipe goes by its name alone.")
    path = recipes_folder() / f"{recipe}.yaml"
    if not path.is_file():
        raise ConfigError(f"recipe={recipe}: there is no such recipe. {suggest(recipe, recipe_names())}")
    return path


def register() -> None:
    """Tells Hydra where the groups are. In this process only, and once."""
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class MedckptSearchPath(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            search_path.append("medckpt", f"file://{configs_folder()}")

    found = Plugins.instance().discover(SearchPathPlugin)
    if not any(plugin.__name__ == MedckptSearchPath.__name__ for plugin in found):
        Plugins.instance().register(MedckptSearchPath)


def _find(name: str) -> Path:
    # From the imported package's own folder only: an editable install leaves a stale copy elsewhere.
    places = [PACKAGE / f"_{name}", PACKAGE.parent / name]
    for place in places:
        if place.is_dir():
            return place
    raise MedckptError(f"medckpt's own '{name}' folder is in none of: {', '.join(map(str, places))}. Install it again.")
