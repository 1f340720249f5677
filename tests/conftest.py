"""Fixtures that every test folder shares."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.kernels.native import Machine, NativeError
from penstock.kernels.native.build import NoCompilerError, build

# The tests never ask a model hub: what they need lies on disk or is made on the spot.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Read when torch is loaded. The models are tiny: two threads take many times as long as one where cores are shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent
MODELS_VARIABLE = "PENSTOCK_TEST_MODELS"
# Taken out of the environment: servers that tests start warn of variables that no setting reads.
NAMED_MODELS = os.environ.pop(MODELS_VARIABLE, None)
ISAS = ("amx", "avx512bf16", "avx512vnni", "avx512", "avx2vnni", "avx2", "plain")


def model_roots() -> list[Path]:
    """Folders that may hold trained models and data: those in PENSTOCK_TEST_MODELS (split at `:`), or usual ones."""
    if NAMED_MODELS:
        return [Path(part).expanduser() for part in NAMED_MODELS.split(os.pathsep) if part]
    return [ROOT.parent / "shared", ROOT.parent / "shared" / "models", Path("~/.cache/penstock-models").expanduser()]


def find_model(name: str) -> Path | None:
    """The folder of the trained model or tokenizer `name`, or None where this machine has none."""
    folders = [root / name for root in model_roots()]
    files = ("config.json", "tokenizer.json")
    return next((folder for folder in folders if any((folder / file).is_file() for file in files)), None)


@pytest.fixture(scope="session")
def model_folder() -> Callable[[str], Path]:
    """Find a trained model's folder by name; skip the test where there is none."""

    def find_or_skip(name: str) -> Path:
        folder = find_model(name)
        if folder is None:
            looked_in = ", ".join(map(str, model_roots()))
            pytest.skip(f"no model {name!r} in {looked_in}; set {MODELS_VARIABLE} to the folder that holds it")
        return folder

    return find_or_skip


@pytest.fixture(scope="session")
def data_folder() -> Callable[[str], Path]:
    """Find a data set's folder by name, in the places of models or in `data` beside them; skip the test without it."""

    def find_or_skip(name: str) -> Path:
        folders = [root / part / name for root in model_roots() for part in ("data", "")]
        folder = next((folder for folder in folders if folder.is_dir()), None)
        if folder is None:
            looked_in = ", ".join(map(str, model_roots()))
            pytest.skip(f"no data {name!r} in {looked_in}; set {MODELS_VARIABLE} to the folder that holds it")
        return folder

    return find_or_skip


@pytest.fixture(scope="session")
def amx_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library whose AMX is a model in C, for processors with avx512bf16 that have none."""
    try:
        Machine(1, isa="avx512bf16").close()
        return build(tmp_path_factory.mktemp("amx") / "model.so", flags=("-DAMX_MODEL=1",))
    except (NativeError, NoCompilerError, subprocess.CalledProcessError) as error:
        pytest.skip(str(error))


@pytest.fixture(params=ISAS)
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """Two lanes of each instruction set that this processor has; AMX, where it has none, as a model."""
    try:
        opened = Machine(2, isa=request.param)
    except NativeError as error:
        if request.param != "amx":
            pytest.skip(str(error))
        opened = Machine(2, isa="amx", library=request.getfixturevalue("amx_model"))
    with opened:
        yield opened


@pytest.fixture
def widest() -> Iterator[Machine]:
    """Three lanes of the best instruction set that is here."""
    try:
        opened = Machine(3)
    except NativeError as error:
        pytest.skip(str(error))
    with opened:
        yield opened


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` on a machine without a CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
