"""Servers and disks for tests of failures."""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ..servers import Launch, Server, launching

POISONED_ID = 5_000
"""The token of `small_bert` with weights of NaN."""


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Launch]:
    """Start a server in float32, by default of the embedded model: `launch("--api-workers", "2", model=folder)`."""
    with contextlib.contextmanager(launching)(tmp_path_factory) as start:

        def start_model(*flags: str, model: object = default_model, **options: Any) -> Server:
            return start(str(model), "--dtype", "float32", *flags, **options)

        yield start_model


@pytest.fixture(scope="session")
def server(launch: Launch) -> Server:
    """One server for all tests that change nothing but its engine process."""
    return launch()


@pytest.fixture(scope="session")
def small_bert(random_model: Callable[..., Path]) -> Path:
    """A random embedding model of 8 MB."""
    safetensors = pytest.importorskip("safetensors.numpy")
    folder = random_model("BertModel")
    weights = safetensors.load_file(folder / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][POISONED_ID] = float("nan")
    safetensors.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@dataclass
class SmallDisk:
    """A file system of fixed size."""

    folder: Path

    def num_free(self) -> int:
        usage = os.statvfs(self.folder)
        return usage.f_bavail * usage.f_frsize

    def fill(self) -> None:
        with contextlib.suppress(OSError), (self.folder / "filler").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        assert self.num_free() == 0

    def free(self, num_bytes: int | None = None) -> None:
        """Delete the file of `fill`, and optionally resize the disk."""
        (self.folder / "filler").unlink(missing_ok=True)
        if num_bytes is not None:
            subprocess.run(["mount", "-o", f"remount,size={num_bytes}", str(self.folder)], check=True)


@pytest.fixture
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], SmallDisk]]:
    """Mount a disk of some bytes: `small_disk(4 * MIB)`. Skip the test if this process may not mount disks."""
    disks: list[SmallDisk] = []

    def mount(num_bytes: int) -> SmallDisk:
        folder = tmp_path_factory.mktemp("disk")
        command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"needs root, to mount a disk: {done.stderr.strip()}")
        disks.append(SmallDisk(folder))
        return disks[-1]

    yield mount
    for disk in disks:
        subprocess.run(["umount", "--lazy", str(disk.folder)], check=True)
