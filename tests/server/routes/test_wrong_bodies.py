"""Wrong bodies get a 400 that names the field and the value. test_tei.py has the errors of TEI's routes."""

from typing import Any

import httpx
import pytest

LONG = "word " * 100  # the engine takes 64 tokens
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello world"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
EXAMPLES = [{"text": "where is it", "label": "shipping"}, {"text": "money back", "label": "refund"}]
RANK = {"query": "a", "documents": ["b"]}
EMPTY = "empty list"
BOTH_ENDS = {"add_generation_prompt": True, "continue_final_message": True}
TWO_TYPES = {"embedding_type": ["float", "int8"], "encoding_format": "bytes"}
WIDTHS = [(-1, "must be at least 1, not -1."), (0, "must be at least 1, not 0."), (2**53 - 1, f"is {2**53 - 1}; ")]

# For each path a valid body, and wrong values of its fields: (field, value, part of the message).
WRONG_FIELDS: list[tuple[str, dict[str, Any], list[tuple[str, Any, str]]]] = [
    (
        "/v1/embeddings",
        {"input": "a"},
        [
            ("input", None, "null"),
            ("input", [], EMPTY),
            ("input", 5, "5"),
            ("input", ["a", 5], "entry 1 is 5"),
            ("input", [[1], []], "entry 1 is an empty list"),
            ("input", [True, False], "entry 0 is true"),
            ("input", [[1, "a"]], "'a'"),
            ("input", [5000], "out of vocabulary"),
            ("input", [-1], "-1, which is out of vocabulary"),
            ("input", [1.0, "a"], "entry 0 is 1"),
            ("input", [{"image": "http://x/a.png"}], "entry 0 is an object"),
            ("input", ["a", {"text": 5}], "entry 1 is an object"),
            ("input", [{"text": "a"}, 5], "entry 1 is 5"),
            ("input", [[1.0], None], "entry 1 is null"),
            ("encoding_format", "hex", "'bytes_only'"),
            ("dimensions", "8", "'8'"),
            ("dimensions", True, "not true"),
            ("dimensions", 9, "9"),
            ("dimensions", 4, "Matryoshka"),
            ("model", 3, "3"),
            ("truncate_prompt_tokens", 65, "65"),
            ("late_chunking", "often", "'often'"),
            ("truncation_side", "up", "'up'"),
            ("truncate", "MIDDLE", "'MIDDLE'"),
            ("input_type", "poetry", "clustering"),
            ("task", "poetry", "'poetry'"),
            ("instruction", "Find", "accepts no instruction"),
            *(("normalize", value, "valid boolean") for value in (0, 1, "true", "no", "on")),
            ("embed_dtype", "float64", "'float64'"),
            ("endianness", "middle", "'middle'"),
            ("embedding_type", "int4", "'int4'"),
            ("embedding_type", ["float", "int4"], "'int4'"),
            ("output_dtype", "base64", "'base64'"),
            ("padding", "longest", "'longest'"),
            ("request_id", "two\r\nlines", "request_id"),
            *(("dimensions", *case) for case in WIDTHS),
            *(("output_dimension", *case) for case in WIDTHS),
        ],
    ),
    (
        "/v1/embeddings",
        {"messages": CHAT},
        [
            ("messages", "hello", "list of messages"),
            ("messages", [{"content": "a"}], "without a role; message 0 must be"),
            ("messages", [CHAT, []], "entry 1 is []"),
            ("messages", [{"role": "user", "content": 5}], "message 0 does not"),
            ("messages", [{"role": "user", "content": [IMAGE]}], "'image_url'"),
            ("messages", [{"role": "user", "content": [{"text": 5}]}], "another"),
            ("messages", [{"role": "user", "content": "a " * 99}], "maximum"),
            ("chat_template", "{{ 1 }}", "not taken"),
            ("chat_template_kwargs", {"tokenize": 1}, "'tokenize'"),
            ("late_chunking", True, "one text"),
        ],
    ),
    *(
        (
            path,
            {"texts": ["a"]},
            [
                ("texts", None, "neither"),
                ("texts", [], EMPTY),
                ("texts", ["a", 7], "entry 1 is 7"),
                ("images", ["data:image/png;base64,AA=="], "text only"),
                ("embedding_types", ["int4"], "'int4'"),
                ("truncate", "MIDDLE", "'MIDDLE'"),
                ("input_type", "poem", "'poem'"),
                ("max_tokens", -1, "-1"),
                ("output_dimension", 4, "output_dimension is 4"),
                *(("output_dimension", *case) for case in WIDTHS),
            ],
        )
        for path in ("/v1/embed", "/v2/embed")
    ),
    ("/v2/embed", {}, [("inputs", ["a"], "entry 0"), ("inputs", [{"content": [{"type": "image_url"}]}], "image")]),
    (
        "/rerank",
        RANK,
        [
            ("documents", [], EMPTY),
            ("documents", "b", "'b'"),
            ("documents", ["b", 7], "entry 1 is 7"),
            ("documents", [{}], "it has nothing"),
            ("documents", ["b", {"title": "a", "body": "b"}], "title, body. Send the text as text, or name the fields"),
            ("documents", ["b", {"text": 7}], "entry 1"),
            ("documents", ["b", {"content": [IMAGE]}], "entry 1 holds an image"),
            ("documents", [{"content": []}], "has no content"),
            ("documents", [{"content": [{"type": "video"}]}], "no {"),
            ("query", ["a"], "['a']"),
            ("top_n", -1, "-1"),
            *(("top_k", value, shown) for value, shown in ((-1, "-1"), ("2", "'2'"), (1.5, "1.5"), (True, "true"))),
            ("return_documents", "perhaps", "'perhaps'"),
            ("instruction", 3, "3"),
            ("max_chunks_per_doc", "many", "'many'"),
        ],
    ),
    (
        "/rerank",
        {"query": "a", "rank_fields": ["author", "name"]},
        [
            ("documents", [{"title": "a"}], "without any of the rank_fields author, name; it has title"),
            ("documents", [{"author": None}], "without any of the rank_fields"),
        ],
    ),
    (
        "/score",
        {"text_1": "a"},
        [("text_2", [], EMPTY), ("text_2", [1], "entry 0 is 1"), ("text_2", [{"content": [IMAGE]}], "image")],
    ),
    (
        "/score",
        {"text_1": ["a", "b"]},
        [("text_2", ["a", "b", "c"], "2 texts"), ("text_2", ["a"], "2 texts")],
    ),
    ("/score", {"queries": ["a", "b"]}, [("documents", ["a"], "2 texts")]),
    (
        "/classify",
        {"input": "a"},
        [
            ("examples", [{"text": "b"}], "examples[0].label"),
            ("labels", "b", "'b'"),
            ("labels", None, "embedding model without classes"),
        ],
    ),
    ("/classify", {"inputs": ["a"]}, [("labels", None, "embedding model without classes")]),
    ("/classify", {"input": "a", "examples": EXAMPLES}, [("labels", ["b", "c"], "examples (few-shot), not both")]),
    (
        "/classify",
        {"input": ["a"] * 1001},
        [
            ("labels", [f"l{i}" for i in range(1000)], "1001 inputs with 1000 classes in labels give 1001000 scores"),
        ],
    ),
    (
        "/pooling",
        {"input": "a"},
        [
            ("input", None, "input is null"),
            ("task", "classify", "does not support"),
            *(("dimensions", *case) for case in WIDTHS),
        ],
    ),
    ("/pooling", {"input": "a", "task": "token_embed"}, [("step_tag_id", 3, "does not take")]),
    (
        "/pooling",
        {},
        [("messages", [], EMPTY), ("messages", ["hi"], "holds 'hi', but message 0 must be an")],
    ),
    (
        "/v1/encode",
        {"input": ["a"]},
        [
            ("input", None, "null"),
            ("outputs", ["dense", "colour"], "colour"),
            ("outputs", [], "at least 1"),
            ("outputs", ["sparse"], "holds 'sparse', but fake-model gives dense, multi_vector"),
            ("encoding_format", "bytes", "holds only one output"),
            ("return_token_ids", True, "which is not in outputs"),
            *(("dimensions", *case) for case in WIDTHS),
        ],
    ),
    ("/tokenize", {}, [("prompt", None, "neither"), ("prompt", 5, "5"), ("messages", [CHAT, CHAT], "several chats")]),
    ("/detokenize", {}, [("tokens", None, "null"), ("tokens", [-1], "-1"), ("tokens", "a", "'a'")]),
    ("/v1/tokenize", {}, [("text", None, "null"), ("text", ["a"], "['a']")]),
    ("/v1/detokenize", {}, [("tokens", [], "[]"), ("tokens", ["a"], "'a'"), ("tokens", [-1], "-1")]),
]

