import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.engine.protocol.setting import short_count
from penstock.server.models.weight_files import WeightHeaderCache, WeightSummary

from ...gguf_files import write_gguf


def test_parameters_in_headers_are_counted(tmp_path: Path) -> None:
    (tmp_path / "2_Dense").mkdir()
    save_file({"a": np.zeros((3, 5)), "b": np.zeros(7)}, tmp_path / "model.safetensors", {"format": "pt"})
    save_file({"c": np.array(1.0)}, tmp_path / "2_Dense" / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 1000)  # another format of the same weights
    files = WeightSummary.of(str(tmp_path))
    paths = list(tmp_path.rglob("*.safetensors"))
    assert (files.num_parameters, files.format) == (23, "safetensors")
    assert files.num_bytes == sum(path.stat().st_size for path in paths)
    assert files.modified_s == max(path.stat().st_mtime for path in paths)
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert WeightSummary.of(str(tmp_path)).num_parameters == 23


def test_packed_and_gguf_weights_are_counted(tmp_path: Path) -> None:
    save_file({"a.weight_packed": np.zeros((2, 3), np.int32)}, tmp_path / "model.safetensors")
    assert WeightSummary.of(str(tmp_path)).num_parameters == 4 * 2 * 3
    gguf = tmp_path / "model.gguf"
    write_gguf(gguf, {}, {"a": ("F32", np.zeros((2, 5), np.float32))})
    files = WeightSummary.of(str(gguf))
    assert (files.num_parameters, files.num_bytes, files.format) == (10, gguf.stat().st_size, "gguf")
    assert files.bytes_by_dtype() == {"float32": 40, "bfloat16": 20, "float16": 20}


def test_folders_without_headers_have_no_parameters(tmp_path: Path) -> None:
    empty = WeightSummary.of(str(tmp_path))
    assert empty == (0, 0, tmp_path.stat().st_mtime, "")
    assert empty.bytes_by_dtype() == {}
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 7)
    (tmp_path / "model.pt").write_bytes(b"x" * 5)
    files = WeightSummary.of(str(tmp_path))
    assert (files.num_bytes, files.num_parameters, files.format) == (12, 0, "pytorch")


def test_header_is_read_again_after_a_change(tmp_path: Path) -> None:
    file, headers = tmp_path / "model.safetensors", WeightHeaderCache()
    save_file({"a": np.zeros(3)}, file)
    assert headers.num_parameters(file) == 3
    stat = file.stat()
    file.write_bytes(b"x" * stat.st_size)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert headers.num_parameters(file) == 3, "the file looks unchanged"
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1000))
    assert headers.num_parameters(file) == 0


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999"), (1000, "1.0K"), (22_713_216, "22.7M"), (10**6, "1.0M"), (10**9, "1.0B"), (7_250_000_000, "7.2B")],
)
def test_counts_are_shortened(count: int, text: str) -> None:
    assert short_count(count) == text
