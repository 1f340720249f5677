"""Models with sparse vectors: the outputs and settings that penstock reads from their files."""

from pathlib import Path

import pytest

from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.protocol import errors
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.tasks import PoolingTask

from ...tables import cases
from ..model_folders import change_json, write_m3, write_splade


def test_missing_head_removes_its_task(tmp_path: Path) -> None:
    (write_m3(tmp_path) / "sparse_linear.pt").unlink()
    info = resolve_model(EngineConfig(model=str(tmp_path)))
    assert info.sparse is None
    assert info.token_heads is not None
    assert PoolingTask.SPARSE_EMBED not in info.tasks


@cases(__file__, "name", "change", "message")
def test_unsupported_settings_are_rejected(tmp_path: Path, name: str, change: dict[str, str], message: str) -> None:
    folder = write_splade(tmp_path, "BertForMaskedLM")
    change_json(folder / name, change)
    with pytest.raises(errors.UnsupportedModelError, match=message):
        resolve_model(EngineConfig(model=str(folder)))
