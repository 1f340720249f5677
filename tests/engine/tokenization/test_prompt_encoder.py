"""Prompts around texts of a language model that reads images."""

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from penstock.engine.images.preprocessor import ImagePreprocessor
from penstock.engine.protocol.images import ImageResize, ImageSpec
from penstock.engine.protocol.model_info import TokenizerSpec
from penstock.engine.protocol.templates import InputPrompts, PromptTemplate
from penstock.engine.tokenization.model_tokenizer import Truncation
from penstock.engine.tokenization.prompt_encoder import PromptEncoder
from penstock.engine.tokenization.tokenizer import TokenizerPool

WORDS = ["<unk>", "<image>", "sys", "user", "end", "find", *"abcdef"]
TEMPLATE = PromptTemplate(before="sys user ", instructed="sys {instruction} user ", after=" end")
PROMPTS = InputPrompts(
    text=TEMPLATE, image=TEMPLATE, image_text="<image>", placeholder="<image>", placeholder_id=WORDS.index("<image>")
)
SPEC = ImageSpec(
    patch_size=4, resize=ImageResize.EXACT, size=(8, 8), mean=(0.5,) * 3, std=(0.5,) * 3, max_patches=4, merge_size=2
)


def make_pool() -> TokenizerPool:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    spec = TokenizerSpec(json=words.to_str(), truncation_side="right", uses_token_types=False, input_prompts=PROMPTS)
    return TokenizerPool(spec, vocab_size=len(WORDS), do_lower_case=False, num_workers=1)


async def encode(encoder: PromptEncoder, instruction: str, limit: Truncation) -> list[str]:
    inputs = ["a b c d", "e"]
    found = await encoder.encode(inputs, limit, instruction=instruction, is_rendered=False, add_special_tokens=True)
    return [" ".join(WORDS[i] for i in tokens.token_ids) for tokens in found]


@pytest.mark.parametrize("left", [False, True])
async def test_prompt_is_tokenized_once_for_each_instruction(monkeypatch: Any, left: bool) -> None:
    pytest.importorskip("PIL")
    monkeypatch.setattr("penstock.engine.tokenization.prompt_encoder._MAX_KEPT_TEXTS", 3)
    pool = make_pool()
    tokenized: list[str] = []
    token_ids = pool.token_ids

    async def counted(texts: list[str], **options: Any) -> list[list[int]]:
        tokenized.extend(texts)
        return await token_ids(texts, **options)

    monkeypatch.setattr(pool, "token_ids", counted)
    encoder = PromptEncoder(PROMPTS, pool, ImagePreprocessor(SPEC, num_workers=1))
    limit = Truncation(max_num_tokens=7, may_truncate=True, side="left" if left else "right")
    cut = "c d" if left else "a b"
    for _ in range(2):
        assert await encode(encoder, "find a", limit) == [f"sys find a user {cut} end", "sys find a user e end"]
        assert await encode(encoder, "", limit) == ["sys user a b c d end", "sys user e end"]
    assert sorted(tokenized) == [" end", "sys find a user ", "sys user "]
    for instruction in ("b", "c", "find a"):  # the oldest texts were removed
        await encode(encoder, instruction, limit)
    assert tokenized[3:] == ["sys b user ", "sys c user ", "sys find a user "]
