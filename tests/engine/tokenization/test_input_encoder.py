"""InputEncoder: empty inputs, data URIs and the length limit of a request."""

import json
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import pytest_asyncio

from penstock.engine.core.make_scheduler import _limit_model_len
from penstock.engine.images.preprocessor import ImagePreprocessor
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import InvalidRequestError, RequestTooLongError
from penstock.engine.protocol.images import ImageInput, MixedInput
from penstock.engine.protocol.messages import TokenizedInput
from penstock.engine.protocol.model_info import ModelInfo, PairChat, TextPadding, TokenizerSpec
from penstock.engine.protocol.params import PoolingParams, RequestOptions
from penstock.engine.protocol.tasks import PoolingTask
from penstock.engine.tokenization.input_encoder import InputEncoder, instructed_prompt, padded
from penstock.engine.tokenization.tokenizer import TokenizerPool

from ...tables import cases, table
from ..model_infos import make_info

END = 7
WORDS = json.dumps(table(__file__, "words"))
PARAMS, OPTIONS = PoolingParams(), RequestOptions()
SOURCES = {"max_model_len": "config.json: max_position_embeddings"}
INFO = make_info(vocab_size=10, max_model_len=100, sources=SOURCES)


def test_text_is_padded_on_its_side() -> None:
    tokens = TokenizedInput(np.array([1, 2], np.int32))
    for side, expected in (("left", [9, 9, 1, 2]), ("right", [1, 2, 9, 9])):
        assert padded(tokens, TextPadding(token_id=9, length=4, side=side)).token_ids.tolist() == expected
    assert padded(tokens, TextPadding(token_id=9, length=1, side="left")) is tokens


def test_instruction_of_a_chat_ends_with_punctuation() -> None:
    info = make_info(input_chat=PairChat())
    given = (" Find dams\n", "Find dams.", "Dams?", "")
    assert [instructed_prompt(info, (), text) for text in given] == ["Find dams.", "Find dams.", "Dams?", ""]


def encoder_of(pool: TokenizerPool, info: ModelInfo = INFO, **settings: object) -> InputEncoder:
    return InputEncoder(info, pool, EngineConfig(model="/tiny", **settings))


@pytest_asyncio.fixture(params=[END])
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[TokenizerPool]:
    spec = TokenizerSpec(json=WORDS, truncation_side="right", uses_token_types=False, end_id=request.param)
    pool = TokenizerPool(spec, vocab_size=10, do_lower_case=False, num_threads=1)
    yield pool
    pool.close()


async def test_empty_text_becomes_the_end_token(pool: TokenizerPool) -> None:
    encoder = encoder_of(pool)
    encoded = await encoder.encode(["a dam", "", " \n"], PARAMS, OPTIONS)
    assert [tokens.token_ids.tolist() for tokens in encoded] == [[0, 1], [END], [END]]
    encoded = await encoder.pairs([("", "")], PARAMS, OPTIONS, param=None)
    assert [tokens.token_ids.tolist() for tokens in encoded] == [[END]]


@pytest.mark.parametrize("pool", [None], indirect=True)
async def test_empty_text_without_an_end_token_is_rejected(pool: TokenizerPool) -> None:
    with pytest.raises(InvalidRequestError, match=r"^Input 1 is empty: .* no end token to use instead") as caught:
        await encoder_of(pool).encode(["a", ""], PARAMS, OPTIONS)
    assert caught.value.param == "input"


@pytest.mark.parametrize("text", ["", "\n\t "])
async def test_empty_input_error_rejects_empty_texts(pool: TokenizerPool, text: str) -> None:
    encoder = encoder_of(pool, empty_input="error")
    assert len(await encoder.encode(["a"], PARAMS, OPTIONS)) == 1
    with pytest.raises(InvalidRequestError, match=r"^Input 1 is empty\. .*--empty-input embed") as caught:
        await encoder.encode(["a", text], PARAMS, OPTIONS)
    assert caught.value.param == "input"
    with pytest.raises(InvalidRequestError, match=r"^Input 0 is empty") as caught:
        await encoder.pairs([("a", text)], PARAMS, OPTIONS, param=None)
    assert caught.value.param == "text_2"


