from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.server.models.weight_files import WeightFiles


def header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def test_parameters_in_headers_are_counted(tmp_path: Path) -> None:
    (tmp_path / "2_Dense").mkdir()
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, tmp_path / "model.safetensors", {"format": "pt"})
    save_file({"c": torch.tensor(1.0)}, tmp_path / "2_Dense" / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 1000)  # another format of the same weights
    files = WeightFiles.of(str(tmp_path))
    paths = list(tmp_path.rglob("*.safetensors"))
    assert files.num_parameters == 23
    assert files.num_bytes == sum(path.stat().st_size for path in paths)
    assert files.modified_s == max(path.stat().st_mtime for path in paths)
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert WeightFiles.of(str(tmp_path)).num_parameters == 23


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("pytorch_model.bin", b"x" * 1000),
        ("model.safetensors", b"abc"),
        ("model.safetensors", header(b"\xff\xfe{")),
        ("model.safetensors", header(b'{"a": {"dtype": "F32"}}')),
        ("model.safetensors", header(b'{"a": {"dtype": "F32", "shape": "xy", "data_offsets": [0, 4]}}')),
        ("model.safetensors", header(b"[" * 100_000)),
        ("model.safetensors", (1 << 40).to_bytes(8, "little") + b"{}"),
    ],
)
def test_file_without_a_valid_header_counts_no_parameters(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert WeightFiles.of(str(tmp_path))[:2] == (len(content), 0)


def test_folders_and_dangling_links_are_no_weight_files(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    (tmp_path / "other.safetensors").symlink_to(tmp_path / "nothing")
    assert WeightFiles.of(str(tmp_path)) == (0, 0, tmp_path.stat().st_mtime)
