"""The longest input of a model in tokens, and the source of the limit.

A model's default limit is that of sentence-transformers, bounded by its position table.
"""

from __future__ import annotations

from typing import Any, Final

from ..families.static import MODEL2VEC, STATIC
from ..protocol.config import EngineConfig
from ..protocol.errors import ModelLoadError
from ..protocol.tasks import ChunkedProcessingMode, PoolingTask
from .draft import ModelDraft, config_parts
from .sentence_transformers_files import SentenceTransformersFiles

# Families that number positions from pad_token_id + 1. The first rows of their position table are unused.
# fmt: off
OFFSET_MODEL_TYPES: Final = frozenset((
    "camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm",
    "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
))
# fmt: on
_POSITION_KEYS: Final = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len")
# Rotary scalings. Their max_position_embeddings may be the length before the scaling.
_STRETCHING_ROPE_TYPES: Final = ("dynamic", "yarn")
# transformers writes int(1e30) for a tokenizer without a limit.
_NO_LIMIT: Final = 10**9
_MODEL2VEC_LENGTH: Final = 512
"""model2vec's default if config.json has no max_length."""
_DEFAULT_MAX_MODEL_LEN: Final = 512
# Families without positions. Their default limit is a usual training length.
_STATE_MODEL_TYPES: Final = frozenset(("falcon_mamba", "mamba", "mamba2", STATIC, MODEL2VEC))
_DEFAULT_STATE_MAX_MODEL_LEN: Final = 8192


def resolve_max_model_len(
    config: dict[str, Any],
    tokenizer_config: dict[str, Any],
    files: SentenceTransformersFiles | None,
    engine: EngineConfig,
    config_file: str = "config.json",
) -> tuple[int, str]:
    """Returns the longest input in tokens, special tokens included, and the source.

    Args:
        config: config.json with overrides.
        tokenizer_config: tokenizer_config.json.
        files: sentence-transformers' files; None if the model has none.
        engine: Settings. `max_model_len` may lower the model's limit, or raise it up to the position limit.
        config_file: Name of the file of `config`, for the source.

    Raises:
        ModelLoadError: The operator's limit exceeds the positions of the model.
    """
    table, limit, position_source = _position_limit(config, config_file)
    longest, source = _own_limit(config, table, position_source, tokenizer_config, files) or _default_limit(config)
    if limit is not None and longest > limit:
        longest, source = limit, position_source
    if engine.max_model_len is None:
        return longest, source
    if limit is not None and engine.max_model_len > limit:
        raise ModelLoadError(
            f"--max-model-len is {engine.max_model_len}, but {engine.model} has positions for {limit} tokens "
            f"({position_source}).",
            param="max_model_len",
        )
    return engine.max_model_len, "--max-model-len"


def resolve_long_text(draft: ModelDraft) -> None:
    """Resolves the long-text mode. Only the operator can enable it.

    Raises:
        ModelLoadError: The settings do not fit the model.
    """
    pooler = draft.engine.pooler_config
    defaults: dict[str, Any] = {
        "enable_chunked_processing": False,
        "max_embed_len": None,
        "chunk_overlap": 0,
        "chunked_processing_mode": ChunkedProcessingMode.WINDOWS,
    }
    for name, default in defaults.items():
        value = getattr(pooler, name)
        draft.set(name, default if value is None else value, "default" if value is None else "--pooler-config")
    if not pooler.enable_chunked_processing:
        return
    if PoolingTask.EMBED not in draft.fields["tasks"]:
        raise ModelLoadError(
            "--pooler-config: enable_chunked_processing embeds long text, but "
            f"{draft.name} has no task 'embed' ({draft.sources['tasks']})."
        )
    overlap, size = draft.fields["chunk_overlap"], draft.fields["max_model_len"]
    if overlap >= size:
        raise ModelLoadError(
            f"--pooler-config: chunk_overlap is {overlap}, but a window of {draft.name} has {size} tokens "
            f"({draft.sources['max_model_len']}); the overlap must be smaller."
        )


def _position_limit(config: dict[str, Any], config_file: str) -> tuple[int | None, int | None, str]:
    """Returns the rows of the position table, the tokens that they allow, and the source; None without a table."""
    for part in config_parts(config):
        for key in _POSITION_KEYS:
            rows = part.get(key)
            # XLNet and T5 write -1 if there is no table.
            if type(rows) is int and 0 < rows < _NO_LIMIT:
                if part.get("model_type") not in OFFSET_MODEL_TYPES:
                    limit = _stretched_limit(part, rows)
                    return rows, limit, f"{config_file}: {key}{', stretched by its rope_type' * (limit > rows)}"
                pad_token_id = part.get("pad_token_id")
                if pad_token_id is not None and (type(pad_token_id) is not int or not 0 <= pad_token_id < rows - 1):
                    raise ModelLoadError(
                        f"config.json: pad_token_id is {pad_token_id!r}; it must be from 0 to {rows - 2}, because "
                        f"positions begin after it and {key} is {rows}."
                    )
                offset = (1 if pad_token_id is None else pad_token_id) + 1
                return rows, rows - offset, f"{config_file}: {key} - {offset}"
    return None, None, ""


def _stretched_limit(config: dict[str, Any], positions: int) -> int:
    """Returns the limit of rotary positions in tokens. Some scalings exceed max_position_embeddings."""
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key), dict | None):
            raise ModelLoadError(f"config.json: {key} is {config[key]!r}; it must be an object.")
    values = config.get("rope_scaling") or config.get("rope_parameters") or {}
    factor = values.get("factor")
    rope_type = values.get("rope_type") or values.get("type")
    if rope_type not in _STRETCHING_ROPE_TYPES or not isinstance(factor, int | float):
        return positions
    return max(positions, int(factor * (values.get("original_max_position_embeddings") or positions)))


def _own_limit(
    config: dict[str, Any],
    table: int | None,
    table_source: str,
    tokenizer_config: dict[str, Any],
    files: SentenceTransformersFiles | None,
) -> tuple[int, str] | None:
    """Returns the limit that sentence-transformers uses, or model2vec; and the source. None if no file has one."""
    if config.get("model_type") in (STATIC, MODEL2VEC):  # their libraries ignore tokenizer_config.json
        is_model2vec = config["model_type"] == MODEL2VEC
        limit = _as_limit(config.get("max_length", _MODEL2VEC_LENGTH))
        return (limit, "config.json: max_length") if is_model2vec and limit is not None else None
    if files is not None:
        for value, key in ((files.tokenizer_max_length, "model_max_length"), (files.max_seq_length, "max_seq_length")):
            limit = _as_limit(value)
            if limit is not None:
                return limit, f"{files.transformer_source}: {key}"
    limits = [(table, table_source)] if table is not None else []
    limit = _as_limit(tokenizer_config.get("model_max_length"))
    if limit is not None:
        limits.append((limit, "tokenizer_config.json: model_max_length"))
    return min(limits, default=None)


def _default_limit(config: dict[str, Any]) -> tuple[int, str]:
    if config.get("model_type") in _STATE_MODEL_TYPES:
        return _DEFAULT_STATE_MAX_MODEL_LEN, "default of models without positions"
    return _DEFAULT_MAX_MODEL_LEN, "default"


def _as_limit(value: Any) -> int | None:
    """Returns a limit in tokens; None for values that mean no limit."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if is_number and 0 < value < _NO_LIMIT else None
