"""Resolves the vectors of a model: multi-vector and sparse outputs, and the widths that vectors may be truncated to.

Settings of multi-vector models come from three libraries: sentence-transformers' MultiVectorEncoder saves them in the
configs of its Transformer and MultiVectorMask modules, PyLate in config_sentence_transformers.json, Stanford's ColBERT
in artifact.metadata. Defaults are those of sentence-transformers for the same folder.

Truncated vectors: Kusupati et al., Matryoshka Representation Learning (arXiv 2205.13147).
"""

from __future__ import annotations

import dataclasses
import string
from pathlib import Path, PurePath
from typing import Any, Final

from ..families.static import SPARSE_STATIC
from ..protocol.errors import ModelLoadError, UnsupportedModelError
from ..protocol.model_info import DenseSpec, ModelKind
from ..protocol.multi_vector import (
    DOCUMENT,
    QUERY,
    MultiVector,
    QueryExpansion,
    SparseKind,
    SparsePooling,
    TokenHeadFiles,
)
from ..protocol.tasks import PoolingTask
from .draft import ModelDraft
from .length_limits import resolve_max_model_len
from .model_folder import read_object
from .sentence_transformers_files import MODULES_FILE, SETTINGS_FILE, SentenceTransformersFiles

METADATA_FILE: Final = "artifact.metadata"
_STANFORD: Final = "HF_ColBERT"
_QUERY_LENGTH: Final = 32
_DIMENSIONS: Final = 128
_PUNCTUATION: Final = tuple(string.punctuation)
_PYLATE_KEYS: Final = frozenset(
    (
        "query_length",
        "document_length",
        "do_query_expansion",
        "attend_to_expansion_tokens",
        "query_prefix",
        "document_prefix",
        "skiplist_words",
    )
)
# Families with attention that can skip tokens; see engine/executors/torch/layers/attention.py.
_HIDING_MODEL_TYPES: Final = frozenset(
    ("bert", "camembert", "distilbert", "electra", "modernbert", "mpnet", "roberta", "xlm-roberta")
)
# Files of bge-m3, next to the weights of its encoder.
_WEIGHTS_FILE: Final = "sparse_linear.pt"
_VECTORS_FILE: Final = "colbert_linear.pt"


def read_stanford_modules(root: Path) -> SentenceTransformersFiles | None:
    """Returns the modules of a model saved by Stanford's ColBERT; None for other models."""
    config = read_object(root / "config.json")
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or _STANFORD not in architectures:
        return None
    dense = DenseSpec(
        folder="",
        in_features=config.get("hidden_size") or config.get("dim") or 0,
        out_features=read_object(root / METADATA_FILE).get("dim") or _DIMENSIONS,
        bias=False,
        activation="Identity",
    )
    return SentenceTransformersFiles(dense=(dense,), has_normalize=True)


def resolve_multi_vector(draft: ModelDraft, root: Path, tokenizer_config: dict[str, Any]) -> None:
    """Resolves `multi_vector` and, for multi-vector models, prompts and the longest input.

    Raises:
        ModelLoadError: A setting is invalid.
        UnsupportedModelError: penstock does not support a setting.
    """
    draft.set("multi_vector", None, "default")
    files = draft.files
    gives_vectors = PoolingTask.TOKEN_EMBED in draft.fields["tasks"] and not draft.fields["sequence_pooling"]
    if draft.fields["kind"] is not ModelKind.EMBEDDING or not gives_vectors or files is None:
        return
    multi_vector, prompts, source = _read(draft, root, files)
    can_hide = draft.fields["packed"] and draft.fields["model_type"] in _HIDING_MODEL_TYPES
    if multi_vector.expansion is not None and not multi_vector.expansion.attends and not can_hide:
        raise UnsupportedModelError(
            f"{source} of {draft.name} pads queries with tokens that other tokens must not attend to, which penstock "
            f"supports in these families: {', '.join(sorted(_HIDING_MODEL_TYPES))}."
        )
    draft.set("multi_vector", multi_vector, source)
    if prompts:
        draft.set("prompts", {**draft.fields["prompts"], **prompts}, source)
    if multi_vector.document_length is not None and draft.engine.max_model_len is None:
        # The length in PyLate's Transformer config depends on the last use of the model.
        longest = max(multi_vector.document_length, multi_vector.max_num_tokens(is_query=True) or 0)
        limits = dataclasses.replace(files, max_seq_length=longest, tokenizer_max_length=None)
        limit, limit_source = resolve_max_model_len(draft.config, tokenizer_config, limits, draft.engine)
        draft.set("max_model_len", limit, source if limit == longest else limit_source)
    limit, limit_source = draft.fields["max_model_len"], draft.sources["max_model_len"]
    if multi_vector.expansion is not None and multi_vector.expansion.length > limit:
        raise ModelLoadError(
            f"{draft.name} pads queries to {multi_vector.expansion.length} tokens ({source}), but its longest input is "
            f"{limit} ({limit_source}).",
            param="max_model_len",
        )


