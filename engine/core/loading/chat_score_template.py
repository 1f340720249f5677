"""Turns a tokenizer's chat template into a ScoreTemplate, in the engine process, where the template language is known.

sentence-transformers renders a pair as the messages of two roles, `query` and `document`, and an instruction as a
system message before them. The template is rendered once with marks in their place; what stands around the marks is
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

# Of the private use area: no template spells them, and trimming leaves them alone.
_MARKS: Final = {"instruction": "\ue0a1", "query": "\ue0a2", "document": "\ue0a3"}
_SAMPLE: Final = {"instruction": "Find {it}.", "query": "What is it?\n", "document": " A thing, {so}\nto say"}


class _NotAPromptError(ValueError):
    """A template does more than to put the texts in their places; the message says what."""


def chat_score_template(render: Render, chat: PairChat, prompt: str | None, name: str) -> ScoreTemplate:
    """Returns the prompt that a chat template makes of a pair.

    Args:
        render: Renders messages by the tokenizer's chat template.
        chat: How contents are given.
        prompt: The model's own default instruction.
        name: Of the model, for messages.

    Raises:
        UnsupportedModelError: The template does not render pairs, or does more than to put the texts in their places.
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
        # A template may raise anything.
        raise _unsupported(name, f"raises {type(error).__name__} ({error})") from error
    return template


def _derived(rendered: Rendered, prompt: str | None) -> ScoreTemplate:
    """Returns the template, read from a rendering with marks."""
    pair = _without_instruction(_MARKS)
    bare, instructed = rendered(pair), rendered(_MARKS)
    for key, mark in pair.items():
        if bare.count(mark) != 1:
            raise _NotAPromptError(f"places the {key} {bare.count(mark)} times")
    stripped = tuple(key for key, mark in _MARKS.items() if f" {mark} " not in rendered({**_MARKS, key: f" {mark} "}))
    if instructed.count(_MARKS["instruction"]) != 1:
        return ScoreTemplate(parts=(_with_fields(bare),), stripped=tuple(key for key in stripped if key in pair))
    # With and without an instruction the texts begin and end alike; in between stands the default, or the given one.
    place = instructed.index(_MARKS["instruction"])
    start = _num_shared(bare, instructed[:place])
    end = _num_shared(bare[start:][::-1], instructed[place + 1 :][::-1])
    default, given = bare[start : len(bare) - end], instructed[start : len(instructed) - end]
    if any(mark in default + given for mark in pair.values()):
        raise _NotAPromptError("puts the query or the document elsewhere when there is an instruction")
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
        raise _NotAPromptError("changes the texts that it is given")


def _without_instruction(texts: Texts) -> Texts:
    return {key: text for key, text in texts.items() if key != "instruction"}


def _num_shared(a: str, b: str) -> int:
    """Returns how many characters two texts begin alike with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _with_fields(text: str) -> str:
    """Returns a rendered text as a format string, its marks as fields."""
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


def _unsupported(name: str, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The chat template of {name} {what}; it must render the roles query and document as they are. "
        'Give the prompt with --hf-overrides \'{"score_template": {"parts": [...]}}\'.'
    )