async def test_image_for_a_model_of_texts_is_rejected(pool: TokenizerPool) -> None:
    encoder, image = encoder_of(pool), ImageInput(b"png", "input[1].image")
    message = rf"^input\[1\]\.image is an image, but {INFO.name} reads only text"
    for item in (image, MixedInput(("a", image))):
        with pytest.raises(InvalidRequestError, match=message):
            await encoder.encode(["a", item], PARAMS, OPTIONS)
    for pair in (("a", image), (image, "a")):
        with pytest.raises(InvalidRequestError, match=message):
            await encoder.pairs([("a", "dam"), pair], PARAMS, OPTIONS, param=None)


async def test_mixed_input_behind_an_image_is_named_by_its_place(pool: TokenizerPool) -> None:
    encoder, image = InputEncoder(INFO, pool, EngineConfig(model="/tiny"), Mock(ImagePreprocessor)), ImageInput(b"png")
    with pytest.raises(InvalidRequestError, match=r"^Input 2 is an image"):
        await encoder.encode([image, "a", MixedInput(("a", image))], PARAMS, OPTIONS)


@cases(__file__, "uri", "kind")
async def test_data_uri_of_an_image_is_rejected(pool: TokenizerPool, uri: str, kind: str) -> None:
    encoder = encoder_of(pool)
    with pytest.raises(InvalidRequestError, match=r"^Input 1 is a data URI of .* only reads text"):
        await encoder.encode(["a", uri], PARAMS, OPTIONS)
    with pytest.raises(InvalidRequestError) as caught:
        await encoder.pairs([(uri, "a")], PARAMS, OPTIONS, param=None)
    assert caught.value.param == "text_1"
    assert kind in caught.value.message


@pytest.mark.parametrize(
    "text", ["data: image/png;base64, starts a URI", "data:image", "data:text/plain,a", "a data:image/png,"]
)
async def test_text_about_images_is_encoded(pool: TokenizerPool, text: str) -> None:
    assert len((await encoder_of(pool).encode([text], PARAMS, OPTIONS))[0]) > 0


# The length limit ------------------------------------------------------------------------------------------------


@cases(__file__, "fields", "auto_truncate", "cut")
async def test_request_overrides_auto_truncate(
    pool: TokenizerPool, fields: dict[str, Any], auto_truncate: bool, cut: bool
) -> None:
    encoder, params = encoder_of(pool, auto_truncate=auto_truncate), PoolingParams(**fields)
    assert encoder._truncation(params, param="input").may_truncate is cut
    assert encoder.late_chunking(params.clone(task=PoolingTask.TOKEN_EMBED)).truncation.may_truncate is cut


async def test_limit_of_the_kv_cache_is_named_in_errors(pool: TokenizerPool) -> None:
    name = "the size of the server's KV cache, which --kv-cache-memory raises"
    limited = _limit_model_len(INFO, 40, 30)
    assert (INFO.limit_name, limited.limit_name) == (None, name)
    encoder = encoder_of(pool, limited)
    late = encoder.late_chunking(PoolingParams(task=PoolingTask.TOKEN_EMBED))
    with pytest.raises(RequestTooLongError) as caught:
        late.join([np.ones(50, np.int32)], [True], (), is_complete=True)
    expected = f"This model's maximum context length is 40 tokens ({name}), but the inputs have 50 tokens"
    assert caught.value.message.startswith(expected)
    assert (caught.value.num_tokens, caught.value.max_num_tokens, caught.value.param) == (50, 40, "input")
    assert encoder._truncation(PARAMS, param="input").name == name
    short = PoolingParams(truncate_prompt_tokens=7)
    assert encoder._truncation(short, param="input").name == "{truncate_prompt_tokens}"
    with pytest.raises(InvalidRequestError, match=r"greater than the size of the server's KV cache.*\(50 > 40\)"):
        PoolingParams(truncate_prompt_tokens=50).verify(PoolingTask.EMBED, limited)


async def test_passages_leave_space_for_the_prompt(pool: TokenizerPool) -> None:
    encoder, params = encoder_of(pool), PARAMS.resolved(PoolingTask.EMBED, INFO)
    for prompt, size in ((None, 99), ("dam dam dam ", 96)):
        options = RequestOptions(prompt=prompt, max_passages=10)
        passages = await encoder.passages(["b"], ["a " * 200], params, options)
        assert [len(text.split()) for text in passages.texts] == [size, size, 200 - 2 * size]
    options = RequestOptions(max_passages=100)
    passages = await encoder.passages(["b"], ["a" + " " * 550_000 + "a"], params, options)
    assert "".join(passages.texts).split() == ["a", "a"]
