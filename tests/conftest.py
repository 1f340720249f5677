"""Fixtures that every test folder shares."""

import fcntl
import gc
import os
import platform
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import certifi
import pytest

from penstock.kernels.cpu import CpuKernelError, CpuLibrary
from penstock.kernels.cpu._abi import digest
from penstock.kernels.cpu.build import NoCompilerError, build
from penstock.server.commands.model_arguments import default_model_folder
from penstock.server.settings import UsageError

from .random_models import save_random_model

# Tests use no model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# torch reads it at import. Tiny models on shared cores run many times faster with one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent
MODELS_VARIABLE = "PENSTOCK_TEST_MODELS"
# Removed from the environment, because servers warn about unknown variables.
NAMED_MODELS = os.environ.pop(MODELS_VARIABLE, None)
X86_ISAS = ("amx", "avx512bf16", "avx512vnni", "avx512", "avx2vnni", "avx2", "plain")
ISAS = X86_ISAS if platform.machine() == "x86_64" else ("neonmmla", "neondot", "neon", "plain")


def model_roots() -> list[Path]:
    """Folders with trained models and data: those in PENSTOCK_TEST_MODELS (separated by `:`), or default folders."""
    if NAMED_MODELS:
        return [Path(part).expanduser() for part in NAMED_MODELS.split(os.pathsep) if part]
    return [ROOT.parent / "shared", ROOT.parent / "shared" / "models", Path("~/.cache/penstock-models").expanduser()]


def find_model(name: str) -> Path | None:
    """The folder of the trained model or tokenizer `name`, or None."""
    folders = [root / name for root in model_roots()]
    files = ("config.json", "tokenizer.json")
    return next((folder for folder in folders if any((folder / file).is_file() for file in files)), None)


def shared_folder(config: pytest.Config) -> Path | None:
    """A folder that the processes of a parallel run share, or None in a run with one process."""
    return Path(config.getoption("basetemp")).parent if hasattr(config, "workerinput") else None


@pytest.fixture(scope="session")
def model_folder() -> Callable[[str], Path]:
    """Find a trained model's folder by name; skip the test if it is missing."""

    def find(name: str) -> Path:
        return find_model(name) or skip_without(f"model {name!r}")

    return find


@pytest.fixture(scope="session")
def data_folder() -> Callable[[str], Path]:
    """Find a data set's folder by name, beside the models or in `data` beside them; skip the test if it is missing."""

    def find(name: str) -> Path:
        folders = [root / part / name for root in model_roots() for part in ("data", "")]
        return next((folder for folder in folders if folder.is_dir()), None) or skip_without(f"data {name!r}")

    return find


def skip_without(thing: str) -> NoReturn:
    folders = ", ".join(map(str, model_roots()))
    pytest.skip(f"no {thing} in {folders}; set {MODELS_VARIABLE} to its folder")


def _make_certificate(folder: Path) -> tuple[Path, Path]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl to make a certificate: apt-get install openssl")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1,DNS:img.example.org,DNS:a.example.org"),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for localhost and 127.0.0.1, and its key; skip the test if openssl is missing."""
    return _make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="session")
def renewed_certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Another certificate for the same names, and its key."""
    return _make_certificate(tmp_path_factory.mktemp("renewed"))


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The folder of the embedded default model; skip the test if its package is not installed."""
    try:
        return default_model_folder()
    except UsageError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def random_model(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Save a tiny random model with the default model's tokenizer: `random_model("BertModel", hidden_size=32)`."""

    def save(class_name: str, **config: Any) -> Path:
        folder = tmp_path_factory.mktemp("model") / class_name
        return save_random_model(folder, class_name, default_model, **config)

    return save


@pytest.fixture(scope="session", autouse=True)
def _one_certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep one certificate: each httpx client reads all of certifi's, which takes 30 ms, and tests need none."""
    first, end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----\n")
    file = tmp_path_factory.mktemp("certificates") / "one.pem"
    file.write_text(first + end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certifi, "where", lambda: str(file))
        yield


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Undoes the number of threads that an engine in this process sets: two threads per test process cost much time."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def has_isa(name: str) -> bool:
    """Returns whether the native kernels can use an instruction set here."""
    try:
        CpuLibrary(1, isa=name).close()
    except CpuKernelError:
        return False
    return True


@pytest.fixture(scope="session")
def build_amx_model() -> Callable[..., Path]:
    """Compiles the library with emulated AMX, and with emulated vectors if the processor has no avx512bf16.

    The other instruction sets get the flags `others`, if given.
    """

    def build_model(target: Path, *flags: str, others: Sequence[str] | None = None) -> Path:
        isas = {} if others is None else {name: others for name in X86_ISAS if name != "amx"}
        if has_isa("avx512bf16"):
            return build(target, flags=("-DAMX_MODEL=1", "-O1", *flags), isas=isas)
        isas["amx"] = ("-DHAS_AMX=1",)
        return build(target, flags=("-DAMX_MODEL=2", "-O1", "-Wno-psabi", *flags), isas=isas)

    return build_model


@pytest.fixture(scope="session")
def amx_model(build_amx_model: Callable[..., Path]) -> Path:
    """A library that emulates AMX in C (amx_model.h). Later runs with the same sources use it too."""
    folder = ROOT / "build" / "amx_model"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{digest()}-{zlib.crc32(Path(__file__).read_bytes())}-{has_isa('avx512bf16'):d}.so"
    try:
        CpuLibrary(1, isa="plain").close()
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one process compiles it
            # The tests use no other instruction set of this library, so those may compile without optimization.
            return library if library.is_file() else build_amx_model(library, others=("-O0",))
    except (CpuKernelError, NoCompilerError, subprocess.CalledProcessError) as error:
        pytest.skip(str(error))


@pytest.fixture(params=ISAS)
def library(request: pytest.FixtureRequest) -> Iterator[CpuLibrary]:
    """Two lanes of each instruction set of this processor. AMX is emulated on a processor with avx512bf16.

    On other processors emulated AMX would take minutes; only tests/kernels/cpu/test_amx.py uses it there.
    """
    try:
        opened = CpuLibrary(2, isa=request.param)
    except CpuKernelError as error:
        if request.param != "amx" or not has_isa("avx512bf16"):
            pytest.skip(str(error))
        opened = CpuLibrary(2, isa="amx", path=request.getfixturevalue("amx_model"))
    with opened:
        yield opened


@pytest.fixture
def three_lane_library() -> Iterator[CpuLibrary]:
    """Three lanes of the best instruction set of this processor."""
    try:
        opened = CpuLibrary(3)
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
    """Excludes modules and tests, a million objects, from garbage collection: tests and servers call gc.collect."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Runs a test marked `alone` while the other processes of this run wait."""
    folder = shared_folder(item.config)
    if folder is None:
        return (yield)
    kind = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    with (folder / "tests.lock").open("w") as running:
        with (folder / "waiting.lock").open("w") as waiting:
            fcntl.flock(waiting, fcntl.LOCK_EX)  # a waiting exclusive test stops further shared ones
            fcntl.flock(running, kind)
        return (yield)
