"""How the longest input of a model is worded for those who sent a longer one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .model_info import ModelInfo

KV_CACHE_SOURCE: Final = "size of the KV cache"
"""Source of a max_model_len that is lower than the model's own: a sequence must find room in the pool."""


def limit_name(info: ModelInfo) -> str | None:
    """Returns what is behind max_model_len; None where it is the model or the operator's --max-model-len."""
    if info.sources.get("max_model_len") != KV_CACHE_SOURCE:
        return None
    return "the size of the server's KV cache, which --kv-cache-memory raises"


def worded_limit(max_num_tokens: int, name: str | None) -> str:
    """Returns the beginning of the sentence that refuses an input, in OpenAI's words.

    Args:
        max_num_tokens: Tokens. The limit.
        name: What is behind it, where it is not the model's own.
    """
    return f"This model's maximum context length is {max_num_tokens} tokens{f' ({name})' if name else ''}"
