"""Prompts around texts of a language model that reads images."""

from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from penstock.engine.images.preprocessor import ImagePreprocessor
from penstock.engine.protocol.errors import InvalidRequestError, RequestTooLongError
from penstock.engine.protocol.images import ImageInput, ImageResize, ImageSpec, MixedInput, PatchGrid
from penstock.engine.protocol.messages import TokenizedInput
from penstock.engine.protocol.model_info import TokenizerSpec
from penstock.engine.protocol.params import Input
from penstock.engine.protocol.templates import InputPrompts, PromptTemplate
from penstock.engine.tokenization.model_tokenizer import Truncation
from penstock.engine.tokenization.prompt_encoder import PromptEncoder
from penstock.engine.tokenization.tokenizer import TokenizerPool

from ...tables import table
from ..images.pictures import colored

pytest.importorskip("PIL")
WORDS = ["<unk>", "<image>", "sys", "user", "end", "find", *"abcdef", "[C]", "[S]"]
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
    words.post_processor = processors.TemplateProcessing(
        single="[C] $A [S]", pair="[C] $A [S] $B [S]", special_tokens=[("[C]", 12), ("[S]", 13)]
    )
    spec = TokenizerSpec(json=words.to_str(), truncation_side="right", uses_token_types=False, input_prompts=PROMPTS)
    return TokenizerPool(spec, vocab_size=len(WORDS), do_lower_case=False, num_threads=1)


async def encode(encoder: PromptEncoder, instruction: str, limit: Truncation) -> list[str]:
    inputs = ["a b c d", "e"]
    found = await encoder.encode(inputs, limit, instruction=instruction, is_rendered=False, add_special_tokens=False)
    return shown(found)


def shown(found: list[TokenizedInput]) -> list[str]:
    return [" ".join(WORDS[i] for i in tokens.token_ids) for tokens in found]


@pytest.mark.parametrize("left", [False, True])
async def test_prompt_is_tokenized_once_for_each_instruction(monkeypatch: Any, left: bool) -> None:
    monkeypatch.setattr("penstock.engine.tokenization.prompt_encoder._MAX_CACHED_TEXTS", 3)
    pool = make_pool()
    tokenized: list[str] = []
    token_ids = pool.token_ids

    async def counted(texts: list[str], **options: Any) -> list[list[int]]:
        tokenized.extend(texts)
        return await token_ids(texts, **options)

    monkeypatch.setattr(pool, "token_ids", counted)
    encoder = PromptEncoder(PROMPTS, pool, ImagePreprocessor(SPEC, num_threads=1))
    limit = Truncation(max_num_tokens=7, may_truncate=True, side="left" if left else "right")
    cut = "c d" if left else "a b"
    for _ in range(2):
        assert await encode(encoder, "find a", limit) == [f"sys find a user {cut} end", "sys find a user e end"]
        assert await encode(encoder, "", limit) == ["sys user a b c d end", "sys user e end"]
    assert sorted(tokenized) == [" end", "sys find a user ", "sys user "]
    for instruction in ("b", "c", "find a"):  # the oldest texts were removed
        await encode(encoder, instruction, limit)
    assert tokenized[3:] == ["sys b user ", "sys c user ", "sys find a user "]


IMAGE = ImageInput(colored("red"))  # two tokens
IMAGE_PROMPTS = replace(PROMPTS, image=PromptTemplate(before="user ", after=" f"), image_text="a <image> b")


class Encoder:
    """A PromptEncoder of a model with images of two tokens."""

    def __init__(self, **prompts: Any) -> None:
        images = ImagePreprocessor(replace(SPEC, size=(8, 16), max_patches=8), num_threads=1)
        self.prompts = PromptEncoder(replace(IMAGE_PROMPTS, **prompts), make_pool(), images)

    async def encode(
        self, *inputs: Input, limit: int = 99, is_rendered: bool = False, special: bool = True, **truncation: Any
    ) -> list[TokenizedInput]:
        cut = Truncation(max_num_tokens=limit, **truncation)
        return await self.prompts.encode(
            inputs, cut, instruction="find", is_rendered=is_rendered, add_special_tokens=special
        )


