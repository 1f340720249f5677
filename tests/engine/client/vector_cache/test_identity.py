"""The identity of a model: every file and every resolved value that decides a vector changes it, by itself."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.client.vector_cache import keys
from penstock.engine.client.vector_cache.keys import (
    CHANGES_NO_VECTOR,
    UnknownIdentityError,
    identity_of,
    stamp_of,
)
from penstock.engine.protocol.model_info import DenseSpec, ModelInfo
from penstock.engine.protocol.multi_vector import MultiVector, QueryExpansion, SparseKind, SparsePooling, TokenHeads
from penstock.engine.protocol.tasks import PoolingType

from ..word_model import info as info_of

DENSE = DenseSpec(folder="2_Dense", in_features=4, out_features=2, bias=True, activation="Tanh")
OTHERS: dict[str, Any] = {
    "architecture": "BertModel",
    "model_type": "bert",
    "packed": False,
    "kind": "sequence_classifier",
    "tasks": ("embed",),
    "hidden_size": 5,
    "vocab_size": 12,
    "embedding_size": 2,
    "sequence_pooling": (PoolingType.CLS,),
    "num_attention_heads": 2,
    "token_pooling": PoolingType.STEP,
    "include_prompt": False,
    "dense": (DENSE,),
    "attention_head": 1,
    "multi_vector": MultiVector(expansion=QueryExpansion(length=8)),
    "sparse": SparsePooling(kind=SparseKind.TOKEN_WEIGHTS),
    "token_heads": TokenHeads(weights_file="sparse_linear.pt"),
    "is_causal": True,
    "dtype": "bfloat16",
    "device": "cuda",
    "kernels": "native, avx512",
    "arithmetic": "bfloat16",
    "config": {"hidden_size": 4, "rope_theta": 1},
}
"""For each field of ModelInfo that is part of the keys, another value."""
UNUSED: dict[str, Any] = {
    "name": "other",
    "max_model_len": 8,
    "normalize": False,
    "dimensions": 2,
    "is_matryoshka": True,
    "labels": ("a",),
    "enable_chunked_processing": True,
    "prompts": {"query": "query: "},
    "default_prompt_name": "query",
    "do_lower_case": True,
    "auto_truncate": True,
    "sources": {"dtype": "--dtype"},
    "num_lanes": 3,
}


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


def test_every_field_is_accounted_for() -> None:
    assert {field.name for field in dataclasses.fields(ModelInfo)} == set(OTHERS) | CHANGES_NO_VECTOR
    assert set(UNUSED) < CHANGES_NO_VECTOR


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_each_field_changes_it(info: ModelInfo, name: str) -> None:
    changed = dataclasses.replace(info, **{name: OTHERS[name]})
    assert getattr(changed, name) != getattr(info, name)
    assert identity_of(changed) != identity_of(info)


@pytest.mark.parametrize("name", sorted(UNUSED))
def test_what_decides_the_tokens_only_does_not(info: ModelInfo, name: str) -> None:
    assert identity_of(dataclasses.replace(info, **{name: UNUSED[name]})) == identity_of(info)


def test_the_contents_of_the_files_change_it_and_not_their_place(info: ModelInfo, folder: Path) -> None:
    before = identity_of(info)
    moved = shutil.copytree(folder, folder.parent / "moved")
    assert identity_of(dataclasses.replace(info, path=str(moved))) == before
    for name, content in {
        "model.safetensors": bytes(999) + b"\1",  # of the same size
        "config.json": b"{ }",
        "modeling_own.py": b"",
        "sparse_linear.pt": b"",
    }.items():
        (moved / name).write_bytes(content)
        after = identity_of(dataclasses.replace(info, path=str(moved)))
        assert after != before, name
        before = after


@pytest.mark.parametrize("place", ["2_Dense", "../2_Dense"])
def test_dense_modules_are_files_of_the_model(info: ModelInfo, folder: Path, place: str) -> None:
    dense = folder / place
    dense.mkdir()
    (dense / "model.safetensors").write_bytes(b"a")
    info = dataclasses.replace(info, dense=(dataclasses.replace(DENSE, folder=place),))
    before = identity_of(info)
    (dense / "model.safetensors").write_bytes(b"b")
    assert identity_of(info) != before


def test_our_arithmetic_and_the_libraries_change_it(info: ModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    identities = [identity_of(info)]
    monkeypatch.setattr(keys, "NUMERICS", keys.NUMERICS + 1)
    identities.append(identity_of(info))
    real = importlib.metadata.version
    for library in ("numpy", "torch"):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, own=library: real(name) + "1" * (name == own))
        identities.append(identity_of(info))
    assert len(set(identities)) == 4


def test_without_files_or_with_code_from_elsewhere_it_is_not_known(info: ModelInfo) -> None:
    config = {"auto_map": {"AutoModel": "owner/code--modeling.Model"}}
    with pytest.raises(UnknownIdentityError, match="another repository"):
        identity_of(dataclasses.replace(info, packed=False, config=config))
    identity_of(dataclasses.replace(info, config=config))  # penstock's own model runs
    with pytest.raises(UnknownIdentityError, match="holds none"):
        identity_of(dataclasses.replace(info, path="/nowhere"))


def test_reading_ends_when_it_is_not_wanted_any_more(info: ModelInfo) -> None:
    with pytest.raises(UnknownIdentityError, match="not wanted"):
        identity_of(info, lambda: False)


def test_the_stamp_tells_of_every_write(folder: Path) -> None:
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
