from pathlib import Path

import torch
from safetensors.torch import save_file

from penstock.server.models.weight_files import WeightFiles


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