async def test_prompts_surround_texts_and_images() -> None:
    mixed = MixedInput(("d ", IMAGE, " e ", IMAGE))
    inputs = ["c", IMAGE, mixed, [3, 4]]
    expected = table(__file__, "test_prompts_surround_texts_and_images")
    found = await Encoder().encode(*inputs)
    assert shown(found) == [f"[C] {words} [S]" for words in expected[:3]] + expected[3:]
    assert [len(tokens.images) for tokens in found] == [0, 1, 2, 0]
    assert [tokens.is_truncated for tokens in found] == [False] * 4
    assert shown(await Encoder().encode(*inputs, special=False)) == expected
    assert shown(await Encoder(adds_special_tokens=False).encode(*inputs)) == expected
    rendered = await Encoder(adds_special_tokens=False).encode("c", mixed, is_rendered=True)
    assert shown(rendered) == ["[C] c [S]", "[C] d <image> <image> e <image> <image> [S]"]
    pairs = await Encoder().prompts.pairs([("c", IMAGE), (IMAGE, mixed)], Truncation(max_num_tokens=99), None)
    assert shown(pairs) == [
        "[C] c [S] a <image> <image> b [S]",
        "[C] a <image> <image> b [S] d a <image> <image> b e a <image> <image> b [S]",
    ]
    assert [len(tokens.images) for tokens in pairs] == [1, 3]


async def test_truncation_keeps_prompts_and_images() -> None:
    encoder, first, last = Encoder(), MixedInput((IMAGE, " c d e")), MixedInput(("c d e ", IMAGE))
    whole = await encoder.encode(first, last, limit=11)
    assert shown(whole)[0] == "[C] user a <image> <image> b c d e f [S]"
    cut: dict[str, Any] = {"limit": 9, "may_truncate": True}
    (found,) = await encoder.encode(first, **cut)
    assert shown([found]) == ["[C] user a <image> <image> b c f [S]"]
    assert found.is_truncated
    (found,) = await encoder.encode(last, side="left", **cut)
    assert shown([found]) == ["[C] user e a <image> <image> b f [S]"]
    assert found.is_truncated
    assert shown(await encoder.encode("c d e", limit=7, may_truncate=True)) == ["[C] sys find user c end [S]"]
    for item, options, message in (
        (last, cut, "truncation would remove an image of input 0; shorten its text"),
        (first, cut | {"side": "left"}, "truncation would remove an image of input 0"),
        ("c", cut | {"limit": 6}, "prompt and special tokens take 6 tokens"),
        ("c <image>", {}, "Input 0 contains the token <image>"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            await encoder.encode(item, **options)
    for item, limit, message in (
        (first, 10, "has 11 tokens"),
        (MixedInput((IMAGE,) * 3), 4, "the images of input 0 have 6 tokens"),
    ):
        with pytest.raises(RequestTooLongError, match=message):
            await encoder.encode(item, limit=limit)


async def test_model_that_reads_either_rejects_texts_with_images() -> None:
    encoder = Encoder(mixes=False)
    assert len(await encoder.encode("c", IMAGE)) == 2
    with pytest.raises(InvalidRequestError, match="Input 1 has a text and an image"):
        await encoder.encode("c", MixedInput(("c", IMAGE)))


async def test_rendered_chat_gets_its_images_and_their_grid() -> None:
    encoder = Encoder()
    chat = encoder.prompts.insert_images("user <image> end", [IMAGE])
    assert chat == MixedInput(("user ", IMAGE, " end"))
    with pytest.raises(InvalidRequestError, match="renders 1 placeholders <image> for 2 images"):
        encoder.prompts.insert_images("user <image> end", [IMAGE] * 2)
    text, image, two = await encoder.encode("c", IMAGE, MixedInput((IMAGE, IMAGE)))
    ids = image.token_ids.tolist()
    assert encoder.prompts.patch_grid(image, ids) == PatchGrid(1, 2, [3, 4])
    assert encoder.prompts.patch_grid(image, ids[:4]) is None
    assert encoder.prompts.patch_grid(text, text.token_ids.tolist()) is None
    assert encoder.prompts.patch_grid(two, two.token_ids.tolist()) is None
