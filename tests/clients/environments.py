"""An environment for each client under build/clients, with the pins of its requirements.txt or package.json."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent.parent / "build" / "clients"
PYTEST = "pytest==9.2.0"
STAMP = ".installed"
INSTALL_TIMEOUT_S = 900


class InstallError(Exception):
    """The packages of a client cannot be installed."""


@dataclass(frozen=True)
class Client:
    """A client library, or several in one environment. `name` is its folder here and under build/clients."""

    name: str

    @property
    def folder(self) -> Path:
        return HERE / self.name

    @property
    def home(self) -> Path:
        return BUILD / self.name

    @property
    def is_node(self) -> bool:
        return (self.folder / "package.json").exists()

    def pins(self) -> dict[str, str]:
        """Package names to versions."""
        if self.is_node:
            return json.loads((self.folder / "package.json").read_text())["dependencies"]
        lines = (self.folder / "requirements.txt").read_text().split()
        return dict(line.split("==") for line in lines)

    def install(self) -> None:
        """Create the environment, unless it has these pins.

        Raises:
            InstallError: A package, or the program that installs it, is not available.
        """
        stamp = self.home / STAMP
        wanted = f"{sys.version} {PYTEST} {self.pins()}"
        if stamp.exists() and stamp.read_text() == wanted:
            return
        print(f"Installing {self.name}", flush=True)
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir(parents=True)
        if self.is_node:
            shutil.copy(self.folder / "package.json", self.home)
            _run(["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"], self.home)
        else:
            _run([sys.executable, "-m", "venv", "--without-pip", "."], self.home)
            pip = [sys.executable, "-m", "pip", "--python", "bin/python", "install", "--quiet", "--no-input"]
            _run([*pip, PYTEST, "--requirement", str(self.folder / "requirements.txt")], self.home)
        stamp.write_text(wanted)

    def command(self) -> list[str]:
        """The command that runs the checks in `home`."""
        if self.is_node:
            # Node searches packages beside the importing file.
            names = [shutil.copy(file, self.home) for file in self.folder.glob("check_*.mjs")]
            shutil.copy(HERE / "plain_http.mjs", self.home)
            return ["node", "--test", *names]
        files = map(str, self.folder.glob("check_*.py"))
        # Excludes the settings and fixtures of the project.
        own = ["--config-file", "/dev/null", "--rootdir", str(self.folder), "--confcutdir", str(self.folder)]
        quiet = ["--quiet", "--disable-warnings", "-p", "no:cacheprovider", "--import-mode=importlib"]
        return ["bin/python", "-P", "-m", "pytest", *own, *quiet, *files]


def clients() -> list[Client]:
    """All clients, Python first."""
    folders = [*HERE.glob("*/requirements.txt"), *HERE.glob("*/package.json")]
    return sorted((Client(path.parent.name) for path in folders), key=lambda client: (client.is_node, client.name))


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
