"""Models that were trained for shorter vectors (Kusupati et al., Matryoshka Representation Learning, arXiv 2205.13147).

Their config.json does not say so. The names are from the model cards.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Final

_NAMES: Final = frozenset(
    (
        *("nomic-embed-text-v1.5", "nomic-embed-text-v2-moe", "modernbert-embed-base", "modernbert-embed-large"),
        *("mxbai-embed-large-v1", "mxbai-embed-2d-large-v1", "mxbai-embed-xsmall-v1"),
        *("qwen3-embedding-0.6b", "qwen3-embedding-4b", "qwen3-embedding-8b"),
        *("snowflake-arctic-embed-m-v1.5", "snowflake-arctic-embed-m-v2.0", "snowflake-arctic-embed-l-v2.0"),
        *("embeddinggemma-300m", "gte-multilingual-base", "jina-embeddings-v3", "jina-embeddings-v4"),
        *("static-retrieval-mrl-en-v1", "static-similarity-mrl-multilingual-v1"),
    )
)
"""Last parts of hub ids, in lower case."""
_WORD: Final = "matryoshka"


def matryoshka_name(*names: str) -> str | None:
    """Returns the first of the names that means a model trained for shorter vectors; None if there is none.

    Args:
        names: Hub ids, or paths of folders. A name with the word "matryoshka" counts, too.
    """
    own_parts = ((name, PurePath(name).name.lower()) for name in names)
    return next((name for name, part in own_parts if part in _NAMES or _WORD in part), None)
