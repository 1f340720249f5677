"""GGUF files: their header, and the config.json and the weight names of each architecture.

Source of the format: docs/gguf.md of ggml-org/ggml, versions 2 and 3. All numbers are little-endian. The header has the
magic "GGUF", the version, the number of tensors and of keys; then each key with a typed value; then each tensor with
its name, sizes (innermost first), type and offset. The offsets begin at the next multiple of general.alignment after
the header. Source of the names: the converter of llama.cpp (convert_hf_to_gguf).
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..protocol.errors import UnsupportedModelError, WeightError
from ..protocol.tasks import PoolingType
from .model_folder import LFS_HINT, is_lfs_pointer
from .sentence_transformers_files import SentenceTransformersFiles

SUPPORTED: Final = (
    "penstock reads 8-bit integer weights: GGUF files with Q8_0, and compressed-tensors in the formats int-quantized "
    "and pack-quantized. Serve the model without quantisation, or quantise it to one of these formats"
)
"""The quantised weights that penstock reads, for messages."""
_VERSIONS: Final = (2, 3)
_SCALARS: Final = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""The format of each scalar type of the metadata in the struct module."""
_STRING: Final = 8
_ARRAY: Final = 9
_ALIGNMENT: Final = "general.alignment"
_DEFAULT_ALIGNMENT: Final = 32
_MAX_DIMENSIONS: Final = 4
_BLOCKS: Final = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q8_0": (32, 34)}
"""Values and bytes of a block of each supported type."""
# fmt: off
_TYPE_NAMES: Final = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}
# fmt: on


class GgufTensor(NamedTuple):
    """A tensor of a GGUF file.

    Attributes:
        type_name: "F32", "F16", "BF16" or "Q8_0".
        shape: Size of each axis, the innermost last.
        start: Offset of the first byte in the file.
        num_bytes: Size in the file.
    """

    type_name: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a GGUF file.

    Attributes:
        metadata: Values by key: numbers, strings, lists of strings, and tuples of numbers.
        tensors: Tensors by name.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path) -> GgufHeader:
    """Returns the header of a file. Allocates at most a few times the size of the header.

    Raises:
        UnsupportedModelError: The file has another version or byte order, or a type of weights that is not supported.
        WeightError: The file cannot be read or is damaged.
    """
    try:
        if is_lfs_pointer(path):
            raise WeightError(f"{path} {LFS_HINT}.")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            return _read(path, _Cursor(memory))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise WeightError(f"{path} cannot be read: {reason}; download the model again.") from error


