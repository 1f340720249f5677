"""The client of `penstock eval`, against small fake servers."""

import base64

import numpy as np
import pytest

from penstock.server.quality.evaluate import EvalClient
from penstock.server.settings import CommandError, EvalSettings
from penstock.server.target_server import TargetServer

from ..fake_server import Answered, Received, Serve, openai_server


def client_of(url: str, **settings: object) -> EvalClient:
    values = EvalSettings(texts_per_request=2, api_key=("k",), **settings)  # type: ignore[arg-type]
    return EvalClient(TargetServer(url, values), values)


@pytest.mark.parametrize("is_base64", [True, False])
def test_vectors_are_base64_or_numbers(serve: Serve, is_base64: bool) -> None:
    def answer(received: Received) -> Answered:
        if received.body is None:
            return openai_server(received)
        rows = [np.array([len(text), 1], np.float32) for text in received.body["input"]]
        shown = [base64.b64encode(row.tobytes()).decode() if is_base64 else row.tolist() for row in rows]
        return Answered({"model": "served", "data": [{"embedding": each} for each in shown]})

    client = client_of(serve(answer))
    assert client.model == "m"
    assert client.embed(["a", "bb", "ccc"], "query").tolist() == [[1, 1], [2, 1], [3, 1]]
    assert (client.model, client.dimensions) == ("served", 2)


def test_unexpected_response_is_an_error_with_the_path(serve: Serve) -> None:
    url = serve(lambda received: openai_server(received) if received.body is None else Answered({"data": [{}]}))
    with pytest.raises(CommandError, match="POST /v1/embeddings returned an unexpected response"):
        client_of(url).embed(["a"], "query")
    with pytest.raises(CommandError, match="POST /v1/rerank returned an unexpected response"):
        client_of(url, rerank="r").rerank([("q", ["a"])])
