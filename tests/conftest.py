"""Fixtures that every test folder shares."""

import fcntl
import gc
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import certifi
import pytest
from hypothesis import HealthCheck, settings

from penstock.kernels.cpu import CpuKernelError, Machine
from penstock.kernels.cpu.build import NoCompilerError, build

# The tests never ask a model hub: what they need lies on disk or is made on the spot.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Read when torch is loaded. The models are tiny: two threads take many times as long as one where cores are shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# By default an example that takes 200 ms fails, and so does a test whose examples are made slowly.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")

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


def shared_folder(config: pytest.Config) -> Path | None:
    """A folder of all processes of a run side by side, or None where this is the only one."""
    return Path(config.getoption("basetemp")).parent if hasattr(config, "workerinput") else None


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


@pytest.fixture(scope="session", autouse=True)
def _few_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For each client httpx reads all of certifi's, 30 ms; they vouch for no server of the tests, and one is enough."""
    first, end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----\n")
    file = tmp_path_factory.mktemp("certificates") / "one.pem"
    file.write_text(first + end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certifi, "where", lambda: str(file))
        yield


def has_isa(name: str) -> bool:
    """Whether this processor has an instruction set of the native kernels."""
    try:
        Machine(1, isa=name).close()
    except CpuKernelError:
        return False
    return True


@pytest.fixture(scope="session")
def build_amx_model() -> Callable[..., Path]:
    """Compiles the library with emulated AMX, and with emulated vectors if the processor has no avx512bf16."""

    def build_model(target: Path, *flags: str) -> Path:
        if has_isa("avx512bf16"):
            return build(target, flags=("-DAMX_MODEL=1", "-O1", *flags))
        return build(target, flags=("-DAMX_MODEL=2", "-O1", "-Wno-psabi", *flags), isas={"amx": ("-DHAS_AMX=1",)})

    return build_model


@pytest.fixture(scope="session")
def amx_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, build_amx_model: Callable[..., Path]
) -> Path:
    """A library that emulates AMX in C (amx_model.h)."""
    folder = shared_folder(request.config) or tmp_path_factory.getbasetemp()
    library = folder / "amx_model.so"
    try:
        Machine(1, isa="plain").close()
        with (folder / "amx_model.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the first process that needs it compiles it
            return library if library.is_file() else build_amx_model(library)
    except (CpuKernelError, NoCompilerError, subprocess.CalledProcessError) as error:
        pytest.skip(str(error))


@pytest.fixture(params=ISAS)
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """Two lanes of each instruction set that this processor has; AMX emulated where avx512bf16 is there.

    Emulated AMX on emulated vectors takes minutes for all tests: those of tests/kernels/cpu/test_amx.py run there.
    """
    try:
        opened = Machine(2, isa=request.param)
    except CpuKernelError as error:
        if request.param != "amx" or not has_isa("avx512bf16"):
            pytest.skip(str(error))
        opened = Machine(2, isa="amx", library=request.getfixturevalue("amx_model"))
    with opened:
        yield opened


@pytest.fixture
def widest() -> Iterator[Machine]:
    """Three lanes of the best instruction set that is here."""
    try:
        opened = Machine(3)
    except CpuKernelError as error:
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


def pytest_collection_finish() -> None:
    """Takes modules and tests, a million objects, out of the collector's sight: tests and servers call it by name."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Runs a test marked `alone` while no other process of this run tests anything."""
    folder = shared_folder(item.config)
    if folder is None:
        return (yield)
    kind = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    with (folder / "room.lock").open("w") as room:
        with (folder / "door.lock").open("w") as door:
            fcntl.flock(door, fcntl.LOCK_EX)  # who waits for the room to be empty lets nobody else in
            fcntl.flock(room, kind)
        return (yield)