def _read(path: Path, cursor: _Cursor) -> GgufHeader:
    if cursor.take(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise UnsupportedModelError(
            f"{path} has version {version:#x} of GGUF; penstock reads the versions 2 and 3, little-endian. Convert the "
            "model again with the current llama.cpp."
        )
    num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"it has the key {key!r} twice")
        metadata[key] = cursor.value(cursor.number("I"))
    entries: dict[str, tuple[int, tuple[int, ...], int]] = {}
    for _ in range(num_tensors):
        name, num_dimensions = cursor.string(), cursor.number("I")
        if name in entries or num_dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"its tensor {name!r} is listed twice or has more than {_MAX_DIMENSIONS} axes")
        sizes = tuple(cursor.number("Q") for _ in range(num_dimensions))
        entries[name] = cursor.number("I"), sizes[::-1], cursor.number("Q")
    alignment = metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment % 8:
        raise ValueError(f"{_ALIGNMENT} is {alignment!r}; it must be a multiple of 8")
    found = {_TYPE_NAMES.get(type_id, f"type {type_id}") for type_id, _, _ in entries.values()}
    if unsupported := sorted(found - _BLOCKS.keys()):
        raise UnsupportedModelError(f"The weights of {path} are quantised with {', '.join(unsupported)}; {SUPPORTED}.")
    begin = -(-cursor.position // alignment) * alignment
    tensors = {
        name: _tensor(name, _TYPE_NAMES[type_id], shape, begin + offset, cursor.size)
        for name, (type_id, shape, offset) in entries.items()
    }
    return GgufHeader(metadata, tensors)


def _tensor(name: str, type_name: str, shape: tuple[int, ...], start: int, num_file_bytes: int) -> GgufTensor:
    """Checks that a tensor is inside the file."""
    num_values, num_bytes = _BLOCKS[type_name]
    if not all(shape) or (shape[-1] if shape else 1) % num_values:
        raise ValueError(f"its tensor {name!r} cannot have the shape {list(shape)} in {type_name}")
    num_bytes *= math.prod(shape) // num_values
    if start + num_bytes > num_file_bytes:
        raise ValueError(f"its tensor {name!r} ends at byte {start + num_bytes}, but the file has {num_file_bytes}")
    return GgufTensor(type_name, shape, start, num_bytes)


class _Cursor:
    """Reads values of the header in order. Raises ValueError at the end of the file."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.size = len(memory)
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        begin = self.position
        self._move(begin + num_bytes)
        return self._memory[begin : self.position]

    def number(self, scalar: str) -> Any:
        return self.numbers(scalar, 1)[0]

    def numbers(self, scalar: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{scalar}", self.take(count * struct.calcsize(f"<{scalar}")))

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """Returns the next strings. Few calls for each, because a vocabulary and its merges have 300,000."""
        found = []
        memory = self._memory
        end = self.position
        for _ in range(count):
            begin = end + 8
            end = begin + int.from_bytes(memory[end:begin], "little")
            if end > self.size:
                break
            found.append(memory[begin:end].decode())
        self._move(end)
        return found

    def value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id != _ARRAY:
            return self.number(_scalar(type_id))
        item_type, count = self.number("I"), self.number("Q")
        if item_type == _STRING:
            return self.strings(count)
        return self.numbers(_scalar(item_type), count)

    def _move(self, position: int) -> None:
        if position > self.size:
            raise ValueError(f"its header needs {position} bytes or more, but the file has {self.size}")
        self.position = position


def _scalar(type_id: int) -> str:
    if type_id not in _SCALARS:
        raise ValueError(f"its metadata has a value of the unknown type {type_id}")
    return _SCALARS[type_id]


_KEYS: Final = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
}
_ENCODER_KEYS: Final = _KEYS | {"layer_norm_eps": "attention.layer_norm_epsilon"}
_DECODER_KEYS: Final = _KEYS | {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_BERT_NAMES: Final = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
# llama.cpp's numbers. NONE returns the rows of all tokens.
_POOLING: Final = {0: None, 1: (PoolingType.MEAN,), 2: (PoolingType.CLS,), 3: (PoolingType.LAST,)}
_TOKENIZER_CLASSES: Final = {"bert": "BertTokenizer", "t5": "XLMRobertaTokenizer", "gpt2": "Qwen2Tokenizer"}
_ROPE_SCALINGS: Final = ("linear", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Architecture:
    """An architecture of GGUF.

    Attributes:
        config: Constants of config.json.
        keys: Maps keys of config.json to keys of the metadata below the name of the architecture.
        layers: Prefix of the layers' weights.
        names: Maps modules of GGUF to modules of the checkpoint; those of a layer without prefix and number.
        has_rope: Attention has rotary positions.
    """

    config: Mapping[str, Any]
    keys: Mapping[str, str]
    layers: str
    names: Mapping[str, str]
    has_rope: bool = False


_ARCHITECTURES: Final = {
    "bert": _Architecture(
        config={"model_type": "bert", "architectures": ["BertModel"]},
        keys=_ENCODER_KEYS,
        layers="encoder.layer",
        names=_BERT_NAMES,
    ),
    "jina-bert-v2": _Architecture(
        config={
            "model_type": "bert",
            "architectures": ["JinaBertModel"],
            "position_embedding_type": "alibi",
            "feed_forward_type": "geglu",
        },
        keys=_ENCODER_KEYS,
        layers="encoder.layer",
        names=_BERT_NAMES | {"ffn_up": "mlp.gated_layers", "ffn_down": "mlp.wo", "layer_output_norm": "mlp.layernorm"},
    ),
    "nomic-bert": _Architecture(
        config={"model_type": "nomic_bert", "architectures": ["NomicBertModel"], "hidden_act": "silu"},
        keys=_ENCODER_KEYS,
        layers="encoder.layers",
        names={
            "token_embd": "embeddings.word_embeddings",
            "token_types": "embeddings.token_type_embeddings",
            "token_embd_norm": "emb_ln",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "attn_output_norm": "norm1",
            "ffn_up": "mlp.fc11",
            "ffn_gate": "mlp.fc12",
            "ffn_down": "mlp.fc2",
            "layer_output_norm": "norm2",
        },
        has_rope=True,
    ),
    "qwen3": _Architecture(
        config={"model_type": "qwen3", "architectures": ["Qwen3Model"]},
        keys=_DECODER_KEYS,
        layers="layers",
        names={
            "token_embd": "embed_tokens",
            "output_norm": "norm",
            "output": "lm_head",
            "attn_norm": "input_layernorm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        },
        has_rope=True,
    ),
}


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The header of a GGUF file with a supported architecture.

    Attributes:
        path: The file.
        header: Its header.
        architecture: general.architecture, such as "bert".
    """

    path: Path
    header: GgufHeader
    architecture: str

    @classmethod
    def read(cls, path: Path) -> GgufModel:
        """Returns the model of a file.

        Raises:
            UnsupportedModelError: Its architecture, version, byte order or type of weights is not supported.
            WeightError: The file cannot be read or is damaged.
        """
        header = read_gguf(path)
        metadata = header.metadata
        architecture = metadata.get("general.architecture")
        kind = metadata.get("general.type", "model")
        if architecture not in _ARCHITECTURES or kind != "model":
            raise UnsupportedModelError(
                f"{path} has the type {kind!r} and the architecture {architecture!r}; in GGUF, penstock reads the type "
                f"'model' and {', '.join(_ARCHITECTURES)}. Serve the original checkpoint instead."
            )
        if metadata.get("split.count", 1) > 1:
            raise UnsupportedModelError(
                f"{path} is a part of a split GGUF file. Merge the parts: llama-gguf-split --merge."
            )
        return cls(path, header, architecture)

    def config(self) -> dict[str, Any]:
        """Returns the file's hyper-parameters as config.json.

        Raises:
            UnsupportedModelError: A value is missing, or selects a variant that is not supported.
        """
        known = _ARCHITECTURES[self.architecture]
        tensors = self.header.tensors
        if missing := sorted(key for key in known.keys.values() if self._value(key) is None):
            raise UnsupportedModelError(f"{self.path} has no {self.architecture}.{missing[0]} in its metadata.")
        if "token_embd.weight" not in tensors:
            raise UnsupportedModelError(f"{self.path} has no tensor token_embd.weight.")
        config = {**known.config, **{key: self._value(name) for key, name in known.keys.items()}}
        config["vocab_size"] = tensors["token_embd.weight"].shape[0]
        types = tensors.get("token_types.weight")
        config["type_vocab_size"] = 0 if types is None else types.shape[0]
        config["tokenizer_class"] = _TOKENIZER_CLASSES.get(self.header.metadata.get("tokenizer.ggml.model", ""))
        if self._value("attention.causal") is not None:
            config["is_causal"] = self._value("attention.causal")
        if known.has_rope:
            config["rope_parameters"] = self._rope()
        return config

    def pooling_files(self) -> SentenceTransformersFiles | None:
        """Returns the pooling of the metadata as the files of sentence-transformers; None if the file names none.

        Raises:
            UnsupportedModelError: The file is a reranker.
        """
        key = f"{self.architecture}.pooling_type"
        value = self.header.metadata.get(key)
        if value is None:
            return None
        if value not in _POOLING:
            raise UnsupportedModelError(
                f"{key} of {self.path} is {value}; penstock reads 0 (none), 1 (mean), 2 (CLS) and 3 (last), but no "
                "rerankers (4) in GGUF. Serve the original checkpoint instead."
            )
        return SentenceTransformersFiles(
            source=self.path.name,
            pooling=_POOLING[value],
            pooling_source=f"{self.path.name}: {key}",
            has_normalize=True,
        )

    def weight_names(self) -> dict[str, str]:
        """Maps names of the checkpoint to names in the file.

        Raises:
            UnsupportedModelError: The file has a tensor that the architecture does not have.
        """
        known = _ARCHITECTURES[self.architecture]
        names = {}
        for name in self.header.tensors:
            module, _, kind = name.rpartition(".")
            prefix = ""
            if module.startswith("blk."):
                _, layer, module = module.split(".", 2)
                prefix = f"{known.layers}.{layer}."
            if module not in known.names:
                raise UnsupportedModelError(
                    f"{self.path} has the tensor {name!r}, which penstock does not read in {self.architecture}. Serve "
                    "the original checkpoint instead."
                )
            names[f"{prefix}{known.names[module]}.{kind}"] = name
        return names

    def _value(self, key: str) -> Any:
        return self.header.metadata.get(f"{self.architecture}.{key}")

    def _rope(self) -> dict[str, Any]:
        theta = self._value("rope.freq_base")
        scaling = self._value("rope.scaling.type")
        values = {"rope_type": "default", "rope_theta": 10_000.0 if theta is None else theta}
        if scaling in (None, "none"):
            return values
        if scaling not in _ROPE_SCALINGS:
            raise UnsupportedModelError(
                f"{self.architecture}.rope.scaling.type of {self.path} is {scaling!r}; penstock reads none and "
                f"{' and '.join(_ROPE_SCALINGS)} in GGUF. Serve the original checkpoint instead."
            )
        original = self._value("rope.scaling.original_context_length")
        values |= {"rope_type": scaling, "factor": self._value("rope.scaling.factor")}
        return values if original is None else {**values, "original_max_position_embeddings": original}
