"""How the longest input of a model is worded for those who sent a longer one."""

from __future__ import annotations

from typing import Final

CUT_TO_FIT: Final = "truncate_prompt_tokens to -1"
"""What a request sets to have its inputs cut; dialects that say it otherwise word it anew (EngineError.name_fields)."""


def worded_limit(max_num_tokens: int, name: str | None) -> str:
    """Returns the beginning of the sentence that refuses an input, in OpenAI's words.

    Args:
        max_num_tokens: Tokens. The limit.
        name: What is behind it, where it is not the model's own; see ModelInfo.limit_name. A field of
            the request stands in braces, for the template of an EngineError.
    """
    return f"This model's maximum context length is {max_num_tokens} tokens{f' ({name})' if name else ''}"