# (path, body, field, part of the message)
WRONG_BODIES: list[tuple[str, Any, str | None, str]] = [
    ("/v1/embeddings", {"model": "alias"}, "input", "missing"),
    ("/pooling", {}, "input", "input is missing"),
    ("/v1/embeddings", {"input": LONG, "truncation": False}, "input", "maximum context length"),
    ("/v1/embeddings", {"input": "a", "normalized": True, "use_activation": False}, "normalized", "two names"),
    ("/v1/embeddings", {"input": "a", "return_multivector": True, "late_chunking": True}, "return_multivector", "one"),
    ("/v1/embeddings", {"messages": CHAT, **BOTH_ENDS}, "continue_final_message", "Cannot set both"),
    ("/v1/embeddings", {"input": "a", **TWO_TYPES}, "embedding_type", "one type"),
    ("/v1/embeddings", {"input": "a", "output_dtype": "int8", "embed_dtype": "float16"}, "embed_dtype", "'int8'"),
    (
        "/v1/embeddings",
        {"input": "a", "encoding_format": "binary", "embed_dtype": "float16"},
        "embed_dtype",
        "'binary'",
    ),
    ("/v2/embed", {"texts": ["a"], "inputs": [{"content": "a"}]}, "texts", "both"),
    ("/v2/embed", {}, "texts", "neither"),
    ("/v2/embed", {"texts": [LONG], "truncate": "NONE"}, "texts", "maximum context length is 64"),
    (
        "/v2/embed",
        {"texts": ["a", "a b"], "truncate": "NONE", "max_tokens": 3},
        "texts",
        "length is 3 tokens (max_tokens), but input 1 has 4",
    ),
    ("/rerank", {"query": "a"}, "documents", "missing"),
    ("/rerank", {"documents": ["a"]}, "query", "missing"),
    ("/score", {}, "text_1", "exactly one"),
    ("/score", {"text_1": "a", "text_2": "a", "queries": "a", "documents": "a"}, "text_1", "exactly one"),
    ("/classify", {"inputs": []}, "inputs", EMPTY),
    ("/classify", {"labels": ["a", "b"]}, "input", "neither"),
    ("/classify", {"input": "a", "inputs": ["b"]}, "input", "both input and inputs"),
    ("/classify", {"messages": CHAT, "labels": ["a", "b"]}, "messages", "labels or examples"),
    ("/pooling", {"input": "a", "messages": CHAT}, "input", "both"),
    ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt", "both"),
    ("/invocations", {"question": "a"}, "input", "question"),
    ("/invocations", {"query": "a"}, "documents", "documents is missing"),
    ("/invocations", [1], None, "JSON object"),
]


