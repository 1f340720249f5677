"""Imports of each layer, beside the contracts in pyproject.toml."""

import ast
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("server", "engine", "kernels")
KERNELS_MAY_IMPORT = {"numpy", "torch", "triton"}
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
PLAIN_MODULES = next(c["source_modules"] for c in CONTRACTS if c["id"] == "plain-engine-without-torch")
SERVER_MODULES = ("settings", "commands.cli", "embed_jobs.run", "app", "commands.serve")


class Import(NamedTuple):
    """An import statement: the number of leading dots, and the dotted name."""

    path: Path
    line: int
    level: int
    name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {'.' * self.level}{self.name}"


@cache
def imports_of(layer: str) -> list[Import]:
    found = []
    for path in sorted((ROOT / layer).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Import):
                found += [Import(path.relative_to(ROOT), node.lineno, 0, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found.append(Import(path.relative_to(ROOT), node.lineno, node.level, node.module or ""))
    return found


def root_name(name: str) -> str:
    return name.partition(".")[0]


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_are_relative_inside_a_layer_and_absolute_across(layer: str) -> None:
    wrong = []
    for found in imports_of(layer):
        is_own_layer_by_full_name = found.name == f"penstock.{layer}" or found.name.startswith(f"penstock.{layer}.")
        leaves_the_layer = found.level > len(found.path.parts) - 1
        if is_own_layer_by_full_name or leaves_the_layer or (root_name(found.name) in LAYERS and not found.level):
            wrong.append(str(found))
    assert not wrong


def test_kernels_import_only_torch_triton_and_numpy() -> None:
    allowed = KERNELS_MAY_IMPORT | sys.stdlib_module_names
    assert not [str(i) for i in imports_of("kernels") if not i.level and root_name(i.name) not in allowed]


def test_plain_modules_load_no_torch() -> None:
    program = """
import sys
from importlib import import_module
from pkgutil import walk_packages
names = []
for package in sys.argv[1:]:
    path = getattr(import_module(package), "__path__", None)
    names += [package, *(found.name for found in walk_packages(path or [], f"{package}."))]
for module in names:
    import_module(module)
    loaded = {"torch", "transformers", "triton", "safetensors"} & set(sys.modules)
    if loaded:
        sys.exit(f"{module} loads {', '.join(loaded)}")
"""
    modules = [*PLAIN_MODULES, *(f"penstock.server.{name}" for name in SERVER_MODULES)]
    done = subprocess.run([sys.executable, "-c", program, *modules], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
