"""A valid body for each route that runs the model."""

from typing import Any

TEXTS: dict[str, Any] = {"texts": ["a"], "input_type": "search_query"}
RANKED: dict[str, Any] = {"query": "a", "documents": ["b"]}
FORWARDS: dict[str, dict[str, Any]] = {
    **{path: {"input": "a b"} for path in ("/v1/embeddings", "/embeddings", "/v1/multi-vector", "/v1/encode")},
    **{path: {"input": "a b"} for path in ("/pooling", "/v1/pooling", "/api/embed")},
    **dict.fromkeys(("/v1/embed", "/v2/embed"), TEXTS),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), RANKED),
    **{path: {"text_1": "a", "text_2": "b"} for path in ("/v1/score", "/score")},
    **{path: {"input": ["a"], "labels": ["b", "c"]} for path in ("/v1/classify", "/classify")},
    **{path: {"inputs": "a b"} for path in ("/", "/embed", "/embed_all", "/embed_sparse", "/predict")},
    "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
    "/api/embeddings": {"prompt": "a b"},
}
