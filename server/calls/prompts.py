"""Finds the named prompt of a model for the purpose of a text, in the words of any dialect.

Cohere says search_query, Voyage query, Jina retrieval.query, Google RETRIEVAL_QUERY, and a model's files may call the
prompt Retrieval-query: all are the role ("query",). `nl2code.passage` is ("nl2code", "document"). A model without a
prompt for a role reads such texts as it reads texts that have none.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from penstock.engine import ModelInfo
from penstock.engine.protocol.errors import InvalidRequestError
from penstock.engine.tokenization.input_encoder import instructed_prompt

from ..errors import shown

Role = tuple[str, ...]

_SEPARATORS: Final = re.compile(r"[._\-\s]+")
_SYNONYMS: Final = {
    "queries": "query",
    "passage": "document",
    "passages": "document",
    "doc": "document",
    "documents": "document",
    "corpus": "document",
    "classify": "classification",
    "cluster": "clustering",
    "separation": "clustering",
    "sts": "similarity",
    "matching": "similarity",
}
_MAX_NAME_CHARS: Final = 200
"""A longer name is no known purpose. To split a text of megabytes into words would hold the event loop for seconds."""
_FILLERS: Final = frozenset({"search", "retrieval", "text", "semantic"})
_SIDES: Final = frozenset({"query", "document"})
_SYMMETRIC: Final = frozenset({"classification", "clustering", "similarity"})


class Prompt(NamedTuple):
    """The prompt before the texts of a request.

    Attributes:
        name: Of the model's prompt; None: the model's default, if it has one.
        text: The prompt itself, which wins.
        is_query: See RequestOptions.
    """

    name: str | None
    text: str | None
    is_query: bool | None


def prompt_for(
    info: ModelInfo,
    *,
    prompt_name: str | None = None,
    input_type: str | None = None,
    task: str | None = None,
    instruction: str | None = None,
    default_name: str | None = None,
) -> Prompt:
    """Returns the prompt for texts. Absent and empty are one; of several, the first below counts.

    Args:
        info: The model.
        prompt_name: A prompt of the model by its own name.
        input_type: The purpose of the texts, in the words of Cohere and Voyage.
        task: The same, as Jina says it.
        instruction: Replaces the instruction in the model's query prompt.
        default_name: The prompt for requests that say nothing.

    Raises:
        InvalidRequestError: A purpose that is not known, or that the model serves with an adapter; an instruction for a
            model that takes none or for documents.
    """
    name = prompt_name or None
    role: Role = ()
    for param, value in (("input_type", input_type), ("task", task)):
        if value and info.has_task_adapters:
            raise _no_adapter_error(info, value, param)
        if value and name is None and not role:
            name, role = find_prompt(info, value, param=param)
    if instruction:
        if (role or _role(name or "query"))[-1] == "document":
            raise InvalidRequestError(
                "instruction says what a query looks for; documents are read without it. Leave it out, or send the "
                "texts as queries.",
                param="instruction",
            )
        names = (name,) if name else (*_named(info, ("query",)), info.default_prompt_name or "")
        return Prompt(None, instructed_prompt(info, names, instruction), is_query=True)
    if name is None and not role:
        name = default_name
    role = role or (_role(name) if name else ())
    return Prompt(name, None, is_query=role[-1] == "query" if role else None)


def find_prompt(info: ModelInfo, purpose: str, *, param: str) -> tuple[str | None, Role]:
    """Returns the name of the model's prompt for a purpose, None where it has none, and the role behind it.

    Raises:
        InvalidRequestError: `purpose` is neither known nor a prompt of the model; the message names the field `param`.
    """
    role = _role(purpose)
    if purpose in info.prompts:
        return purpose, role
    for wanted in (role, role[-1:]):
        named = _named(info, wanted)
        if named:
            return named[0], role
    if role[-1] in _SIDES or (len(role) == 1 and role[0] in _SYMMETRIC):
        return None, role
    own = f", or a prompt of {info.name}: {', '.join(info.prompts)}" if info.prompts else ""
    raise InvalidRequestError(
        f"{param} is {shown(purpose)}; send query, document, classification, clustering or similarity in the words of "
        f"Cohere, Jina or Voyage{own}.",
        param=param,
    )


def _no_adapter_error(info: ModelInfo, purpose: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param} is {shown(purpose)}; {info.name} computes each task with a LoRA adapter of its own "
        f"({', '.join(info.adapters)}), and this server applies no adapters. Leave {param} out to get vectors of the "
        "base weights, or ask for a model whose weights have the adapter merged.",
        param=param,
    )


def _named(info: ModelInfo, role: Role) -> list[str]:
    """Returns the names of the model's prompts for a role, in its order."""
    return [name for name in info.prompts if _role(name) == role]


def _role(name: str) -> Role:
    if len(name) > _MAX_NAME_CHARS:
        return ("",)
    words = [_SYNONYMS.get(word, word) for word in _SEPARATORS.split(name.strip().lower()) if word]
    return tuple(word for word in words if word not in _FILLERS) or tuple(words) or ("",)
