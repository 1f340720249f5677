"""Static embeddings: a vector, or one weight, for each token, and no layers.

Sources: sentence-transformers' StaticEmbedding and SparseStaticEmbedding; model2vec (github.com/MinishLab/model2vec).
Most static models have no config.json; engine/model_files/sentence_transformers_files.py builds the config from their
weights.
"""

from __future__ import annotations

from typing import Final

from ..protocol.model_info import ModelInfo
from .spec import EmbeddingSpec, Family, ModelSpec, StaticTable

STATIC: Final = "static"
MODEL2VEC: Final = "model2vec"
SPARSE_STATIC: Final = "sparse_static"
STATIC_MODEL_TYPES: Final = frozenset((STATIC, MODEL2VEC, SPARSE_STATIC))


def _spec(info: ModelInfo) -> ModelSpec:
    table = info.config["static_table"]
    # Checkpoint gives "embedding.weight" its current name in transformers.
    name = "embeddings.weight" if table["name"] == "embedding.weight" else table["name"]
    embedding = EmbeddingSpec(
        word_embeddings=name,
        vocab_size=info.vocab_size,
        size=info.hidden_size,
        static=StaticTable(
            shape=tuple(table["shape"]), has_mapping=table["has_mapping"], has_weights=table["has_weights"]
        ),
    )
    return ModelSpec(
        hidden_size=info.hidden_size,
        prefixes=("",),
        embedding=embedding,
        attention=None,
        kinds={},
        layers=(),
        is_pre_norm=True,
    )


FAMILIES: Final = (
    Family(STATIC, "StaticEmbedding", _spec, architectures=("StaticEmbedding",)),
    Family(MODEL2VEC, "Static", _spec),
    Family(SPARSE_STATIC, "SparseStaticEmbedding", _spec, architectures=("SparseStaticEmbedding",)),
)
