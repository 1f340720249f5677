"""`truncate`, as Cohere, Jina, Voyage, NVIDIA and Hugging Face clients send it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, StrictBool

from penstock.engine import PoolingParams


class CohereTruncate(StrEnum):
    """Cohere's choice of the side of an over-long input that is cut away."""

    NONE = "NONE"
    START = "START"
    END = "END"


def parse_truncate(value: Any) -> Any:
    """Returns true, false, "START" or "END" for what any dialect says in `truncate`; "NONE" is false."""
    if isinstance(value, str):
        known: dict[str, bool | str] = {"none": False, "false": False, "true": True, "start": "START", "end": "END"}
        return known.get(value.lower(), value)
    return value


Truncate = Annotated[
    StrictBool | Literal["START", "END"],
    BeforeValidator(parse_truncate, json_schema_input_type=bool | Literal["NONE", "START", "END", "true", "false"]),
]


def truncated(params: PoolingParams, truncate: Truncate | None) -> PoolingParams:
    """Returns `params` with what `truncate` asks for; a truncate_prompt_tokens in them wins.

    Args:
        params: What the request asks of pooling.
        truncate: True cuts inputs to fit, on the side that the tokenizer cuts; "START" and "END" cut there; False
            refuses those that do not fit. None leaves it to the server.
    """
    if truncate is None or params.truncate_prompt_tokens is not None:
        return params
    if truncate is False:
        return params.clone(refuse_too_long=True)
    sides = {"START": "left", "END": "right"}
    side = params.truncation_side or (sides[truncate] if isinstance(truncate, str) else None)
    return params.clone(truncate_prompt_tokens=-1, truncation_side=side)
