"""How many tokens an input of a model may hold, and which file says so.

The model's own limit is the one that sentence-transformers would use, but never more than the position table serves.
"""

from __future__ import annotations

from typing import Any, Final

from .config import EngineConfig
from .errors import ModelLoadError
from .model_modules import SentenceTransformersFiles

# Families that number positions from pad_token_id + 1, so that the first rows of their position table are never used.
# fmt: off
OFFSET_MODEL_TYPES: Final = frozenset((
    "camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm",
    "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
))
# fmt: on
_POSITION_KEYS: Final = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len")
# transformers writes int(1e30) where a tokenizer has no limit.
_NO_LIMIT: Final = 10**9
_DEFAULT_MAX_MODEL_LEN: Final = 512


def resolve_max_model_len(
    config: dict[str, Any],
    tokenizer_config: dict[str, Any],
    files: SentenceTransformersFiles | None,
    engine: EngineConfig,
) -> tuple[int, str]:
    """Returns the longest input in tokens, special tokens included, and the source.

    Args:
        config: config.json with overrides.
        tokenizer_config: tokenizer_config.json.
        files: sentence-transformers' files, where there are some.
        engine: max_model_len of the operator, who may lower the model's own limit or raise it up to the position limit.

    Raises:
        ModelLoadError: The operator asks for more than the model has positions for.
    """
    table, limit, position_source = _position_limit(config)
    own, source = _own_limit(table, position_source, tokenizer_config, files)
    if limit is not None and own > limit:
        own, source = limit, position_source
    if engine.max_model_len is None:
        return own, source
    if limit is not None and engine.max_model_len > limit:
        raise ModelLoadError(
            f"--max-model-len is {engine.max_model_len}, but {engine.model} has positions for {limit} tokens "
            f"({position_source}).",
            param="max_model_len",
        )
    return engine.max_model_len, "--max-model-len"


def _position_limit(config: dict[str, Any]) -> tuple[int | None, int | None, str]:
    """Returns the rows of the position table, how many tokens they serve, and the source; None where nothing limits."""
    text_config = config.get("text_config")
    for part in (config, text_config if isinstance(text_config, dict) else {}):
        for key in _POSITION_KEYS:
            rows = part.get(key)
            # NOTE: -1 is XLNet's and T5's way to say that there is no table.
            if type(rows) is int and 0 < rows < _NO_LIMIT:
                if part.get("model_type") not in OFFSET_MODEL_TYPES:
                    return rows, rows, f"config.json: {key}"
                pad_token_id = part.get("pad_token_id")
                offset = (1 if pad_token_id is None else pad_token_id) + 1
                return rows, rows - offset, f"config.json: {key} - {offset}"
    return None, None, ""


def _own_limit(
    table: int | None, table_source: str, tokenizer_config: dict[str, Any], files: SentenceTransformersFiles | None
) -> tuple[int, str]:
    """Returns the limit that sentence-transformers would use, and the source."""
    if files is not None:
        for value, key in ((files.tokenizer_max_length, "model_max_length"), (files.max_seq_length, "max_seq_length")):
            limit = _as_limit(value)
            if limit is not None:
                return limit, f"{files.transformer_source}: {key}"
    limits = [(table, table_source)] if table is not None else []
    limit = _as_limit(tokenizer_config.get("model_max_length"))
    if limit is not None:
        limits.append((limit, "tokenizer_config.json: model_max_length"))
    return min(limits, default=(_DEFAULT_MAX_MODEL_LEN, "default"))


def _as_limit(value: Any) -> int | None:
    """The number of tokens; None for what stands in files where there is no limit."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if is_number and 0 < value < _NO_LIMIT else None
