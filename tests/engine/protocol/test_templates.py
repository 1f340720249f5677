"""Score templates, chat templates that become score templates, and the chat template of a tokenizer."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine.core.loading.chat_score_template import chat_score_template
from penstock.engine.protocol.errors import UnsupportedModelError
from penstock.engine.protocol.model_info import PairChat
from penstock.engine.protocol.templates import (
    ChatTemplate,
    ScoreTemplate,
    chat_template_of,
    escaped,
    fields_of,
    split_at,
)

from ...tables import cases

Messages = list[dict[str, Any]]


@cases(__file__, "values", "message")
def test_wrong_score_template_is_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ScoreTemplate.from_dict(values)


def test_fields_are_filled_and_braces_of_texts_stay() -> None:
    template = ScoreTemplate(parts=("{{{query}}}-{document}",), stripped=("document",))
    assert template.filled(template.parts[0], "{document}", " {query} ", None) == "{{document}}-{query}"
    assert fields_of("a {{b}} {query}") == ("query",)
    assert split_at("{{document}} {query} {document}{{}}", "document") == ("{{document}} {query} ", "{{}}")
    assert escaped("{x}").format() == "{x}"
    split = ScoreTemplate(parts=("{instruction}{query}", "{document}"), instruction_format="i {instruction} ")
    assert split.instructed("x") == "i x "
    assert split.instructed("") == split.instructed(None) == ""
    joint = ScoreTemplate(parts=("{instruction} {query} {document}",), instruction="find")
    assert joint.instructed(None) == "find"


# Chat templates ---------------------------------------------------------------------------------------------------


def content(messages: Messages, role: str) -> str | None:
    for message in messages:
        if message["role"] == role:
            value = message["content"]
            return value[0]["text"] if isinstance(value, list) else value
    return None


def with_default(messages: Messages) -> str:
    system = content(messages, "system") or "find {it}"
    return f"<s>{system}|{content(messages, 'query')}|{content(messages, 'document')}<e>\n"


def with_optional_line(messages: Messages) -> str:
    system = content(messages, "system")
    line = f"instruction: {system}\n" if system else ""
    return f"{line}query: {content(messages, 'query')} {{document: {content(messages, 'document')}}}"


def trimmed(messages: Messages) -> str:
    return f"{(content(messages, 'document') or '').strip()}?{content(messages, 'query')}"


@pytest.mark.parametrize("render", [with_default, with_optional_line, trimmed])
@pytest.mark.parametrize("prompt", [None, "own {prompt}"])
def test_chat_template_becomes_a_score_template(render: Callable[[Messages], str], prompt: str | None) -> None:
    template = chat_score_template(render, PairChat(is_structured=prompt is None), prompt, "model")
    assert template.takes_instruction is (render is not trimmed)
    for instruction in (None, "given {now}") if template.takes_instruction else (None,):
        messages: Messages = [{"role": "query", "content": "a {q}"}, {"role": "document", "content": " b\n"}]
        if template.takes_instruction and (instruction or prompt):
            messages.insert(0, {"role": "system", "content": instruction or prompt})
        filled = "".join(template.filled(part, "a {q}", " b\n", instruction) for part in template.parts)
        assert filled == render(messages)


def rejecting(messages: Messages) -> str:
    raise TypeError("no such role")


def doubling(messages: Messages) -> str:
    return f"{content(messages, 'query')}{content(messages, 'query')}{content(messages, 'document')}"


def upper(messages: Messages) -> str:
    return f"{content(messages, 'query')} {content(messages, 'document')}".upper()


def reordering(messages: Messages) -> str:
    query, document, system = (content(messages, role) for role in ("query", "document", "system"))
    return f"{document} {system} {query}" if system else f"{query} {document}"


@pytest.mark.parametrize(
    ("render", "message"),
    [
        (rejecting, r"raises TypeError \(no such role\)"),
        (doubling, "inserts the query 2 times"),
        (upper, "changes the texts"),
        (reordering, "moves the query"),
        (lambda messages: content(messages, "query"), "inserts the document 0 times.*score_template"),
    ],
)
def test_chat_template_that_changes_the_pair_is_rejected(render: Callable[[Messages], str], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"chat template of model .*{message}"):
        chat_score_template(render, PairChat(), None, "model")


def test_default_chat_template_of_a_tokenizer_is_found() -> None:
    tokens = {"bos_token": "<s>", "additional_special_tokens": ["<a>"]}
    for source in ("a template", {"default": "a template", "tool_use": "-"}):
        found = chat_template_of(SimpleNamespace(chat_template=source, special_tokens_map=tokens))
        assert found == ChatTemplate(source="a template", special_tokens=tokens)
    for source in (None, "", {"tool_use": "-"}):
        assert chat_template_of(SimpleNamespace(chat_template=source, special_tokens_map=tokens)) is None
    assert chat_template_of(SimpleNamespace()) is None
