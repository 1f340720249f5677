"""A request's own instruction for embedding models whose query prompt holds one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from ..protocol.errors import InvalidRequestError
from ..protocol.model_info import ModelInfo

# As E5-Mistral, Qwen3-Embedding and their kin were trained: "Instruct: find what answers the query\nQuery: ".
_INSTRUCTED_PROMPT: Final = re.compile(r"(Instruct: ?)(.*)(\n+Query: ?)", re.DOTALL)


def instructed_prompt(info: ModelInfo, names: Iterable[str], instruction: str) -> str:
    """Returns the first of the named prompts with `instruction` in place of its own.

    Raises:
        InvalidRequestError: The model has no such prompt, or one without an instruction.
    """
    for name in names:
        match = _INSTRUCTED_PROMPT.fullmatch(info.prompts.get(name, ""))
        if match is not None:
            return match[1] + instruction + match[3]
    raise InvalidRequestError(
        f"{info.name} is an embedding model without a query prompt of the form 'Instruct: ...', "
        "so it takes no instruction.",
        param="instruction",
    )
