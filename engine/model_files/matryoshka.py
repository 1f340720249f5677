"""The widths that the vectors of a model may be truncated to.

Source: Kusupati et al., Matryoshka Representation Learning, arXiv 2205.13147.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Final

from ..protocol.errors import ModelLoadError
from .draft import ModelDraft
from .sentence_transformers_files import SETTINGS_FILE

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
"""Models that were trained for shorter vectors, by the last part of their hub id in lower case, from their model cards.

Their config.json does not say so."""
_WORD: Final = "matryoshka"


def resolve_matryoshka(draft: ModelDraft) -> None:
    """Resolves the widths that embeddings may be truncated to."""
    pooler, files, config, width = draft.engine.pooler_config, draft.files, draft.config, draft.fields["embedding_size"]
    declared = config.get("matryoshka_dimensions") or ()
    if not isinstance(declared, list | tuple) or not all(type(d) is int and d > 0 for d in declared):
        raise ModelLoadError(
            f"{draft.source_of('matryoshka_dimensions')} is {declared!r}; it must be a list of widths."
        )
    declared_source = draft.source_of("matryoshka_dimensions") if declared else "default"
    draft.set("matryoshka_dimensions", tuple(declared), declared_source)
    flag = config.get("is_matryoshka", False)
    if not isinstance(flag, bool):
        raise ModelLoadError(f"{draft.source_of('is_matryoshka')} is {flag!r}; it must be true or false.")
    draft.set("is_matryoshka", flag or bool(declared), draft.source_of("is_matryoshka") if flag else declared_source)
    names = (draft.name, draft.fields["name"], str(config.get("_name_or_path", "")))
    if width and draft.engine.matryoshka == "any":
        draft.set("is_matryoshka", True, "--matryoshka")
        draft.set("matryoshka_dimensions", (), "--matryoshka")
    elif width and "is_matryoshka" not in config and not declared and (name := _known_name(*names)):
        draft.set("is_matryoshka", True, f"the model is known as {name}")

    draft.set("dimensions", None, "default")
    if pooler.dimensions is not None:
        if width and pooler.dimensions > width:
            raise ModelLoadError(
                f"--pooler-config: dimensions is {pooler.dimensions}; {draft.name} gives up to {width}."
            )
        draft.set("dimensions", pooler.dimensions, "--pooler-config")
    elif files is not None and files.truncate_dim is not None and width:
        draft.set("dimensions", min(files.truncate_dim, width), f"{SETTINGS_FILE}: truncate_dim")


def _known_name(*names: str) -> str | None:
    """Returns the first of the names that means a model trained for shorter vectors; None if there is none.

    Args:
        names: Hub ids, or paths of folders. A name with the word "matryoshka" counts, too.
    """
    own_parts = ((name, PurePath(name).name.lower()) for name in names)
    return next((name for name, part in own_parts if part in _NAMES or _WORD in part), None)
