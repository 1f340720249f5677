"""Embeds and reranks over HTTP for `penstock eval`."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray
from tqdm import tqdm

from ..settings import CommandError, EvalSettings
from ..target_server import TargetModel, TargetServer
from .tasks import InputType

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class EvalClient:
    """Embeds and reranks over HTTP, with several requests in flight and a progress bar on a terminal.

    Attributes:
        model: Name of the model in the last response; before it, the name in requests.
        dimensions: Number of dimensions of its vectors; 0 before the first response.

    Raises:
        CommandError: The server cannot be reached, needs a key, or lists no model.
    """

    def __init__(self, server: TargetServer, settings: EvalSettings) -> None:
        self._server, self._settings = server, settings
        self._target: TargetModel = server.find_model("embed", ("openai",))
        self.model, self.dimensions = self._target.name, 0
        self.texts_per_request = settings.texts_per_request

    def embed(self, texts: Sequence[str], input_type: InputType) -> NDArray[np.float32]:
        """Returns [N, D] float32. The server puts the model's prompt for `input_type` before each text."""
        fields: dict[str, Any] = {
            "model": self._target.name,
            "input_type": input_type,
            "encoding_format": "base64",
            "truncate_prompt_tokens": -1,
        }
        if self._settings.dimensions is not None:
            fields["dimensions"] = self._settings.dimensions

        def send(part: Sequence[str]) -> NDArray[np.float32]:
            return self._post("/v1/embeddings", {**fields, "input": part}, parse)

        def parse(answer: dict[str, Any]) -> NDArray[np.float32]:
            self.model = answer["model"]
            return np.stack([_vector(row["embedding"]) for row in answer["data"]])

        parts = _parts(texts, self.texts_per_request)
        vectors = np.concatenate(list(self._in_parallel(send, parts, len(texts), f"{input_type} texts")))
        self.dimensions = vectors.shape[1]
        return vectors

    def rerank(self, requests: Sequence[tuple[str, Sequence[str]]]) -> list[NDArray[np.float64]]:
        """Returns the relevance of each document, [N] float64 for each query."""

        def send(request: tuple[str, Sequence[str]]) -> NDArray[np.float64]:
            query, documents = request
            relevance = list[float]()
            for part in _parts(documents, self.texts_per_request):
                body = {"model": self._settings.rerank, "query": query, "documents": part, "return_documents": False}
                relevance += self._post("/v1/rerank", body, parse)
            return np.array(relevance, np.float64)

        def parse(answer: dict[str, Any]) -> list[float]:
            results = sorted(answer["results"], key=lambda result: int(result["index"]))
            return [float(result["relevance_score"]) for result in results]

        return list(self._in_parallel(send, requests, sum(len(documents) for _, documents in requests), "reranked"))

    def _in_parallel(
        self, send: Callable[[ItemT], ResultT], items: Iterable[ItemT], total: int, description: str
    ) -> Iterator[ResultT]:
        """Yields the result of each item in order. An error cancels the items that have not started."""
        with (
            ThreadPoolExecutor(self._settings.concurrency) as pool,
            tqdm(total=total, desc=description, disable=None, dynamic_ncols=True) as bar,
        ):
            for result in pool.map(send, items):
                bar.update(len(result))  # type: ignore[arg-type]  # an array
                yield result

    def _post(self, route: str, body: dict[str, Any], parse: Callable[[dict[str, Any]], ResultT]) -> ResultT:
        """Sends a request and returns its parsed response. Raises CommandError, also if `parse` fails."""
        path = self._server.path(route, self._target)
        answer = self._server.post(path, orjson.dumps(body))
        try:
            return parse(answer)
        except (KeyError, TypeError, ValueError) as error:
            raise CommandError(
                f"{self._server.url}: POST {path} returned an unexpected response ({error!r}); check the URL"
            ) from error


def _vector(encoded: str | list[float]) -> NDArray[np.float32]:
    """Decodes a vector: base64 of float32, or numbers of a server that ignores `encoding_format`."""
    if isinstance(encoded, str):
        return np.frombuffer(base64.b64decode(encoded), "<f4")
    return np.array(encoded, np.float32)


def _parts(texts: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (texts[start : start + size] for start in range(0, len(texts), size))
