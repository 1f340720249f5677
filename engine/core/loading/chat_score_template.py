"""Converts a tokenizer's chat template to a ScoreTemplate, in the engine process, which can import transformers.

sentence-transformers renders a pair as messages with the roles `query` and `document`, after a system message with the
instruction. This module renders the template with marker characters instead of texts. The text between the markers is
the prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from ...protocol.errors import UnsupportedModelError
from ...protocol.model_info import PairChat
from ...protocol.templates import ScoreTemplate, escaped

Message = dict[str, Any]
Render = Callable[[list[Message]], str]
Texts = dict[str, str]
Rendered = Callable[[Texts], str]

# Characters of the private use area: templates do not contain them, and `strip` does not remove them.
_MARKS: Final = {"instruction": "\ue0a1", "query": "\ue0a2", "document": "\ue0a3"}
_SAMPLE: Final = {"instruction": "Find {it}.", "query": "What is it?\n", "document": " A thing, {so}\nto say"}


class _NotAPromptError(ValueError):
    """A template does more than insert the texts. The message states the problem."""


def chat_score_template(render: Render, chat: PairChat, prompt: str | None, name: str) -> ScoreTemplate:
    """Returns the prompt that a chat template renders for a pair.

    Args:
        render: Renders messages with the tokenizer's chat template.
        chat: Format of the contents.
        prompt: The model's default instruction.
        name: Name of the model, for messages.

    Raises:
        UnsupportedModelError: The template does not render pairs, or does more than insert the texts.
    """

    def rendered(texts: Texts) -> str:
        return render(_messages(texts, chat))

    try:
        template = _derived(rendered, prompt)
        for instruction in (_SAMPLE["instruction"], None):
            _check(template, rendered, instruction, prompt)
    except _NotAPromptError as error:
        raise _unsupported(name, str(error)) from error
    except Exception as error:
        # A template may raise any error.
        raise _unsupported(name, f"raises {type(error).__name__} ({error})") from error
    return template


def _derived(rendered: Rendered, prompt: str | None) -> ScoreTemplate:
    pair = _without_instruction(_MARKS)
    bare = rendered(pair)
    instructed = rendered(_MARKS)
    for key, mark in pair.items():
        if bare.count(mark) != 1:
            raise _NotAPromptError(f"inserts the {key} {bare.count(mark)} times")
    stripped = tuple(key for key, mark in _MARKS.items() if f" {mark} " not in rendered({**_MARKS, key: f" {mark} "}))
    if instructed.count(_MARKS["instruction"]) != 1:
        return ScoreTemplate(parts=(_with_fields(bare),), stripped=tuple(key for key in stripped if key in pair))
    # The renderings with and without an instruction differ only in the instruction: the default one, or the given one.
    position = instructed.index(_MARKS["instruction"])
    start = _num_shared(bare, instructed[:position])
    end = _num_shared(bare[start:][::-1], instructed[position + 1 :][::-1])
    default = bare[start : len(bare) - end]
    given = instructed[start : len(instructed) - end]
    if any(mark in default + given for mark in pair.values()):
        raise _NotAPromptError("moves the query or the document if there is an instruction")
    template = ScoreTemplate(
        parts=(_with_fields(bare[:start]) + "{instruction}" + _with_fields(bare[len(bare) - end :]),),
        instruction=default,
        instruction_format=_with_fields(given),
        stripped=stripped,
    )
    return replace(template, instruction=template.instructed(prompt))


def _check(template: ScoreTemplate, rendered: Rendered, instruction: str | None, prompt: str | None) -> None:
    """Compares a derived template with the real one on a sample."""
    texts = _without_instruction(_SAMPLE)
    given = (instruction or prompt) if template.takes_instruction else None
    filled = (template.filled(part, texts["query"], texts["document"], instruction) for part in template.parts)
    if "".join(filled) != rendered({**texts, "instruction": given} if given else texts):
        raise _NotAPromptError("changes the texts")


def _without_instruction(texts: Texts) -> Texts:
    return {key: text for key, text in texts.items() if key != "instruction"}


def _num_shared(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _with_fields(text: str) -> str:
    """Returns a rendered text as a format string with fields instead of markers."""
    text = escaped(text)
    for key, mark in _MARKS.items():
        text = text.replace(mark, f"{{{key}}}")
    return text


def _messages(texts: Texts, chat: PairChat) -> list[Message]:
    roles = {"instruction": "system", "query": "query", "document": "document"}
    return [
        {"role": role, "content": [{"type": "text", "text": texts[key]}] if chat.is_structured else texts[key]}
        for key, role in roles.items()
        if key in texts
    ]


def _unsupported(name: str, problem: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The chat template of {name} {problem}; it must render the roles query and document unchanged. "
        'Give the prompt with --hf-overrides \'{"score_template": {"parts": [...]}}\'.'
    )
