"""POST /score in vLLM's dialect: names of the two sides, 1:1, 1:N, N:N."""

import httpx
import pytest

# What it is, the body, its scores.
PAIRS = [
    ("1:1", {"text_1": "a b", "text_2": "a b c"}, [0.2]),
    ("1:1 in lists", {"text_1": ["a b"], "text_2": ["a b c"]}, [0.2]),
    ("1:N", {"text_1": "a b", "text_2": ["a", "c", "a b"]}, [0.1, 0.0, 0.2]),
    ("N:N", {"text_1": ["a", "b"], "text_2": ["a", "c"]}, [0.1, 0.0]),
    ("queries and documents", {"queries": "a", "documents": ["a", "b"]}, [0.1, 0.0]),
    ("queries and items", {"queries": ["a"], "items": ["a", "b"]}, [0.1, 0.0]),
    ("data_1 and data_2", {"data_1": "a", "data_2": "a"}, [0.1]),
    ("objects", {"text_1": {"text": "a"}, "text_2": [{"text": "a"}, "b"]}, [0.1, 0.0]),
    ("nulls", {"text_1": "a", "text_2": "a", "queries": None, "truncate_prompt_tokens": None}, [0.1]),
]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(("body", "scores"), [case[1:] for case in PAIRS], ids=[case[0] for case in PAIRS])
async def test_pairs(client: httpx.AsyncClient, path: str, body: dict, scores: list[float]) -> None:
    response = await client.post(path, json={"model": "alias", **body})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert (answer["object"], answer["model"]) == ("list", "alias")
    assert answer["data"] == [{"index": i, "object": "score", "score": pytest.approx(s)} for i, s in enumerate(scores)]
    assert answer["usage"]["total_tokens"] > 0


WRONG_BODIES = [
    ("nothing", {}, "text_1", "exactly one"),
    ("one side", {"text_1": "a"}, "text_1", "exactly one"),
    ("two pairs", {"text_1": "a", "text_2": "a", "queries": "a", "documents": "a"}, "text_1", "exactly one"),
    ("empty side", {"text_1": "a", "text_2": []}, "text_2", "empty list"),
    ("numbers", {"text_1": "a", "text_2": [1]}, "text_2", "entry 0 is 1"),
    ("N:M", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2", "2 texts"),
    ("N:1", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_2", "2 texts"),
    ("N:1 in other names", {"queries": ["a", "b"], "documents": ["a"]}, "documents", "2 texts"),
]


@pytest.mark.parametrize(
    ("body", "param", "part"), [case[1:] for case in WRONG_BODIES], ids=[case[0] for case in WRONG_BODIES]
)
async def test_wrong_bodies(client: httpx.AsyncClient, body: dict, param: str, part: str) -> None:
    response = await client.post("/score", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert part in response.json()["message"]


async def test_long_pairs_are_refused_unless_they_may_be_cut(client: httpx.AsyncClient) -> None:
    body = {"text_1": "a", "text_2": "word " * 100}
    assert (await client.post("/score", json=body)).json()["error"]["code"] == "context_length_exceeded"
    assert (await client.post("/score", json={**body, "truncate_prompt_tokens": -1})).status_code == 200


async def test_the_instruction_reaches_the_engine(client: httpx.AsyncClient, engine) -> None:
    for path in ("/score", "/v1/score"):
        body = {"text_1": "a", "text_2": "b", "instruction": "Find the red one."}
        assert (await client.post(path, json=body)).status_code == 200
        assert engine.calls[-1][1][3].instruction == "Find the red one."
        body["chat_template_kwargs"] = {"instruction": "Find the blue one."}
        assert (await client.post(path, json=body)).status_code == 200
        assert engine.calls[-1][1][3].instruction == "Find the blue one."
