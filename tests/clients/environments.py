"""An environment for each client under build/clients, with the pins of its manifest.

The manifest is requirements.txt, package.json, go.mod, Cargo.toml or pom.xml. It names the kind of the client.
"""

import json
import re
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent.parent / "build" / "clients"
PYTEST = "pytest==9.2.0"
STAMP = ".installed"
INSTALL_TIMEOUT_S = 900
POM = {"": "http://maven.apache.org/POM/4.0.0"}


class InstallError(Exception):
    """The packages of a client cannot be installed."""


@dataclass(frozen=True)
class Client(ABC):
    """A client library, or several in one environment. `name` is its folder here and under build/clients.

    Attributes:
        manifest: The file with the pinned packages.
        program: Installs the packages.
    """

    name: str
    manifest: ClassVar[str]
    program: ClassVar[str]

    @property
    def folder(self) -> Path:
        return HERE / self.name

    @property
    def home(self) -> Path:
        return BUILD / self.name

    @property
    def is_runnable(self) -> bool:
        """Whether this machine has the toolchain."""
        return shutil.which(self.program) is not None

    @abstractmethod
    def pins(self) -> dict[str, str]:
        """Package names to versions."""

    @abstractmethod
    def command(self) -> list[str]:
        """The command that runs the checks in `home`."""

    @abstractmethod
    def _install(self) -> None:
        """Download and compile the packages in `home`, which is empty."""

    def install(self) -> None:
        """Create the environment, unless it has these pins.

        Raises:
            InstallError: A package is not available.
        """
        stamp = self.home / STAMP
        wanted = f"{sys.version} {PYTEST} {self.pins()}"
        if stamp.exists() and stamp.read_text() == wanted:
            return
        print(f"Installing {self.name}", flush=True)
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir(parents=True)
        self._install()
        stamp.write_text(wanted)

    def _copy(self) -> None:
        """Copy the manifest, the lock file and the checks to `home`, where compilers write."""
        shutil.copytree(self.folder, self.home, dirs_exist_ok=True)


class PythonClient(Client):
    manifest = "requirements.txt"
    program = sys.executable

    def pins(self) -> dict[str, str]:
        lines = (self.folder / self.manifest).read_text().split()
        return dict(line.split("==") for line in lines)

    def _install(self) -> None:
        _run([sys.executable, "-m", "venv", "--without-pip", "."], self.home)
        pip = [sys.executable, "-m", "pip", "--python", "bin/python", "install", "--quiet", "--no-input"]
        _run([*pip, PYTEST, "--requirement", str(self.folder / self.manifest)], self.home)

    def command(self) -> list[str]:
        files = map(str, self.folder.glob("check_*.py"))
        # Excludes the settings and fixtures of the project.
        own = ["--config-file", "/dev/null", "--rootdir", str(self.folder), "--confcutdir", str(self.folder)]
        quiet = ["--quiet", "--disable-warnings", "-p", "no:cacheprovider", "--import-mode=importlib"]
        return ["bin/python", "-P", "-m", "pytest", *own, *quiet, *files]


class NodeClient(Client):
    manifest = "package.json"
    program = "npm"

    def pins(self) -> dict[str, str]:
        return json.loads((self.folder / self.manifest).read_text())["dependencies"]

    def _install(self) -> None:
        self._copy()
        _run(["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"], self.home)

    def command(self) -> list[str]:
        self._copy()  # Node searches packages beside the importing file
        shutil.copy(HERE / "plain_http.mjs", self.home)
        return ["node", "--test", *(file.name for file in self.folder.glob("check_*.mjs"))]


class GoClient(Client):
    manifest = "go.mod"
    program = "go"

    def pins(self) -> dict[str, str]:
        # `require NAME VERSION` on one line: packages that others require are in a block.
        return dict(re.findall(r"^require (\S+) (\S+)$", (self.folder / self.manifest).read_text(), re.MULTILINE))

    def _install(self) -> None:
        self._copy()
        _run(["go", "test", "-mod=readonly", "-c", "-o=checks"], self.home)

    def command(self) -> list[str]:
        self._copy()
        return ["go", "test", "-mod=readonly", "-count=1", "."]


class RustClient(Client):
    manifest = "Cargo.toml"
    program = "cargo"

    def pins(self) -> dict[str, str]:
        packages = tomllib.loads((self.folder / self.manifest).read_text())["dependencies"]
        versions = {name: pin if isinstance(pin, str) else pin["version"] for name, pin in packages.items()}
        return {name: version.removeprefix("=") for name, version in versions.items()}

    def _install(self) -> None:
        self._copy()
        _run(["cargo", "test", "--locked", "--quiet", "--no-run", "--target-dir", "target"], self.home)

    def command(self) -> list[str]:
        self._copy()
        return ["cargo", "test", "--locked", "--offline", "--quiet", "--target-dir", "target"]


class JavaClient(Client):
    manifest = "pom.xml"
    program = "mvn"

    def pins(self) -> dict[str, str]:
        packages = ET.parse(self.folder / self.manifest).findall("dependencies/dependency", POM)
        return {_text(package, "artifactId"): _text(package, "version") for package in packages}

    def _install(self) -> None:
        self._copy()
        _run(["mvn", "--batch-mode", "--quiet", "test-compile"], self.home)

    def command(self) -> list[str]:
        self._copy()
        levels = ["defaultLogLevel=warn", "log.org.apache.maven.plugin.surefire.SurefireMojo=info"]
        return ["mvn", "--batch-mode", *(f"-Dorg.slf4j.simpleLogger.{level}" for level in levels), "test"]


KINDS: tuple[type[Client], ...] = (PythonClient, NodeClient, GoClient, RustClient, JavaClient)


def clients() -> list[Client]:
    """All clients, Python first."""
    return [kind(path.parent.name) for kind in KINDS for path in sorted(HERE.glob(f"*/{kind.manifest}"))]


def _text(element: ET.Element, tag: str) -> str:
    text = element.findtext(tag, namespaces=POM)
    assert text, tag
    return text


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise InstallError(str(error)) from None
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise InstallError("\n".join(line for line in lines[-12:] if not line.startswith("WARNING")))
