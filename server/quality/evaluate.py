"""`penstock eval`: runs tasks on the models of a server, over HTTP."""

from __future__ import annotations

import base64
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray
from tqdm import tqdm

from ..settings import CommandError, EvalSettings, UsageError
from .tasks import DEPTH, InputType, RetrievalTask, SimilarityTask, Task, read_task

MAX_WAIT_S: Final = 300
"""Seconds that a request waits in total if the server is full (429) or starts (503)."""
_TIMEOUT_S: Final = 660
"""Longer than the server's default timeout of a request, whose 504 states the reason."""
_DECIMALS: Final = 5
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def evaluate(url: str, folders: Sequence[Path], settings: EvalSettings) -> Iterator[dict[str, Any]]:
    """Yields the report of each data set, as soon as it is complete.

    Args:
        url: Address of the server, with or without `/v1`.
        folders: Data sets, all read before the first request; see `read_task`.
        settings: Settings of the command.

    Raises:
        UsageError: The URL, a folder or a flag cannot be used.
        CommandError: A request failed. The message has the server's reason.
    """
    if not re.match(r"https?://[^\s/]", url):
        raise UsageError(f"URL: must begin with http:// or https:// and name a host (got {url!r})")
    tasks = [(folder, read_task(folder)) for folder in folders]
    wrong = [str(folder) for folder, task in tasks if settings.rerank and not isinstance(task, RetrievalTask)]
    if wrong:
        raise UsageError(f"--rerank: {wrong[0]} has no retrieval task; leave --rerank or the folder out")
    client = EvalClient(url, settings)
    for folder, task in tasks:
        yield {"data": folder.resolve().name, **_report(task, client, settings)}


def _report(task: Task, client: EvalClient, settings: EvalSettings) -> dict[str, Any]:
    report: dict[str, Any]
    if isinstance(task, RetrievalTask):
        rankings = task.search(client.embed, max(DEPTH, settings.rerank_top_k if settings.rerank else 0))
        report = {"task": "retrieval", "documents": len(task.corpus), "queries": len(task.queries)}
        report["scores"] = _rounded(task.scores(rankings))
        if settings.rerank:
            reranked = task.rerank(rankings, client.rerank, settings.rerank_top_k)
            report |= {"reranker": settings.rerank, "reranked_scores": _rounded(task.scores(reranked))}
    elif isinstance(task, SimilarityTask):
        report = {"task": "similarity", "pairs": len(task.pairs), "scores": _rounded(task.scores(client.embed))}
    else:
        report = {"task": "classification", "texts": len(task.tests), "scores": _rounded(task.scores(client.embed))}
    return {"model": client.model, "dimensions": client.dimensions, **report}


def _rounded(scores: dict[str, float]) -> dict[str, float | None]:
    """Returns scores for JSON. A score that is not defined is None."""
    return {name: None if np.isnan(score) else round(score, _DECIMALS) for name, score in scores.items()}


class EvalClient:
    """Embeds and reranks over HTTP, with several requests in flight and a progress bar on a terminal.

    Args:
        url: Address of the server.
        settings: Settings of the command.

    Attributes:
        model: Name of the model in the last response; empty before.
        dimensions: Number of dimensions of its vectors; 0 before.
    """

    def __init__(self, url: str, settings: EvalSettings) -> None:
        self._url, self._settings = url.rstrip("/").removesuffix("/v1"), settings
        self.model, self.dimensions = "", 0

    def embed(self, texts: Sequence[str], input_type: InputType) -> NDArray[np.float32]:
        """Returns [N, D] float32. The server puts the model's prompt for `input_type` before each text."""
        fields: dict[str, Any] = {"input_type": input_type, "encoding_format": "base64", "truncate_prompt_tokens": -1}
        if self._settings.model is not None:
            fields["model"] = self._settings.model
        if self._settings.dimensions is not None:
            fields["dimensions"] = self._settings.dimensions

        def send(part: Sequence[str]) -> NDArray[np.float32]:
            response = self._post("/v1/embeddings", {**fields, "input": part})
            self.model = response["model"]
            rows = [np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in response["data"]]
            return np.stack(rows)

        parts = _parts(texts, self._settings.texts_per_request)
        vectors = np.concatenate(list(self._in_parallel(send, parts, len(texts), f"{input_type} texts")))
        self.dimensions = vectors.shape[1]
        return vectors

    def rerank(self, requests: Sequence[tuple[str, Sequence[str]]]) -> list[NDArray[np.float64]]:
        """Returns the relevance of each document, [N] float64 for each query."""

        def send(request: tuple[str, Sequence[str]]) -> NDArray[np.float64]:
            query, documents = request
            relevance = list[float]()
            for part in _parts(documents, self._settings.texts_per_request):
                body = {"model": self._settings.rerank, "query": query, "documents": part, "return_documents": False}
                results = sorted(self._post("/v1/rerank", body)["results"], key=lambda result: int(result["index"]))
                relevance += [result["relevance_score"] for result in results]
            return np.array(relevance, np.float64)

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

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._settings.api_key:
            headers["Authorization"] = f"Bearer {self._settings.api_key[0]}"
        request = urllib.request.Request(self._url + path, orjson.dumps(body), headers)  # noqa: S310 - checked above
        waited_s = 0.0
        while True:
            try:
                with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310
                    answer: dict[str, Any] = orjson.loads(response.read())
                    return answer
            except urllib.error.HTTPError as error:
                wait_s = float(error.headers.get("retry-after") or 1)
                if error.code not in (429, 503) or waited_s + wait_s > MAX_WAIT_S:
                    raise CommandError(f"{request.full_url}: {error.code}: {_reason(error.read())}") from error
                time.sleep(wait_s)
                waited_s += wait_s
            except OSError as error:  # URLError and timeouts, too
                raise CommandError(f"{request.full_url}: {error}; is the server running?") from error
            except ValueError as error:
                raise CommandError(f"{request.full_url}: the response is no JSON; check the address") from error


def _parts(texts: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (texts[start : start + size] for start in range(0, len(texts), size))


def _reason(body: bytes) -> str:
    """Returns the message of an error body, or the start of another body."""
    try:
        return str(orjson.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
