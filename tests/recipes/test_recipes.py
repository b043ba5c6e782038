"""Every shipped recipe composes for a CPU and for a GPU, and trains two steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from medckpt import search_path
from medckpt.cli import main
from medckpt.config import compose, compose_plain, from_plain
from tests.conftest import TINY_SWIN, TINY_UNETR

RECIPES = search_path.recipe_names()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_says_what_it_costs_and_what_it_gives(recipe: str) -> None:
    lines = search_path.find_recipe(recipe).read_text().splitlines()
    head = "\n".join(line for line in lines if line.startswith("#"))
    assert f"medckpt train recipe={recipe}" in head
    for word in ("GPU", "CPU", "min", "GiB", "Dice"):
        assert word in head, f"the header of {recipe} says nothing about {word}"
    assert compose_plain(recipe, ["data.path=/x"])["recipe"] == recipe


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_composes_for_a_gpu_and_for_a_cpu(recipe: str) -> None:
    real = from_plain(compose_plain(recipe, ["data.path=/x"]))
    assert real.sampler.patches_per_step >= 4
    assert min(real.sampler.patch_size) >= 96
    assert compose(recipe, ["data=/x", "memory=cpu"]).sampler.patch_size != real.sampler.patch_size


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_two_steps(recipe: str, pairs: Path, tmp_path: Path) -> None:
    size = TINY_UNETR[1:] if recipe.startswith("unetr") else TINY_SWIN
    short = ["memory=cpu", "trainer.max_steps=2", "trainer.max_minutes=null"]
    assert main(["train", f"recipe={recipe}", f"data={pairs}", f"output={tmp_path}", *size, *short]) == 0
    (run,) = tmp_path.iterdir()
    assert json.loads((run / "metrics.json").read_text())["steps"] == 2


@pytest.mark.parametrize("path", sorted(search_path.configs_folder().rglob("*.yaml")), ids=lambda path: path.stem)
def test_a_config_part_is_short_and_plain(path: Path) -> None:
    text = path.read_text()
    # A memory profile says of each of its figures where it comes from.
    assert len(text.splitlines()) <= (60 if path.parent.name == "memory" else 40)
    assert isinstance(yaml.safe_load(text), dict)
    assert "${hydra" not in text  # a notebook has no `hydra:` to interpolate
