"""Imports of each layer, beside the contracts in pyproject.toml, and calls that wait for a device."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("server", "engine", "kernels")
KERNELS_MAY_IMPORT = {"numpy", "torch", "triton"}
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
PLAIN_MODULES = next(c["source_modules"] for c in CONTRACTS if c["id"] == "plain-engine-without-torch")


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
    loaded = {"torch", "transformers"} & set(sys.modules)
    if loaded:
        sys.exit(f"{module} loads {', '.join(loaded)}")
"""
    modules = [*PLAIN_MODULES, "penstock.server.commands.cli", "penstock.server.app"]
    done = subprocess.run([sys.executable, "-c", program, *modules], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_of_the_engine_exist() -> None:
    import penstock.engine

    for name in penstock.engine.__all__:
        assert getattr(penstock.engine, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        penstock.engine.Nothing  # noqa: B018


# Code that reads values from the device or waits for copies: references, plain torch, code for CPUs, models of
# transformers.
MAY_WAIT = (
    "_torch.py",
    "kernels/cpu/",
    "kernels/pooling/_native.py",
    "engine/executors/torch/transformers/",
)
WAITS_IN = {
    "kernels/causal_conv1d/__init__.py": {"causal_conv1d_torch", "_final_states"},
    "kernels/grouped_linear/__init__.py": {"_loop", "grouped_linear_reference"},
    "kernels/selective_scan/__init__.py": {"_scan_group"},
    "engine/executors/torch/packed_batch.py": {"PackedBatch"},  # of arrays on the host
    "engine/executors/torch/layers/experts.py": {"OneByOneExperts"},  # on a CPU
    "engine/executors/torch/spec_model.py": {"Embedding"},  # at load
}
ASKS = {"item", "tolist", "cpu", "nonzero", "masked_select", "unique", "bincount"}


def waits_of(path: str) -> Iterator[tuple[str, int]]:
    """The outermost name and the line of each call that waits for the device."""
    for top in ast.parse((ROOT / path).read_text(), path).body:
        for node in ast.walk(top):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = node.func.value
            is_numpy = isinstance(owner, ast.Name) and owner.id == "np"
            copies = node.func.attr in ("tensor", "as_tensor") and any(k.arg == "device" for k in node.keywords)
            if copies or (node.func.attr in ASKS and not is_numpy):
                yield getattr(top, "name", ""), node.lineno


def test_kernels_layers_and_models_do_not_wait_for_the_device() -> None:
    """Reads the source. tests/engine/executors/torch/test_hidden_syncs.py runs it."""
    wrong = []
    for folder in ("kernels", "engine/executors/torch"):
        for path in sorted(str(file.relative_to(ROOT)) for file in (ROOT / folder).rglob("*.py")):
            if not any(part in path for part in MAY_WAIT):
                found = [(name, line) for name, line in waits_of(path) if name not in WAITS_IN.get(path, set())]
                wrong += [f"{path}:{line}: {name}" for name, line in found]
    assert not wrong
