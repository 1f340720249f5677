"""Whoever sends a text that is too long learns what it is that limits."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from penstock.engine.core.make_scheduler import _limited
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import InvalidRequestError, RequestTooLongError
from penstock.engine.protocol.model_info import ModelInfo, ModelKind
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.tasks import PoolingTask, PoolingType
from penstock.engine.tokenization.input_encoder import InputEncoder
from penstock.engine.tokenization.late_chunking import LateChunking
from penstock.engine.tokenization.model_tokenizer import SpecialTokens
from penstock.engine.tokenization.tokenizer import TokenizerPool

NAME = "the size of the server's KV cache, which --kv-cache-memory raises"
INFO = ModelInfo(
    name="tiny",
    path="/tiny",
    architecture="LlamaModel",
    model_type="llama",
    packed=True,
    kind=ModelKind.EMBEDDING,
    tasks=(PoolingTask.EMBED,),
    hidden_size=8,
    vocab_size=10,
    max_model_len=100,
    embedding_size=8,
    sequence_pooling=(PoolingType.MEAN,),
    sources={"max_model_len": "config.json: max_position_embeddings"},
)


class Tokenizer:
    """Stands in for TokenizerPool."""

    special_tokens = SpecialTokens(np.zeros(0, np.int32), np.zeros(0, np.int32))

    def cuts_left(self, _: object) -> bool:
        return False


def test_the_kv_cache_is_named_where_it_limits() -> None:
    limited = _limited(INFO, 40, 30)
    assert (INFO.limit_name, limited.limit_name) == (None, NAME)
    error = RequestTooLongError.over_limit("it has 50", "Cut it.", num_tokens=50, max_num_tokens=40, limit_name=NAME)
    assert error.message == f"This model's maximum context length is 40 tokens ({NAME}), but it has 50. Cut it."
    assert (error.num_tokens, error.max_num_tokens, error.param) == (50, 40, "input")
    error = RequestTooLongError.over_limit("it has 500", "Cut it.", num_tokens=500, max_num_tokens=100, param=None)
    assert error.message == "This model's maximum context length is 100 tokens, but it has 500. Cut it."
    assert error.param is None


NO, YES, SILENT = PoolingParams(refuse_too_long=True), PoolingParams(truncate_prompt_tokens=-1), PoolingParams()


@pytest.mark.parametrize(
    ("params", "auto_truncate", "cut"),
    [
        (NO, True, False),
        (NO, False, False),
        (YES, True, True),
        (YES, False, True),
        (SILENT, True, True),
        (SILENT, False, False),
        (PoolingParams(truncate_prompt_tokens=7, refuse_too_long=True), True, False),
    ],
)
def test_the_request_decides_before_the_server(params: PoolingParams, auto_truncate: bool, cut: bool) -> None:
    config = EngineConfig(model="/tiny", auto_truncate=auto_truncate)
    encoder = InputEncoder(INFO, cast("TokenizerPool", Tokenizer()), config)
    assert encoder._truncation(params, param="input").cut is cut
    assert encoder.late_chunking(params.clone(task=PoolingTask.TOKEN_EMBED)).truncation.cut is cut


def test_every_refusal_names_it() -> None:
    limited = _limited(INFO, 40, 30)
    encoder = InputEncoder(limited, cast("TokenizerPool", Tokenizer()), EngineConfig(model="/tiny"))
    late: LateChunking = encoder.late_chunking(PoolingParams(task=PoolingTask.TOKEN_EMBED))
    with pytest.raises(RequestTooLongError) as caught:
        late.join([np.ones(50, np.int32)], [True], (), is_whole=True)
    assert caught.value.message.startswith(
        f"This model's maximum context length is 40 tokens ({NAME}), but the inputs have 50 tokens"
    )
    assert encoder._truncation(PoolingParams(), param="input").name == NAME
    assert (
        encoder._truncation(PoolingParams(truncate_prompt_tokens=7), param="input").name == "{truncate_prompt_tokens}"
    )
    with pytest.raises(InvalidRequestError, match=r"greater than the size of the server's KV cache.*\(50 > 40\)"):
        PoolingParams(truncate_prompt_tokens=50).verify(PoolingTask.EMBED, limited)
    with pytest.raises(InvalidRequestError, match=r"greater than max_model_len\. .*\(101 > 100\)"):
        PoolingParams(truncate_prompt_tokens=101).verify(PoolingTask.EMBED, INFO)
