"""Fixtures that every test folder shares."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

# The tests never ask a model hub: what they need lies on disk or is made on the spot.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Read when torch is loaded. The models are tiny: two threads take many times as long as one where cores are shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent
MODELS_VARIABLE = "PENSTOCK_TEST_MODELS"
# Taken out of the environment: servers that tests start warn of variables that no setting reads.
NAMED_MODELS = os.environ.pop(MODELS_VARIABLE, None)


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` on a machine without a CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
