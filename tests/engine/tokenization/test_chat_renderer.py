"""Chats are rendered as transformers renders them, in a sandbox."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.engine.protocol.errors import EngineError, InvalidRequestError, RequestCancelledError, RequestTooLongError
from penstock.engine.protocol.model_info import TokenizerSpec
from penstock.engine.protocol.templates import ChatOptions, ChatTemplate
from penstock.engine.tokenization.chat_renderer import ChatRenderer
from penstock.engine.tokenization.model_tokenizer import IsCancelled, Truncation
from penstock.engine.tokenization.tokenizer import TokenizerJobs, TokenizerPool

from ...tables import table

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = Path(__file__).with_name("chat_templates")
CHATML, TRIMMING, PARTS_ONLY, BOTH, FEATURES = (
    (TEMPLATES / f"{name}.jinja").read_text().removesuffix("\n")
    for name in ("chatml", "trimming", "parts_only", "both", "features")
)
CHATS = [
    [{"role": "user", "content": "What holds water?"}],
    [{"role": "user", "content": " a "}, {"role": "assistant", "content": "b\n"}, {"role": "user", "content": "<é> "}],
]
WITH_SYSTEM = [{"role": "system", "content": "Be brief."}, *CHATS[0]]
ALL = {"chatml": CHATML, "trimming": TRIMMING, "both": BOTH, "features": FEATURES}


def renderer(source: str) -> ChatRenderer:
    return ChatRenderer(ChatTemplate(source=source, special_tokens=SPECIAL))


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def reference(source: str, chat: list[dict[str, Any]], **arguments: Any) -> str:
    return render_jinja_template([chat], chat_template=source, **SPECIAL, **arguments)[0][0]


@pytest.mark.parametrize("source", ALL.values(), ids=ALL)
@pytest.mark.parametrize("chat", CHATS, ids=["one", "three"])
@pytest.mark.parametrize("flag", [None, "add_generation_prompt", "continue_final_message"])
def test_rendered_chat_equals_transformers(source: str, chat: list[dict[str, Any]], flag: str | None) -> None:
    flags = {flag: True} if flag else {}
    assert renderer(source).render(chat, ChatOptions(**flags)) == reference(source, chat, **flags)


@pytest.mark.parametrize("source", [CHATML, BOTH, FEATURES], ids=["chatml", "both", "features"])
def test_arguments_and_system_messages_reach_the_template(source: str) -> None:
    rendered = renderer(source).render(WITH_SYSTEM, ChatOptions(arguments={"wanted": "more"}))
    assert rendered == reference(source, WITH_SYSTEM, wanted="more")


WHAT, HOLDS = ({"type": "text", "text": text} for text in ("What", "holds?"))


@pytest.mark.parametrize(
    ("source", "content", "rendered_content"),
    [
        *((source, [WHAT, HOLDS], "What\nholds?") for source in (CHATML, TRIMMING, FEATURES)),
        *((source, [WHAT, HOLDS], [WHAT, HOLDS]) for source in (PARTS_ONLY, BOTH)),
        (PARTS_ONLY, "What", [WHAT]),
        (BOTH, "What", "What"),
    ],
)
@pytest.mark.parametrize("is_continued", [False, True])
def test_content_takes_the_form_that_the_template_reads(
    source: str, content: Any, rendered_content: Any, is_continued: bool
) -> None:
    rendered = renderer(source).render([user(content)], ChatOptions(continue_final_message=is_continued))
    assert rendered == reference(source, [user(rendered_content)], continue_final_message=is_continued)


def test_message_without_content_is_rendered() -> None:
    source = "{% for m in messages %}{{ m.role }}:{{ m.content or '-' }} {% endfor %}"
    assert renderer(source).render([{"role": "assistant", "content": None}], ChatOptions()) == "assistant:- "


BOTH_FLAGS = {"add_generation_prompt": True, "continue_final_message": True}
CONTINUED = {"continue_final_message": True}


@pytest.mark.parametrize(
    ("source", "chat", "options", "param", "part"),
    [
        (CHATML, [], {}, "messages", "at least one"),
        (TRIMMING, WITH_SYSTEM, {}, "messages", "Roles must alternate"),
        (CHATML, CHATS[0], BOTH_FLAGS, "continue_final_message", "Cannot set both `continue_final_message` and"),
        (CHATML, CHATS[0], {"arguments": {"tokenize": True}}, "chat_template_kwargs", "'tokenize'"),
        ("{{ messages[0].role }}", CHATS[0], CONTINUED, "continue_final_message", "leaves the last message out"),
        *(
            (source, CHATS[0], {}, "messages", part)
            for source, part in table(__file__, "test_chat_that_cannot_be_rendered_is_rejected")
        ),
    ],
)
def test_chat_that_cannot_be_rendered_is_rejected(
    source: str, chat: list[dict[str, Any]], options: dict[str, Any], param: str, part: str
) -> None:
    with pytest.raises(InvalidRequestError) as rejection:
        renderer(source).render(chat, ChatOptions(**options))
    assert rejection.value.param == param
    assert part in rejection.value.message


def tokenizer_json() -> str:
    words = ["[UNK]", "[CLS]", "[SEP]", *"abcdef", "user", ":", "<s>", "</s>", "p"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer.to_str()


SPEC = TokenizerSpec(
    json=tokenizer_json(),
    truncation_side="right",
    uses_token_types=False,
    chat_template=ChatTemplate(
        source="{{ bos_token }}{% for m in messages %} {{ m.role }} : {{ m.content }} {% endfor %}{{ eos_token }}",
        special_tokens=SPECIAL,
    ),
)


@pytest.fixture
async def pool() -> AsyncIterator[TokenizerPool]:
    pool = TokenizerPool(SPEC, vocab_size=14, do_lower_case=False, num_threads=1)
    yield pool
    pool.close()


async def test_rendered_chat_has_only_its_own_special_tokens(
    pool: TokenizerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (text,) = await pool.render_chats([[{"role": "user", "content": "a b"}]], ChatOptions())
    assert text == "<s> user : a b </s>"
    (tokens,) = await pool.encode([text], Truncation(max_num_tokens=7), add_special_tokens=False)
    assert tokens.token_ids.tolist() == [11, 9, 10, 3, 4, 12]
    monkeypatch.setattr("penstock.engine.tokenization.tokenizer.MAX_RENDERED_CHARS", 38)
    with pytest.raises(InvalidRequestError, match=r"first 3 of 4 chats have 57 characters .* is 38"):
        await pool.render_chats([[user("a b")]] * 4, ChatOptions())
    pool._jobs.chars.limit = pool._jobs.chars.used = 40_000
    with pytest.raises(EngineError, match="this one takes 800"):  # each chat may have all arguments
        await pool.render_chats([[], []], ChatOptions(arguments={"a": "a" * 40_000}))
    with pytest.raises(EngineError, match="this one takes 400"):  # all characters of the chat
        await pool.render_chats([[user([user("a" * 20_000)]), user("b" * 20_000)]], ChatOptions())


async def test_each_operation_ends_if_its_caller_disconnects(
    pool: TokenizerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(_: TokenizerJobs, work: Callable[[IsCancelled], Any], *_args: Any, **_options: Any) -> Any:
        return work(lambda: True)

    monkeypatch.setattr(TokenizerJobs, "run", run)
    texts, limit = [" " * 300_000] * 2, Truncation(max_num_tokens=1_000_000)
    for operation in (
        *(
            pool.encode(texts, limit),
            pool.encode_parts(texts, limit),
            pool.encode_pairs([("a", t) for t in texts], limit),
        ),
        *(call(texts, add_special_tokens=False) for call in (pool.token_ids, pool.token_details)),
        pool.token_ids(texts[:1], add_special_tokens=False, on_count=int),
        pool.decode([[3] * 200_000] * 2, skip_special_tokens=False),
        pool.render_chats([CHATS[0]], ChatOptions()),
    ):
        with pytest.raises(RequestCancelledError):
            await operation


async def test_text_without_special_tokens_is_cut_to_the_limit(pool: TokenizerPool) -> None:
    for side, expected in (("right", [3, 4, 5]), ("left", [6, 7, 8])):
        cut = Truncation(max_num_tokens=3, may_truncate=True, side=side)
        (tokens,) = await pool.encode(["a b c d e f"], cut, add_special_tokens=False)
        assert tokens.token_ids.tolist() == expected
    with pytest.raises(RequestTooLongError):
        await pool.encode(["a b c d"], Truncation(max_num_tokens=3), add_special_tokens=False)


async def test_prompt_is_counted_without_special_tokens(pool: TokenizerPool) -> None:
    arguments: dict[str, Any] = {"prompt": "p p ", "skip_prompt": True, "add_special_tokens": False}
    texts = ["a b", ""]
    tokenized = await pool.encode(texts, Truncation(max_num_tokens=9), **arguments)
    assert [(t.token_ids.tolist(), t.num_skipped_tokens) for t in tokenized] == [([13, 13, 3, 4], 2), ([13, 13], 1)]


async def test_model_without_a_chat_template_rejects_chats() -> None:
    spec = TokenizerSpec(json=SPEC.json, truncation_side="right", uses_token_types=False)
    pool = TokenizerPool(spec, vocab_size=14, do_lower_case=False, num_threads=1)
    with pytest.raises(InvalidRequestError, match="no chat template") as rejection:
        await pool.render_chats([CHATS[0]], ChatOptions())
    assert rejection.value.param == "messages"
    pool.close()
