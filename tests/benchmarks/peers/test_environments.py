"""Environments of the peers."""

import re
from pathlib import Path

import pytest
from peers import environments
from peers.environments import REQUIREMENTS, Environment, InstallError

MISSING = "no-such-package-of-penstock"


@pytest.fixture
def pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The requirements of an environment `tiny`. No package index is available."""
    folder = tmp_path / "requirements"
    folder.mkdir()
    monkeypatch.setattr(environments, "REQUIREMENTS", folder)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null", "PIP_FIND_LINKS": ""}.items():
        monkeypatch.setenv(name, value)
    (folder / "tiny.txt").write_text("# nothing\n")
    return folder / "tiny.txt"


@pytest.mark.parametrize("file", sorted(REQUIREMENTS.glob("*.txt")), ids=lambda file: file.stem)
def test_every_package_is_pinned(file: Path, tmp_path: Path) -> None:
    pins = Environment(file.stem, tmp_path).pins()
    assert pins
    assert not [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)]
    assert not [pin for pin in pins if pin.startswith("torch==") and pin != "torch==2.13.0"]


def test_environment_is_installed_once_per_pins(tmp_path: Path, pins: Path) -> None:
    environment = Environment("tiny", tmp_path)
    environment.install()
    assert environment.python.exists()
    mark = environment.home / "mark"
    mark.touch()
    environment.install()
    assert mark.exists()
    pins.write_text(f"{MISSING}==1\n")
    for _ in range(2):  # a failed installation is repeated
        with pytest.raises(InstallError, match=f"(?s)No matching distribution.*{MISSING}"):
            environment.install()
    assert not mark.exists()


def test_full_disk_is_reported(tmp_path: Path, pins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "FREE_BYTES", 2**70)
    with pytest.raises(InstallError, match="GiB free in"):
        Environment("tiny", tmp_path).install()