async def check(client: httpx.AsyncClient, path: str, body: Any, param: str | None, part: str) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == 400, (body, response.text)
    error = response.json()["error"]
    assert error["param"] == param, (body, error)
    assert part in error["message"], (body, error)
    assert response.json()["message"] == error["message"]
    if path.endswith("/embed"):  # the message has Cohere's names of fields
        assert " dimensions is" not in error["message"]
        assert "truncate_prompt_tokens" not in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "wrong"), WRONG_FIELDS, ids=[f"{path} {' '.join(body)}" for path, body, _ in WRONG_FIELDS]
)
async def test_wrong_value_is_400_with_field_and_value(client, path: str, body: dict, wrong: list) -> None:
    for field, value, part in wrong:
        await check(client, path, {**body, field: value}, field, part)


async def test_wrong_body_is_400_with_field(client: httpx.AsyncClient) -> None:
    for case in WRONG_BODIES:
        await check(client, *case)


@pytest.mark.parametrize("path", ["/embed", "/api/embed"])
async def test_wrong_width_is_rejected_by_other_dialects(client: httpx.AsyncClient, path: str) -> None:
    for value, part in WIDTHS:
        body = {"inputs" if path == "/embed" else "input": "a", "dimensions": value}
        response = await client.post(path, json=body)
        assert response.status_code in (400, 422)
        assert f"dimensions {part}" in response.text