def _read(draft: ModelDraft, root: Path, files: SentenceTransformersFiles) -> tuple[MultiVector, dict[str, str], str]:
    if not (root / MODULES_FILE).is_file():
        for name, own_source in draft.sources.items():
            if own_source.startswith(MODULES_FILE):  # there is no such file: read_stanford_modules made the modules
                draft.sources[name] = draft.source_of("architectures")
        multi_vector, prompts = _read_stanford(read_object(root / METADATA_FILE))
        return multi_vector, prompts, METADATA_FILE
    settings, module = files.settings, files.transformer_config
    source = files.transformer_source or SETTINGS_FILE
    multi_vector = MultiVector()
    prompts = {}
    if _PYLATE_KEYS & settings.keys():
        multi_vector, prompts = _read_pylate(settings, files)
        source = SETTINGS_FILE
    elif settings.get("model_type") == "ColBERT":
        multi_vector = MultiVector(skip_words=_PUNCTUATION)
    values: dict[str, Any] = {"averages": str(settings.get("similarity_fn_name")).lower() == "meanmaxsim"}
    for name in ("query_length", "document_length"):
        if module.get(name) is not None:
            values[name] = _length(module[name], f"{files.transformer_source}: {name}")
    if "query_expansion" in module:
        values["expansion"] = _expansion(module["query_expansion"], f"{files.transformer_source}: query_expansion")
    if files.mask_folder is not None:
        values |= _read_mask(root, files.mask_folder)
    return dataclasses.replace(multi_vector, **values), prompts, source


def _read_stanford(metadata: dict[str, Any]) -> tuple[MultiVector, dict[str, str]]:
    markers = {
        QUERY: metadata.get("query_token_id") or "[unused0]",
        DOCUMENT: metadata.get("doc_token_id") or "[unused1]",
    }
    longest = metadata.get("doc_maxlen")
    multi_vector = MultiVector(
        document_length=None if longest is None else _length(longest, f"{METADATA_FILE}: doc_maxlen"),
        expansion=QueryExpansion(
            length=_length(metadata.get("query_maxlen") or _QUERY_LENGTH, f"{METADATA_FILE}: query_maxlen"),
            attends=bool(metadata.get("attend_to_mask_tokens")),
        ),
        skip_words=_PUNCTUATION if metadata.get("mask_punctuation", True) else (),
        markers=tuple(markers.values()),
    )
    return multi_vector, {name: f"{marker} " for name, marker in markers.items()}


def _read_pylate(settings: dict[str, Any], files: SentenceTransformersFiles) -> tuple[MultiVector, dict[str, str]]:
    prompts = {}
    for name in (QUERY, DOCUMENT):
        marker = settings.get(f"{name}_prefix")
        if marker is not None:
            prompts[name] = marker + files.prompts.get(name, "").removeprefix(marker)
    markers = tuple(marker for name in (QUERY, DOCUMENT) if (marker := settings.get(f"{name}_prefix")))
    query_length = settings.get("query_length")
    expansion = None
    if settings.get("do_query_expansion") is not False:
        expansion = QueryExpansion(
            length=_length(query_length or _QUERY_LENGTH, f"{SETTINGS_FILE}: query_length"),
            attends=bool(settings.get("attend_to_expansion_tokens")),
        )
    words = settings.get("skiplist_words")
    is_own = bool(markers) or settings.get("model_type") == "ColBERT"
    longest = settings.get("document_length")
    multi_vector = MultiVector(
        query_length=None if query_length is None else _length(query_length, f"{SETTINGS_FILE}: query_length"),
        document_length=None if longest is None else _length(longest, f"{SETTINGS_FILE}: document_length"),
        expansion=expansion,
        skip_words=tuple(words) if words is not None else _PUNCTUATION if is_own else (),
        markers=markers,
    )
    return multi_vector, prompts


def _read_mask(root: Path, folder: str) -> dict[str, Any]:
    path = root / folder / "config.json"
    config = read_object(path)
    if config.get("keep_only_token_ids"):
        raise UnsupportedModelError(f"{path} has keep_only_token_ids, which penstock does not support.")
    tasks = config.get("skiplist_tasks")
    tasks = [DOCUMENT] if tasks is None else [tasks] if isinstance(tasks, str) else tasks
    return {
        "skip_words": tuple(config.get("skiplist_words") or ()),
        "skips_queries": QUERY in tasks,
        "skips_documents": DOCUMENT in tasks,
    }


