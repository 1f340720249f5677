"""Prompts around pairs: as written, as read off a chat template, and as token ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from penstock.engine.core.loading.chat_score_template import chat_score_template
from penstock.engine.protocol.errors import InvalidRequestError, RequestTooLongError, UnsupportedModelError
from penstock.engine.protocol.model_info import PairChat, TokenizerSpec
from penstock.engine.protocol.templates import ScoreTemplate, escaped, fields_of, split_at
from penstock.engine.tokenization.model_tokenizer import Truncation
from penstock.engine.tokenization.pairs import ScoreTemplateEncoder
from penstock.engine.tokenization.tokenizer import TokenizerPool

JOINT = ScoreTemplate(parts=("sys", "{instruction} q {query} d {document} end", "suf"), instruction="find")
SPLIT = ScoreTemplate(
    parts=("sys", "{instruction}q {query}", "sep", "d {document}", "suf"), instruction_format="i {instruction} "
)
LAST = ScoreTemplate(parts=("sys", "d {document}", "q {query}", "{instruction} end"), instruction="find")
WORDS = ["sys", "suf", "sep", "find", "q", "d", "i", "end", *"abcdefghij", *map(str, range(30))]

Messages = list[dict[str, Any]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token for each word, and special tokens that no prompt must get."""
    ids = {word: i for i, word in enumerate(["<unk>", "<s>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def words(tokenizer: Tokenizer, ids: list[int] | None) -> str:
    assert ids is not None
    return " ".join(str(tokenizer.id_to_token(i)) for i in ids)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("{query}",), "{document} 0 times"),
        (("{query} {document}", "{query}"), "{query} 2 times"),
        (("{query} {document} {x}",), "the field {x}"),
        (("{query!r} {document}",), "the field {query}"),
        (("{query:>9} {document}",), "the field {query}"),
        (("{query.real} {document}",), "the field {query.real}"),
        (("{query} {document} {instruction} {instruction}",), "{instruction} 2 times"),
        (("{query} {document",), "'{query} {document' has a brace that begins or ends no field"),
        (("{query} {document}", 'json: {"a"'), "known are {instruction}, {query}, {document}. Write {{ and }} for"),
        (("{query} {document} }",), "has a brace that begins or ends no field (Single '}'"),
    ],
)
def test_wrong_templates_are_refused(parts: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        ScoreTemplate(parts=parts)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "parts is None"),
        ({"parts": "{query}{document}"}, "must be a list of texts"),
        ({"parts": ["{query}{document}", 3]}, "must be a list of texts"),
        ({"parts": ["{query}{document}"], "instruction": 3}, "instruction is 3"),
        ({"parts": ["{query}{document}"], "instruction_format": "x"}, "must hold {instruction} once"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        ScoreTemplate.from_dict(values)
    assert message in str(caught.value)


def test_fields_are_filled_and_braces_in_texts_stay() -> None:
    template = ScoreTemplate(parts=("{{{query}}}-{document}",), stripped=("document",))
    assert template.filled(template.parts[0], "{document}", " {query} ", None) == "{{document}}-{query}"
    assert fields_of("a {{b}} {query}") == ("query",)
    assert split_at("{{document}} {query} {document}{{}}", "document") == ("{{document}} {query} ", "{{}}")
    assert escaped("{x}").format() == "{x}"
    assert SPLIT.instructed("x") == "i x "
    assert SPLIT.instructed("") == SPLIT.instructed(None) == ""
    assert JOINT.instructed(None) == "find"


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


def after_the_pair(messages: Messages) -> str:
    return "".join(f"<{m['role']}>{content([m], m['role'])}" for m in reversed(messages))


@pytest.mark.parametrize("render", [with_default, with_optional_line, trimmed, after_the_pair])
@pytest.mark.parametrize("prompt", [None, "own {prompt}"])
@pytest.mark.parametrize("is_structured", [False, True])
def test_a_chat_template_becomes_a_score_template(
    render: Callable[[Messages], str], prompt: str | None, is_structured: bool
) -> None:
    template = chat_score_template(render, PairChat(is_structured=is_structured), prompt, "model")
    assert template.takes_instruction is (render is not trimmed)
    for instruction in (None, "asked {now}") if template.takes_instruction else (None,):
        messages: Messages = [{"role": "query", "content": "a {q}"}, {"role": "document", "content": " b\n"}]
        if template.takes_instruction and (instruction or prompt):
            messages.insert(0, {"role": "system", "content": instruction or prompt})
        filled = "".join(template.filled(part, "a {q}", " b\n", instruction) for part in template.parts)
        assert filled == render(messages)


def refusing(messages: Messages) -> str:
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
        (refusing, r"raises TypeError \(no such role\)"),
        (doubling, "places the query 2 times"),
        (upper, "changes the texts"),
        (reordering, "elsewhere"),
    ],
)
def test_a_chat_template_that_does_more_is_refused(render: Callable[[Messages], str], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"chat template of model .*{message}"):
        chat_score_template(render, PairChat(), None, "model")


# Token ids --------------------------------------------------------------------------------------------------------


