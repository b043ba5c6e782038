"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "medckpt").rglob("*.py"))

# Who may import whom: a room may use those of its own floor and of the floors below.
FLOORS = [
    {"errors", "files", "geometry", "typed", "help"},
    {"lean"},
    {"memory"},
    {"blocks", "search_path", "machine", "profiles", "allowance"},
    {"config"},
    {"datasets", "models"},
    {"inference", "training", "report"},
    {
        "console",
        "plan_screen",
        "check_screen",
        "run_folder",
        "forecasting",
        "fitting",
        "recipe_step",
        "planner",
        "budget",
        "step_memory",
    },
    {"run", "run_plan", "run_check"},
    {"cli", "__main__", "words"},
]
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT / "medckpt").parts
    return parts[0] if len(parts) > 1 else path.stem


_BELOW_MEMORY = ("medckpt.errors", "medckpt.files", "medckpt.lean", "medckpt.memory")


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_has_at_most_400_lines_and_its_functions_60(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 62, f"{node.name} is too long"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    room = room_of(path)
    if room == "__init__":
        return  # the public names come from everywhere
    for name in imports_of(path):
        if name.startswith("medckpt.") and (other := name.split(".")[1]) in LEVEL:
            assert LEVEL[other] <= LEVEL[room], f"{path.name} imports {name}"


@pytest.mark.parametrize("path", [path for path in FILES if room_of(path) == "memory"], ids=lambda path: path.name)
def test_memory_knows_torch_only(path: Path) -> None:
    allowed = {"torch", "scipy", "numpy", "medckpt", "__future__", *sys.stdlib_module_names}
    assert {name.split(".")[0] for name in imports_of(path)} <= allowed
    assert all(name.startswith(_BELOW_MEMORY) for name in imports_of(path) if "medckpt" in name)


def test_importing_medckpt_loads_nothing_heavy_and_prints_nothing() -> None:
    code = "import sys, medckpt; print(sorted({'torch', 'monai', 'hydra', 'lightning', 'numpy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
    assert result.stderr == ""


def test_help_loads_no_torch() -> None:
    code = "import sys; from medckpt.cli import main; main(['train', '--help']); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("False\n")


def test_the_public_names_are_these() -> None:
    import medckpt

    assert sorted(medckpt.__all__) == [
        "Forecast",
        "InfeasibleBudget",
        "MedckptError",
        "MemoryPlan",
        "MemoryProfile",
        "RunConfig",
        "apply",
        "apply_recompute",
        "bind",
        "compose",
        "evaluate",
        "find_regions",
        "forecast",
        "plan",
        "predict",
        "remove",
        "train",
        "undo",
        "verify",
    ]
    for name in medckpt.__all__:
        assert getattr(medckpt, name) is not None
