"""How the longest input of a model is worded for those who sent a longer one."""

from __future__ import annotations


def worded_limit(max_num_tokens: int, name: str | None) -> str:
    """Returns the beginning of the sentence that refuses an input, in OpenAI's words.

    Args:
        max_num_tokens: Tokens. The limit.
        name: What is behind it, where it is not the model's own; see ModelInfo.limit_name.
    """
    return f"This model's maximum context length is {max_num_tokens} tokens{f' ({name})' if name else ''}"
