"""A valid body for each route that runs the model, the bodies of clients, and ASGI scopes."""

from typing import Any

from ..tables import table

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
    "/v1/multimodalembeddings": {"inputs": [{"content": [{"type": "text", "text": "a b"}]}]},
    "/api/embeddings": {"prompt": "a b"},
}


def client_bodies(name: str) -> dict[str, list[Any]]:
    """Returns bodies that clients sent as arguments of `pytest.mark.parametrize`. The ids are the clients."""
    rows = table(__file__, f"client_bodies_{name}")
    return {"argvalues": [row[1:] for row in rows], "ids": [row[0] for row in rows]}


def http_scope(path: str, headers: dict[str, str], **fields: Any) -> dict[str, Any]:
    """Returns the scope of a POST request."""
    return {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "scheme": "http",
        "state": {},
        **fields,
    }
