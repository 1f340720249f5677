"""Inputs that are not what they should be: empty texts, and images that would be read letter by letter."""

from __future__ import annotations

import json

import pytest
import pytest_asyncio

from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import InvalidRequestError
from penstock.engine.protocol.model_info import TokenizerSpec
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.request import RequestOptions
from penstock.engine.tokenization.input_encoder import InputEncoder
from penstock.engine.tokenization.tokenizer import TokenizerPool

from ..protocol.test_length_limit import INFO

END = 7
WORDS = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"a": 0, "dam": 1, "?": 2}, "unk_token": "?"},
    }
)
PARAMS, OPTIONS = PoolingParams(), RequestOptions()


def encoder_of(pool: TokenizerPool, empty_input: str = "embed") -> InputEncoder:
    return InputEncoder(INFO, pool, EngineConfig(model="/tiny", empty_input=empty_input))


@pytest_asyncio.fixture(params=[END, None])
async def pool(request: pytest.FixtureRequest):
    spec = TokenizerSpec(json=WORDS, truncation_side="right", uses_token_types=False, end_id=request.param)
    tokenizer = TokenizerPool(spec, vocab_size=10, do_lower_case=False, num_workers=1)
    yield tokenizer
    tokenizer.close()


async def test_what_has_no_tokens_is_read_as_the_token_that_ends_a_text(pool: TokenizerPool) -> None:
    encoder = encoder_of(pool)
    if pool.end_id is None:
        with pytest.raises(InvalidRequestError, match=r"^Input 1 is empty: .* could stand for it") as caught:
            await encoder.encode(["a", ""], PARAMS, OPTIONS)
        assert caught.value.param == "input"
        return
    encoded = await encoder.encode(["a dam", "", " \n"], PARAMS, OPTIONS)
    assert [tokens.token_ids.tolist() for tokens in encoded] == [[0, 1], [END], [END]]
    encoded = await encoder.pairs([("", "")], PARAMS, OPTIONS, param=None)
    assert [tokens.token_ids.tolist() for tokens in encoded] == [[END]]


@pytest.mark.parametrize("text", ["", " ", "\n\t "])
async def test_the_operator_may_have_empty_texts_refused(pool: TokenizerPool, text: str) -> None:
    encoder = encoder_of(pool, "error")
    assert len(await encoder.encode(["a"], PARAMS, OPTIONS)) == 1
    with pytest.raises(InvalidRequestError, match=r"^Input 1 is empty\. .*--empty-input embed") as caught:
        await encoder.encode(["a", text], PARAMS, OPTIONS)
    assert caught.value.param == "input"
    with pytest.raises(InvalidRequestError, match=r"^Input 0 is empty") as caught:
        await encoder.pairs([("a", text)], PARAMS, OPTIONS, param=None)
    assert caught.value.param == "text_2"


IMAGES = ["data:image/png;base64,iVBORw0KGgo=", "data:IMAGE/svg+xml,%3Csvg%3E", "data:audio/wav;base64,UklGRg=="]
TEXTS = [
    "data: image/png;base64, is how a URI of an image begins",
    "data:image",
    "data:text/plain,a",
    "a data:image/png,",
]


@pytest.mark.parametrize("uri", IMAGES)
async def test_an_image_is_not_read_letter_by_letter(pool: TokenizerPool, uri: str) -> None:
    encoder = encoder_of(pool)
    with pytest.raises(InvalidRequestError, match=r"^Input 1 is the data URI of .* reads text only"):
        await encoder.encode(["a", uri], PARAMS, OPTIONS)
    with pytest.raises(InvalidRequestError) as caught:
        await encoder.pairs([(uri, "a")], PARAMS, OPTIONS, param=None)
    assert caught.value.param == "text_1"
    assert uri.split(";")[0].split(",")[0].removeprefix("data:") in caught.value.message


@pytest.mark.parametrize("text", TEXTS)
async def test_a_text_about_images_is_a_text(pool: TokenizerPool, text: str) -> None:
    assert len((await encoder_of(pool).encode([text], PARAMS, OPTIONS))[0]) > 0
