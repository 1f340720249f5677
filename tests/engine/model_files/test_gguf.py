"""Damaged, unsupported and ambiguous GGUF files are rejected by name."""

import random
import struct

import numpy as np
import pytest

from penstock.engine.checkpoint.views import GgufFile
from penstock.engine.model_files.gguf import read_gguf
from penstock.engine.model_files.model_folder import locate_model
from penstock.engine.protocol.errors import ModelLoadError, UnsupportedModelError, WeightError

from ...gguf_files import write_gguf
from ...tables import cases
from .folders import BERT, write

VALUES = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
METADATA = {
    "general.architecture": "bert",
    "text": "ü",
    "flag": True,
    "number": 7,
    "words": ["a", "", "▁b"],
    "values": np.arange(3, dtype=np.int32),
}
TENSORS = {
    "token_embd.weight": ("Q8_0", VALUES),
    "token_types.weight": ("F16", VALUES),
    "token_embd_norm.bias": ("F32", VALUES[0]),
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("version", [2, 3])
def test_header_and_values_equal_those_written(version, path):
    found = write_gguf(path, METADATA, TENSORS | {"position_embd.weight": ("BF16", VALUES)}, version)
    metadata = dict(read_gguf(path).metadata)
    assert metadata == METADATA | {"values": (0, 1, 2)}
    file = GgufFile(path)
    words = file.get_tensor("embeddings.word_embeddings.weight")
    assert words.dtype == np.float32
    assert np.array_equal(words, found["token_embd.weight"])
    assert np.array_equal(file.get_tensor("embeddings.token_type_embeddings.weight"), found["token_types.weight"])
    positions = file.get_tensor("embeddings.position_embeddings.weight").astype(np.uint32) << 16
    assert np.array_equal(positions.view(np.float32), found["position_embd.weight"])


def test_truncated_file_is_rejected_at_every_length(path):
    write_gguf(path, METADATA, TENSORS)
    content = path.read_bytes()
    for size in [*range(600), len(content) - 1, len(content) - 32]:
        path.write_bytes(content[:size])
        with pytest.raises(WeightError, match=r"model\.gguf cannot be read"):
            read_gguf(path)


def test_changed_bytes_raise_only_load_errors(path):
    write_gguf(path, METADATA, TENSORS)
    content, numbers = path.read_bytes(), random.Random(0)
    outcomes = set()
    for _ in range(2000):
        changed = bytearray(content)
        for _ in range(numbers.randint(1, 3)):
            changed[numbers.randrange(500)] = numbers.choice((0, 1, 0x7F, 0xFF, numbers.randrange(256)))
        path.write_bytes(changed)
        try:
            GgufFile(path)
            outcomes.add("read")
        except ModelLoadError as error:
            assert str(path) in error.message  # noqa: PT017
            outcomes.add(type(error))
    assert outcomes == {"read", WeightError, UnsupportedModelError}


def header(num_tensors=0, num_keys=0, rest=b"", version=3):
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + rest


KEY = struct.pack("<Q", 1) + b"k"
ALIGNMENT = struct.pack("<Q", 17) + b"general.alignment"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"PK\x03\x04" + bytes(40), "does not begin with GGUF"),
        (header(num_keys=2**63), "but the file has 24"),
        (header(num_keys=1, rest=struct.pack("<Q", 2**62)), "but the file has 32"),
        (header(num_keys=1, rest=KEY + struct.pack("<IIQ", 9, 0, 2**60)), "but the file has"),
        (header(num_keys=1, rest=KEY + struct.pack("<IIQ", 9, 8, 2**60)), "but the file has"),
        (header(num_keys=1, rest=KEY + struct.pack("<IIQ", 9, 9, 1)), "unknown type 9"),
        (header(num_keys=2, rest=(KEY + struct.pack("<IB", 7, 1)) * 2), "key 'k' twice"),
        (header(num_tensors=1, rest=KEY + struct.pack("<I", 5)), "more than 4 axes"),
        (header(num_tensors=1, rest=KEY + struct.pack("<IQIQ", 1, 2**40, 0, 0)), "ends at byte"),
        (header(num_tensors=1, rest=KEY + struct.pack("<IQIQ", 1, 33, 8, 0)), r"shape \[33\] in Q8_0"),
        (header(num_tensors=1, rest=KEY + struct.pack("<IQIQ", 1, 32, 12, 0)), "quantised with Q4_K; penstock reads"),
        (header(num_tensors=1, rest=KEY + struct.pack("<IQIQ", 1, 32, 99, 0)), "quantised with type 99"),
        (header(num_keys=1, rest=ALIGNMENT + struct.pack("<II", 4, 12)), "alignment is 12; it must be a multiple of 8"),
        (header(num_keys=1, rest=ALIGNMENT + struct.pack("<II", 4, 0)), "alignment is 0"),
        (header(version=1), "version 0x1"),
        (header(version=0x03000000), "version 0x3000000 of GGUF.*little-endian"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
)
def test_damaged_header_is_described(content, message, path):
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        read_gguf(path)


def test_folder_with_one_gguf_file_is_that_file(path, tmp_path):
    write_gguf(path, METADATA, TENSORS)
    assert locate_model(str(tmp_path)) == locate_model(str(path)) == path
    write(tmp_path, {"config.json": BERT})  # some folders on the hub have both
    assert locate_model(str(tmp_path)) == path
    (tmp_path / "second.gguf").touch()
    with pytest.raises(UnsupportedModelError, match=r"several GGUF files: model.gguf, second.gguf\. Give the path"):
        locate_model(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert locate_model(str(tmp_path)) == tmp_path
    with pytest.raises(ModelLoadError, match=r"There is no file 'none\.gguf'"):
        locate_model("none.gguf")


@cases(__file__, "changes", "message")
def test_unsupported_gguf_model_is_described(changes, message, path):
    write_gguf(path, METADATA | changes, TENSORS)
    with pytest.raises(UnsupportedModelError, match=message):
        GgufFile(path)