def test_parts_are_joined_without_other_special_tokens(tokenizer: Tokenizer) -> None:
    pairs = [("a b", "c d e"), ("a b", ""), ("", "f")]
    assert [words(tokenizer, ids) for ids in ScoreTemplateEncoder(tokenizer, JOINT).encode(pairs, None)] == [
        "sys find q a b d c d e end suf",
        "sys find q a b d end suf",
        "sys find q d f end suf",
    ]
    assert [words(tokenizer, ids) for ids in ScoreTemplateEncoder(tokenizer, SPLIT).encode(pairs[:1], "g h")] == [
        "sys i g h q a b sep d c d e suf"
    ]
    assert ScoreTemplateEncoder(tokenizer, SPLIT).encode([], None) == []


@pytest.mark.parametrize(
    ("template", "limit", "left", "expected"),
    [
        (JOINT, 10, False, "sys find q a b d 0 1 end suf"),
        (JOINT, 10, True, "sys find q a b d 8 9 end suf"),
        (JOINT, 9, False, "sys find q a b d 0 end suf"),
        (JOINT, 8, False, "sys find q a d 0 end suf"),  # three quarters of the room may be the query's
        (SPLIT, 10, False, "sys q a b sep d 0 1 2 suf"),
        (SPLIT, 10, True, "sys q a b sep d 7 8 9 suf"),
        (SPLIT, 7, False, "sys q a sep d 0 suf"),
    ],
)
def test_the_document_is_cut_and_then_the_query_and_the_prompt_never(
    template: ScoreTemplate, limit: int, left: bool, expected: str, tokenizer: Tokenizer
) -> None:
    pair = ("a b", " ".join(map(str, range(10))))
    encoder = ScoreTemplateEncoder(tokenizer, template)
    assert words(tokenizer, encoder.cut(pair, None, limit, left=left)) == expected
    (uncut,) = encoder.encode([pair], None)
    assert encoder.cut(pair, None, len(uncut), left=left) == uncut


@pytest.mark.parametrize(
    ("template", "limit", "expected"),
    [
        (JOINT, 14, "sys find q 0 1 2 3 4 5 d a b end suf"),  # frame of 6
        (JOINT, 11, "sys find q 0 1 2 d a b end suf"),
        (SPLIT, 11, "sys q 0 1 2 3 sep d a b suf"),  # frame of 5
        (LAST, 11, "sys d a b q 0 1 2 3 find end"),
    ],
)
@pytest.mark.parametrize("left", [False, True])
def test_a_long_query_leaves_room_for_the_document(
    template: ScoreTemplate, limit: int, expected: str, left: bool, tokenizer: Tokenizer
) -> None:
    query = " ".join(map(str, range(30)))
    encoder = ScoreTemplateEncoder(tokenizer, template)
    assert words(tokenizer, encoder.cut((query, "a b"), None, limit, left=left)) == expected
    cut = [encoder.cut((query, document), None, limit, left=left) for document in ("c", "e")]
    assert cut[0] != cut[1]
    frame = len(encoder.encode([("", "")], None)[0])
    assert encoder.cut((query, ""), None, frame + 1, left=left) is not None
    assert encoder.cut((query, "a"), None, frame + 2, left=left) is not None
    assert encoder.cut((query, "a"), None, frame + 1, left=left) is None


def test_a_limit_below_the_prompt_leaves_nothing(tokenizer: Tokenizer) -> None:
    assert ScoreTemplateEncoder(tokenizer, JOINT).cut(("a", "b"), None, 2, left=False) is None
    assert ScoreTemplateEncoder(tokenizer, SPLIT).cut(("a", "b"), None, 2, left=False) is None


async def test_the_pool_cuts_or_refuses_pairs_by_their_template(tokenizer: Tokenizer) -> None:
    spec = TokenizerSpec(json=tokenizer.to_str(), truncation_side="left", uses_token_types=True, score_template=JOINT)
    pool = TokenizerPool(spec, vocab_size=tokenizer.get_vocab_size(), do_lower_case=True, num_workers=1)
    try:
        pairs = [("A B", "c"), ("a", "0 1 2 3 4 5")]
        cut = await pool.encode_pairs(pairs, Truncation(max_num_tokens=9, cut=True), instruction="g")
        assert [words(tokenizer, t.token_ids.tolist()) for t in cut] == [
            "sys g q a b d c end suf",
            "sys g q a d 4 5 end suf",
        ]
        assert {t.type_boundary for t in cut} == {0}
        with pytest.raises(RequestTooLongError, match="input 1 has 13 tokens"):
            await pool.encode_pairs(pairs, Truncation(max_num_tokens=9))
        with pytest.raises(InvalidRequestError, match="The limit is 2 tokens, but the prompt around") as caught:
            await pool.encode_pairs(pairs, Truncation(max_num_tokens=2, cut=True))
        assert caught.value.param == "truncate_prompt_tokens"
        with pytest.raises(InvalidRequestError, match="instruction leaves no room for a query and") as caught:
            await pool.encode_pairs(pairs, Truncation(max_num_tokens=9, cut=True), instruction="g g g g g")
        assert caught.value.param == "instruction"
    finally:
        pool.close()
    plain = TokenizerSpec(json=tokenizer.to_str(), truncation_side="right", uses_token_types=False)
    pool = TokenizerPool(plain, vocab_size=tokenizer.get_vocab_size(), do_lower_case=False, num_workers=1)
    try:
        with pytest.raises(InvalidRequestError, match="without an instruction"):
            await pool.encode_pairs(pairs, Truncation(max_num_tokens=9), instruction="g")
        assert len(await pool.encode_pairs(pairs, Truncation(max_num_tokens=9), instruction="")) == 2
    finally:
        pool.close()
