"""Checkpoints of one file or of shards, and damaged weight files."""

import json
from collections.abc import Callable
from pathlib import Path
from weakref import ref

import numpy as np
import pytest

from penstock.engine.checkpoint.files import (
    Checkpoint,
    TensorEntry,
    check_file,
    check_weights,
    open_checkpoint,
    read_header,
)
from penstock.engine.checkpoint.views import Array
from penstock.engine.protocol.errors import WeightError

SIZES = {"small": 1 << 10, "large": 33 << 20}


class File:
    """A file with a small and a large tensor of bytes. They take no memory."""

    def keys(self) -> list[str]:
        return list(SIZES)

    def get_tensor(self, name: str) -> Array:
        return np.broadcast_to(np.zeros(1, np.uint8), SIZES[name])


def test_file_is_closed_after_many_bytes_were_read() -> None:
    opened: list[ref[File]] = []

    def open_file(path: Path) -> File:
        file = File()
        opened.append(ref(file))
        return file

    checkpoint = Checkpoint(dict.fromkeys(SIZES, Path("model.safetensors")), open_file)
    for _ in range(3):
        checkpoint.read("small")
    assert [file() is None for file in opened] == [False]
    tensor = checkpoint.read("large")
    assert tensor.nbytes == SIZES["large"]
    assert [file() is None for file in opened] == [True]
    checkpoint.read("small")
    assert [file() is None for file in opened] == [True, False]
    checkpoint.close()
    assert [file() is None for file in opened] == [True, True]


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:53aa\nsize 90868376\n"


def safetensors(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_header_gives_tensors_and_their_offsets(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}}
    content = safetensors(header, bytes(8))
    (tmp_path / "model.safetensors").write_bytes(content)
    assert read_header(tmp_path / "model.safetensors") == {
        "a": TensorEntry("F32", (2, 1), len(content) - 8, len(content))
    }


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"abc", "its header would have"),
        (POINTER, "is a Git LFS pointer, not the file itself; run `git lfs pull`"),
        (safetensors(b"\xff\xfe{"), "is not UTF-8 text"),
        (safetensors(b"{nope"), "is not valid JSON"),
        (safetensors([1]), "is not a JSON object"),
        (safetensors(b"[" * 100_000), "nested too deeply"),
        (safetensors({"a": [1]}), "dtype, shape and data_offsets of 'a'"),
        (safetensors({"a": {"dtype": "F32", "shape": [1]}}), "dtype, shape and data_offsets of 'a'"),
        (safetensors({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(4)), "damaged at 'a'"),
        (safetensors({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(3)), "tensors end at byte"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "its header would have 1099511627776 bytes"),
    ],
)
def test_damaged_safetensors_file_is_named_with_its_fault(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightError) as caught:
        check_weights(tmp_path)
    assert str(tmp_path / "model.safetensors") in caught.value.message
    assert reason in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(("content", "reason"), [(b"", "is empty"), (POINTER, "Git LFS pointer")])
def test_damaged_torch_file_is_named_with_its_fault(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(WeightError, match=reason):
        check_file(tmp_path / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "has no weights: neither model"),
        (lambda path: path.symlink_to("lost"), r"model\.safetensors is a link to a file that does not exist"),
        (lambda path: path.mkdir(), r"model\.safetensors is a folder; it must be a weight file"),
    ],
)
def test_missing_weight_file_is_named(make: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    make(tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=message), open_checkpoint(tmp_path, lambda _: File()):
        pass


def test_header_above_the_limit_of_the_library_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(100_000_009)  # takes no space
    with pytest.raises(WeightError, match="its header has 100000001 bytes; the limit is 100000000"):
        read_header(path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    check_weights(tmp_path)  # no weights are no error here
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with pytest.raises(WeightError, match=r"one\.safetensors"):
        check_weights(tmp_path)
