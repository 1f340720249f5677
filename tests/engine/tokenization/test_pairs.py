"""Prompts around pairs as token ids, and the limit on their length."""

from collections.abc import AsyncIterator

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from penstock.engine.protocol.errors import EngineOverloadedError, InvalidRequestError, RequestTooLongError
from penstock.engine.protocol.model_info import TokenizerSpec
from penstock.engine.protocol.templates import ScoreTemplate
from penstock.engine.tokenization.model_tokenizer import Truncation
from penstock.engine.tokenization.pairs import ScoreTemplateEncoder
from penstock.engine.tokenization.tokenizer import TokenizerPool

from ...tables import cases

JOINT = ScoreTemplate(parts=("sys", "{instruction} q {query} d {document} end", "suf"), instruction="find")
SPLIT = ScoreTemplate(
    parts=("sys", "{instruction}q {query}", "sep", "d {document}", "suf"), instruction_format="i {instruction} "
)
LAST = ScoreTemplate(parts=("sys", "d {document}", "q {query}", "{instruction} end"), instruction="find")
TEMPLATES = {"joint": JOINT, "split": SPLIT, "last": LAST}
WORDS = ["sys", "suf", "sep", "find", "q", "d", "i", "end", *"abcdefghij", *map(str, range(30))]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token for each word, and a special token that prompts must not get."""
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


def test_parts_are_joined_without_special_tokens(tokenizer: Tokenizer) -> None:
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


@cases(__file__, "template", "limit", "left", "expected")
def test_document_is_truncated_before_the_query(
    template: str, limit: int, left: bool, expected: str, tokenizer: Tokenizer
) -> None:
    pair = ("a b", " ".join(map(str, range(10))))
    encoder = ScoreTemplateEncoder(tokenizer, TEMPLATES[template])
    assert words(tokenizer, encoder.truncate(pair, None, limit, left=left)) == expected
    (uncut,) = encoder.encode([pair], None)
    assert encoder.truncate(pair, None, len(uncut), left=left) == uncut


@cases(__file__, "template", "limit", "expected")
@pytest.mark.parametrize("left", [False, True])
def test_long_query_leaves_room_for_the_document(
    template: str, limit: int, expected: str, left: bool, tokenizer: Tokenizer
) -> None:
    query = " ".join(map(str, range(30)))
    encoder = ScoreTemplateEncoder(tokenizer, TEMPLATES[template])
    assert words(tokenizer, encoder.truncate((query, "a b"), None, limit, left=left)) == expected
    truncated = [encoder.truncate((query, document), None, limit, left=left) for document in ("c", "e")]
    assert truncated[0] != truncated[1]
    frame = len(encoder.encode([("", "")], None)[0])
    assert encoder.truncate((query, ""), None, frame + 1, left=left) is not None
    assert encoder.truncate((query, "a"), None, frame + 2, left=left) is not None
    assert encoder.truncate((query, "a"), None, frame + 1, left=left) is None
    assert encoder.truncate(("a", "b"), None, 2, left=left) is None


@pytest.fixture
async def pool(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> AsyncIterator[TokenizerPool]:
    spec = TokenizerSpec(
        json=tokenizer.to_str(), truncation_side="left", uses_token_types=True, score_template=request.param
    )
    pool = TokenizerPool(spec, vocab_size=tokenizer.get_vocab_size(), do_lower_case=True, num_threads=1)
    yield pool
    pool.close()


PAIRS = [("A B", "c"), ("a", "0 1 2 3 4 5")]
UNCUT = Truncation(max_num_tokens=512)
CUT = Truncation(max_num_tokens=9, may_truncate=True)


@pytest.mark.parametrize("pool", [JOINT], indirect=True)
async def test_pool_cuts_or_rejects_long_pairs(pool: TokenizerPool, tokenizer: Tokenizer) -> None:
    truncated = await pool.encode_pairs(PAIRS, CUT, instruction="g")
    assert [words(tokenizer, t.token_ids.tolist()) for t in truncated] == [
        "sys g q a b d c end suf",
        "sys g q a d 4 5 end suf",
    ]
    assert {t.type_boundary for t in truncated} == {0}
    with pytest.raises(RequestTooLongError, match="input 1 has 13 tokens"):
        await pool.encode_pairs(PAIRS, Truncation(max_num_tokens=9))
    with pytest.raises(InvalidRequestError, match="The limit is 2 tokens, but the prompt leaves") as caught:
        await pool.encode_pairs(PAIRS, Truncation(max_num_tokens=2, may_truncate=True))
    assert caught.value.param == "truncate_prompt_tokens"
    with pytest.raises(InvalidRequestError, match="instruction leaves no room for a query and") as caught:
        await pool.encode_pairs(PAIRS, CUT, instruction="g g g g g")
    assert caught.value.param == "instruction"
    with pytest.raises(InvalidRequestError, match="instruction leaves no room for a query and"):
        await pool.encode_pairs(PAIRS, CUT, instruction=" " * (CUT.max_chars + 1))
    checks: list[None] = []  # one between two groups of pairs
    pool._pairs.encode(PAIRS * 2, UNCUT, "g" * 130_000, lambda: bool(checks.append(None)))
    assert len(checks) == 3
    pool._jobs.chars.limit = 100
    pool._jobs.chars.add("", 1)
    with pytest.raises(EngineOverloadedError, match="this one takes 116"):
        await pool.encode_pairs(PAIRS, UNCUT, instruction="g" * 50)
    for pairs, instruction in ((PAIRS * 64, "g" * 524_288), ([("q" * 524_288, "a")] * 128, None)):
        with pytest.raises(InvalidRequestError, match=r"each of 128 texts, which adds 6\d{7} .* Send fewer inputs"):
            await pool.encode_pairs(pairs, UNCUT, instruction=instruction)


@pytest.mark.parametrize("pool", [None], indirect=True)
async def test_pairs_without_a_template_take_no_instruction(pool: TokenizerPool) -> None:
    with pytest.raises(InvalidRequestError, match="does not accept an instruction"):
        await pool.encode_pairs(PAIRS, CUT, instruction="g")
    assert len(await pool.encode_pairs(PAIRS, CUT, instruction="")) == 2
