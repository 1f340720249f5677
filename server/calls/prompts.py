"""Maps the purpose of a text, in the terms of any dialect, to a prompt of the model.

Cohere's search_query, Voyage's query, Jina's retrieval.query, Google's RETRIEVAL_QUERY and a prompt named
Retrieval-query in a model's files all map to the role ("query",). `nl2code.passage` maps to ("nl2code", "document").
If a model has no prompt for a role, its texts get no prompt.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from penstock.engine import ModelInfo
from penstock.engine.protocol.errors import InvalidRequestError
from penstock.engine.tokenization.input_encoder import instructed_prompt

from ..errors import quote
from ..schemas.options import contradiction

Role = tuple[str, ...]

_SEPARATORS: Final = re.compile(r"[._\-\s]+")
_SYNONYMS: Final = {
    "queries": "query",
    "passage": "document",
    "passages": "document",
    "doc": "document",
    "documents": "document",
    "corpus": "document",
    "image": "document",  # Cohere's input_type for images
    "classify": "classification",
    "cluster": "clustering",
    "separation": "clustering",
    "sts": "similarity",
    "matching": "similarity",
}
_MAX_NAME_CHARS: Final = 200
"""Longer names are rejected at once: splitting megabytes of text into words would block the event loop for seconds."""
_FILLERS: Final = frozenset({"search", "retrieval", "text", "semantic"})
_SIDES: Final = frozenset({"query", "document"})
_RETRIEVAL: Final = ("retrieval",)
_SYMMETRIC: Final = frozenset({"classification", "clustering", "similarity"})


class Prompt(NamedTuple):
    """The prompt of a request.

    Attributes:
        name: Name of the model's prompt. None: the model's default, if it has one.
        text: The prompt itself. It has precedence over `name`.
        is_query: True for queries, False for documents. None: the engine decides by the prompt.
        adapter: LoRA adapter for the purpose; None for a model without an adapter for each task.
    """

    name: str | None
    text: str | None
    is_query: bool | None
    adapter: str | None = None


def prompt_for(
    info: ModelInfo,
    *,
    prompt_name: str | None = None,
    input_type: str | None = None,
    task: str | None = None,
    instruction: str | None = None,
    default_name: str | None = None,
) -> Prompt:
    """Returns the prompt for texts. Empty values count as absent.

    Of `prompt_name`, `input_type`, `task` and `default_name`, the first given one selects the prompt. Whether the
    others are known is not checked.

    Args:
        info: The model with its prompts.
        prompt_name: Name of a prompt of the model.
        input_type: Purpose of the texts, in the terms of Cohere and Voyage.
        task: Purpose of the texts, in the terms of Jina.
        instruction: Replaces the instruction in the model's query prompt.
        default_name: Name of the prompt for a request that sets none of the arguments above.

    Raises:
        InvalidRequestError: The purpose is unknown or has no LoRA adapter, `input_type` and `task` contradict each
            other, or an instruction is given for documents or for a model that takes none.
    """
    if input_type and task and _role(input_type)[-1] != _role(task)[-1]:
        raise contradiction("input_type", input_type, "task", task)
    name = prompt_name or None
    adapter = None
    role: Role = ()
    for param, value in (("input_type", input_type), ("task", task)):
        if value and info.task_adapters:
            adapter = adapter or _find_adapter(info, value, param)
        if value and name is None and not role:
            name, role = find_prompt(info, value, param=param)
    if instruction:
        if (role or _role(name or "query"))[-1] == "document":
            raise InvalidRequestError(
                "instruction applies to queries, not to documents. Leave it out, or send the texts as queries.",
                param="instruction",
            )
        names = (name,) if name else (*_named(info, ("query",)), info.default_prompt_name or "")
        return Prompt(None, instructed_prompt(info, names, instruction), is_query=True, adapter=adapter)
    if name is None and not role:
        name = default_name
    role = role or (_role(name) if name else ())
    return Prompt(name, None, is_query=role[-1] == "query" if role else None, adapter=adapter)


def find_prompt(info: ModelInfo, purpose: str, *, param: str) -> tuple[str | None, Role]:
    """Returns the name of the model's prompt for a purpose (None if it has no such prompt), and the role.

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
    prompts_hint = f", or a prompt of {info.name}: {', '.join(info.prompts)}" if info.prompts else ""
    raise InvalidRequestError(
        f"{param} is {quote(purpose)}; send query, document, classification, clustering or similarity in the words of "
        f"Cohere, Jina or Voyage{prompts_hint}.",
        param=param,
    )


def _find_adapter(info: ModelInfo, purpose: str, param: str) -> str:
    """Returns the adapter for a purpose. Queries and documents may share one, named `retrieval`."""
    role = _role(purpose)
    names = [adapter.name for adapter in info.task_adapters if adapter.is_served]
    if purpose in names:
        return purpose
    for wanted in (role, _RETRIEVAL if role[-1] in _SIDES else role):
        found = next((name for name in names if _role(name) == wanted), None)
        if found is not None:
            return found
    raise InvalidRequestError(
        f"{param} is {quote(purpose)}; {info.name} has a LoRA adapter for each task, and those in its files are: "
        f"{', '.join(names) or 'none'}. Send one of them, or leave {param} out to get vectors without an adapter.",
        param=param,
    )


def _named(info: ModelInfo, role: Role) -> list[str]:
    return [name for name in info.prompts if _role(name) == role]


def _role(name: str) -> Role:
    if len(name) > _MAX_NAME_CHARS:
        return ("",)
    words = [_SYNONYMS.get(word, word) for word in _SEPARATORS.split(name.strip().lower()) if word]
    return tuple(word for word in words if word not in _FILLERS) or tuple(words) or ("",)
