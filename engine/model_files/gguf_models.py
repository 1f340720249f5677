"""GGUF files as model folders: the config.json and the weight names of each architecture.

Source: the converter of llama.cpp (convert_hf_to_gguf) and its table of tensor names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..protocol.errors import UnsupportedModelError
from ..protocol.tasks import PoolingType
from .gguf import GgufHeader, read_gguf
from .sentence_transformers_files import SentenceTransformersFiles

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
            UnsupportedModelError: Its architecture is not supported, or see `read_gguf`.
            WeightError: See `read_gguf`.
        """
        header = read_gguf(path)
        metadata = header.metadata
        architecture, kind = metadata.get("general.architecture"), metadata.get("general.type", "model")
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
        known, tensors = _ARCHITECTURES[self.architecture], self.header.tensors
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
        known, names = _ARCHITECTURES[self.architecture], {}
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
        theta, scaling = self._value("rope.freq_base"), self._value("rope.scaling.type")
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
