"""Keys and identities: everything that decides a vector changes them, and nothing else does."""

import dataclasses
import importlib.metadata
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engine.client.vector_cache import keys
from penstock.engine.client.vector_cache.keys import (
    CHANGES_NO_VECTOR,
    KEY_BYTES,
    UNKEYED_PARAMS,
    CacheKeyBuilder,
    UnknownIdentityError,
    identity_of,
    stamp_of,
)
from penstock.engine.protocol.images import ImagePatches
from penstock.engine.protocol.messages import TokenizedInput
from penstock.engine.protocol.model_info import AdapterSpec, DenseSpec, ModelInfo
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.tasks import PoolingTask

from ..word_model import info as info_of

# Keys

SECRET, IDENTITY = bytes(range(32)), b"model"
PARAMS = PoolingParams(task=PoolingTask.EMBED, normalize=True, use_activation=True)
IDS = np.array([101, 7, 8, 9, 102], np.int32)
TOKENS = TokenizedInput(IDS, type_boundary=3, num_skipped_tokens=1, num_masked=1)


def key(
    tokens: TokenizedInput = TOKENS,
    params: PoolingParams = PARAMS,
    namespace: str = "one",
    finish: str = "",
    secret: bytes = SECRET,
    identity: bytes = IDENTITY,
) -> bytes:
    (made,) = CacheKeyBuilder(secret, identity, 384).build([tokens], params, namespace, finish)
    return made


def test_equal_inputs_have_equal_keys() -> None:
    again = TokenizedInput(np.array([0, *IDS], np.int64).astype(np.int32)[1:], 3, 1, 1)
    assert key() == key(again, dataclasses.replace(PARAMS))
    assert key(params=PARAMS.clone(dimensions=384)) == key()  # the whole width
    assert len(key()) == KEY_BYTES


@pytest.mark.parametrize(
    "changes",
    [
        {"namespace": "two"},
        {"finish": "late True [(0, 2)]"},
        {"secret": bytes(32)},
        {"identity": b"another"},
        {"tokens": dataclasses.replace(TOKENS, token_ids=IDS[:-1])},
        {"tokens": dataclasses.replace(TOKENS, token_ids=np.array([101, 7, 8, 10, 102], np.int32))},
        {"tokens": dataclasses.replace(TOKENS, type_boundary=2)},
        {"tokens": dataclasses.replace(TOKENS, num_skipped_tokens=0)},
        {"tokens": dataclasses.replace(TOKENS, num_masked=0)},
        {"tokens": dataclasses.replace(TOKENS, images=(ImagePatches(np.zeros((4, 3), np.uint8), (2, 2)),))},
    ],
    ids=str,
)
def test_each_part_changes_the_key(changes: dict[str, Any]) -> None:
    assert key(**changes) != key()


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(PoolingParams)])
def test_each_parameter_that_decides_the_vector_changes_the_key(name: str) -> None:
    changed = PARAMS.clone(**{name: "another value"})
    assert (key(params=changed) == key()) is (name in UNKEYED_PARAMS)


# Identities

DENSE = DenseSpec(folder="2_Dense", in_features=4, out_features=2, bias=True, activation="Tanh")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(1000))
    return folder


@pytest.fixture
def info(folder: Path) -> ModelInfo:
    return info_of(path=str(folder), config={"hidden_size": 4})


@pytest.mark.parametrize("name", sorted({field.name for field in dataclasses.fields(ModelInfo)} - {"path"}))
def test_each_field_that_decides_vectors_changes_the_identity(info: ModelInfo, name: str) -> None:
    values = {"dense": (DENSE,), "query_model": info, "image": info, "adapters": (AdapterSpec(name="legal", index=0),)}
    value: Any = values.get(name, "another value")
    changed = dataclasses.replace(info, **{name: value})
    assert (identity_of(changed) == identity_of(info)) is (name in CHANGES_NO_VECTOR)


def test_contents_of_files_change_the_identity_but_not_their_path(info: ModelInfo, folder: Path) -> None:
    before = identity_of(info)
    moved = shutil.copytree(folder, folder.parent / "moved")
    assert identity_of(dataclasses.replace(info, path=str(moved))) == before
    for name, content in {
        "model.safetensors": bytes(999) + b"\1",
        "config.json": b"{ }",
        "modeling_own.py": b"",
        "sparse_linear.pt": b"",
    }.items():
        (moved / name).write_bytes(content)
        after = identity_of(dataclasses.replace(info, path=str(moved)))
        assert after != before, name
        before = after


@pytest.mark.parametrize("place", ["2_Dense", "../2_Dense"])
def test_files_of_dense_modules_change_the_identity(info: ModelInfo, folder: Path, place: str) -> None:
    dense = folder / place
    dense.mkdir()
    (dense / "model.safetensors").write_bytes(b"a")
    info = dataclasses.replace(info, dense=(dataclasses.replace(DENSE, folder=place),))
    before = identity_of(info)
    (dense / "model.safetensors").write_bytes(b"b")
    assert identity_of(info) != before


def test_numerics_and_library_versions_change_the_identity(info: ModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    identities = [identity_of(info)]
    monkeypatch.setattr(keys, "NUMERICS", keys.NUMERICS + 1)
    identities.append(identity_of(info))
    real = importlib.metadata.version
    for library in ("numpy", "torch"):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, own=library: real(name) + "1" * (name == own))
        identities.append(identity_of(info))
    assert len(set(identities)) == 4


def test_identity_that_cannot_be_known_is_an_error(info: ModelInfo) -> None:
    config = {"auto_map": {"AutoModel": "owner/code--modeling.Model"}}
    with pytest.raises(UnknownIdentityError, match="another repository"):
        identity_of(dataclasses.replace(info, packed=False, config=config))
    identity_of(dataclasses.replace(info, config=config))  # a packed model does not run that code
    with pytest.raises(UnknownIdentityError, match="holds none"):
        identity_of(dataclasses.replace(info, path="/nowhere"))
    with pytest.raises(UnknownIdentityError, match="not wanted"):
        identity_of(info, lambda: False)


def test_stamp_changes_with_every_write(folder: Path) -> None:
    stamps = {stamp_of(folder)}
    status = (folder / "model.safetensors").stat()
    (folder / "model.safetensors").write_bytes(bytes(1000))
    os.utime(folder / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns))
    stamps.add(stamp_of(folder))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    stamps.add(stamp_of(folder))
    (folder / "notes.txt").write_text("")
    stamps.add(stamp_of(folder))
    assert len(stamps) == 3


def test_contents_of_a_gguf_file_change_the_identity_and_the_stamp(info: ModelInfo, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    info = dataclasses.replace(info, path=str(path), dense=())
    before = identity_of(info), stamp_of(path)
    (tmp_path / "config.json").write_text("{}")
    assert (identity_of(info), stamp_of(path)) == before
    path.write_bytes(b"GGUF ")
    after = identity_of(info), stamp_of(path)
    assert before[0] != after[0]
    assert before[1] != after[1]
