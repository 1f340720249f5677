"""What a request says of over-long inputs counts, whatever --auto-truncate says; null and absent leave it to that."""

import httpx
import pytest

from penstock.engine.protocol.tasks import PoolingTask

from ..conftest import FakeEngine, Serving

LONG = "word " * 100
EXAMPLES = [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]
SPARSE = (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.SCORE, PoolingTask.SPARSE_EMBED)

# (path, body, the words of its dialect for: do not cut)
REFUSING = [
    ("/v1/embeddings", {"input": LONG}, {"truncation": False}),  # Voyage
    ("/v1/embeddings", {"input": LONG}, {"truncate": False}),  # Jina
    ("/v1/embeddings", {"input": LONG}, {"truncate": "NONE"}),  # NVIDIA
    ("/v1/embeddings", {"input": LONG, "late_chunking": True}, {"truncate": False}),
    ("/v1/multi-vector", {"input": LONG}, {"truncate": False}),
    ("/v1/rerank", {"query": "a", "documents": [LONG]}, {"truncation": False}),
    ("/v1/embed", {"texts": [LONG]}, {"truncate": "NONE"}),  # Cohere
    ("/v2/embed", {"texts": ["a b c"]}, {"truncate": "NONE", "max_tokens": 4}),
    ("/v1/classify", {"inputs": [LONG], "examples": EXAMPLES}, {"truncate": "NONE"}),
    ("/classify", {"input": [LONG], "labels": ["x", "y"]}, {"truncate": "NONE"}),
    ("/embed", {"inputs": LONG}, {"truncate": False}),  # TEI
    ("/embed", {"inputs": LONG}, {"parameters": {"truncate": False}}),
    ("/embed_all", {"inputs": LONG}, {"truncate": False}),
    ("/embed_sparse", {"inputs": LONG}, {"truncate": False}),
    ("/rerank", {"query": "a", "texts": [LONG]}, {"truncate": False}),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": [LONG]}}, {"truncate": False}),
]
# (path, body) that say nothing and whose dialect leaves it to the server
SILENT = [
    ("/v1/embeddings", {"input": LONG}),
    ("/v1/embeddings", {"input": LONG, "truncate": None, "truncation": None}),
    ("/v1/embeddings", {"input": LONG, "truncate_prompt_tokens": None}),
    ("/v1/encode", {"input": LONG}),
    ("/v1/multi-vector", {"input": LONG}),
    ("/pooling", {"input": LONG, "truncate_prompt_tokens": None}),
    ("/score", {"text_1": "a", "text_2": LONG}),
    ("/classify", {"input": [LONG], "labels": ["x", "y"]}),
]


@pytest.mark.parametrize("auto_truncate", [True, False])
@pytest.mark.parametrize(("path", "body", "words"), REFUSING, ids=[f"{path} {words}" for path, _, words in REFUSING])
async def test_request_that_forbids_cutting_is_refused(
    serving: Serving, make_engine: type[FakeEngine], auto_truncate: bool, path: str, body: dict, words: dict
) -> None:
    async with serving(make_engine(auto_truncate=auto_truncate, tasks=SPARSE)) as client:
        response = await client.post(path, json={**body, **words})
        assert response.status_code in (400, 413, 422)
        assert "maximum context length" in response.text
        allowed = {**body, **dict.fromkeys(words)}
        if auto_truncate:
            assert (await client.post(path, json=allowed)).status_code == 200


@pytest.mark.parametrize(("path", "body"), SILENT)
async def test_request_without_the_option_gets_the_servers_default(
    serving: Serving, make_engine: type[FakeEngine], path: str, body: dict
) -> None:
    for auto_truncate, status in ((True, 200), (False, 400)):
        async with serving(make_engine(auto_truncate=auto_truncate)) as client:
            assert (await client.post(path, json=body)).status_code == status


async def test_a_number_of_tokens_says_where_to_cut(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"input": LONG, "truncate": False, "truncate_prompt_tokens": 5}
    assert (await client.post("/v1/embeddings", json=body)).status_code == 200
    params = engine.calls[-1][1][1]
    assert (params.truncate_prompt_tokens, params.refuse_too_long) == (5, False)