def _expansion(value: Any, source: str) -> QueryExpansion | None:
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("strategy") not in ("fixed", "min"):
        raise ModelLoadError(f"{source} is {value!r}; it must be an object whose strategy is 'fixed' or 'min'.")
    return QueryExpansion(
        length=_length(value.get("length"), f"{source}: length"),
        is_fixed=value["strategy"] == "fixed",
        attends=bool(value.get("attend", False)),
        token=value.get("token"),
    )


def _length(value: Any, source: str) -> int:
    if type(value) is not int or value < 1:
        raise ModelLoadError(f"{source} is {value!r}; it must be a number of tokens.")
    return value


def resolve_sparse(draft: ModelDraft, root: Path) -> None:
    """Resolves `sparse` and `token_heads`, and adds their tasks.

    Raises:
        UnsupportedModelError: penstock does not support a setting.
    """
    draft.set("sparse", None, "default")
    draft.set("token_heads", None, "default")
    files = draft.files
    if draft.fields["kind"] is not ModelKind.EMBEDDING:
        return
    if files is not None and files.static_kind == SPARSE_STATIC:
        is_cosine = _similarity(files.settings, root) == "cosine"
        draft.set("sparse", SparsePooling(kind=SparseKind.STATIC_WEIGHTS, is_cosine=is_cosine), MODULES_FILE)
        draft.set("tasks", (PoolingTask.SPARSE_EMBED, PoolingTask.SCORE), f"{MODULES_FILE}: SparseStaticEmbedding")
        draft.set("embedding_size", draft.fields["vocab_size"], draft.sources["vocab_size"])
        return
    if files is not None and files.splade_folder is not None:
        _resolve_splade(draft, root / files.splade_folder / "config.json", files.settings)
        return
    folder = Path(draft.fields["path"])
    found = [name if (folder / name).is_file() else None for name in (_WEIGHTS_FILE, _VECTORS_FILE)]
    if not any(found) or not draft.fields["sequence_pooling"] or draft.fields["dense"] or draft.fields["is_causal"]:
        return
    source = next(name for name in found if name)
    draft.set("token_heads", TokenHeadFiles(weights_file=found[0], vectors_file=found[1]), source)
    if found[0]:
        draft.set("sparse", SparsePooling(kind=SparseKind.TOKEN_WEIGHTS), _WEIGHTS_FILE)
        draft.set("tasks", (*draft.fields["tasks"], PoolingTask.SPARSE_EMBED), f"{draft.sources['tasks']}, {source}")


def _resolve_splade(draft: ModelDraft, path: Path, settings: dict[str, Any]) -> None:
    config = read_object(path)
    pooling = config.get("pooling_strategy", "max")
    activation = config.get("activation_function", "relu")
    if pooling not in ("max", "sum") or activation not in ("relu", "log1p_relu"):
        raise UnsupportedModelError(
            f"{path} has pooling_strategy {pooling!r} and activation_function {activation!r}; penstock supports 'max' "
            "and 'sum', 'relu' and 'log1p_relu'."
        )
    if not draft.fields["packed"] or draft.fields["is_causal"]:
        raise UnsupportedModelError(
            f"{draft.name} computes sparse vectors with a masked language model of the family "
            f"{draft.fields['model_type']!r}, which penstock does not support."
        )
    sparse = SparsePooling(
        kind=SparseKind.VOCABULARY_LOGITS,
        is_sum=pooling == "sum",
        log_twice=activation == "log1p_relu",
        is_cosine=_similarity(settings, path.parent.parent) == "cosine",
    )
    draft.set("sparse", sparse, str(path.relative_to(path.parent.parent)))
    draft.set("tasks", (PoolingTask.SPARSE_EMBED, PoolingTask.SCORE), f"{MODULES_FILE}: SpladePooling")
    draft.set("embedding_size", draft.fields["vocab_size"], draft.sources["vocab_size"])


def _similarity(settings: dict[str, Any], root: Path) -> str:
    """Returns "dot" or "cosine". `settings` are those of `root`."""
    similarity = settings.get("similarity_fn_name") or "dot"
    if similarity not in ("dot", "cosine"):
        raise UnsupportedModelError(f"{root / SETTINGS_FILE} has similarity_fn_name {similarity!r}.")
    return str(similarity)


_MATRYOSHKA_NAMES: Final = frozenset(
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
    pooler = draft.engine.pooler_config
    files = draft.files
    config = draft.config
    width = draft.fields["embedding_size"]
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
    return next((name for name, part in own_parts if part in _MATRYOSHKA_NAMES or _WORD in part), None)
