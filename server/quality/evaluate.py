"""`penstock eval`: runs data sets and tasks of MTEB on the models of a server, over HTTP.

MTEB (extra `mteb`) loads its data from the hub or its local cache.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray
from tqdm import tqdm

from ..settings import CommandError, EvalSettings, UsageError
from ..target_server import TargetModel, TargetServer
from .tasks import DEPTH, InputType, RetrievalTask, SimilarityTask, Task, read_task, rounded

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
_INPUT_TYPES: Final[dict[str, InputType]] = {
    "Classification": "classification",
    "MultilabelClassification": "classification",
    "Clustering": "clustering",
}
"""Purpose of the texts by type of task. Retrieval and reranking name query or document; others compare texts."""


class EvalClient:
    """Embeds and reranks over HTTP, with several requests in flight and a progress bar on a terminal.

    Attributes:
        model: Name of the model in the last response; before it, the name in requests.
        dimensions: Number of dimensions of its vectors; 0 before the first response.

    Raises:
        CommandError: The server cannot be reached, needs a key, or lists no model.
    """

    def __init__(self, server: TargetServer, settings: EvalSettings) -> None:
        self._server = server
        self._settings = settings
        self._target: TargetModel = server.find_model("embed", ("openai",))
        self.model = self._target.name
        self.dimensions = 0
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


def evaluate(url: str, folders: Sequence[Path], settings: EvalSettings) -> Iterator[dict[str, Any]]:
    """Yields the report of each data set and task of MTEB, as soon as it is complete.

    Args:
        url: Address of the server, with or without `/v1`.
        folders: Data sets, all read before the first request; see `read_task`.
        settings: Settings of the command.

    Raises:
        UsageError: The URL, a folder or a flag cannot be used.
        CommandError: A request failed. The message has the server's reason.
    """
    server = TargetServer(url, settings)
    if not folders and not settings.mteb:
        raise UsageError("DATA: name a folder with a data set, or a task of MTEB with --mteb")
    tasks = [(folder, read_task(folder)) for folder in folders]
    wrong = [str(folder) for folder, task in tasks if settings.rerank and not isinstance(task, RetrievalTask)]
    if wrong:
        raise UsageError(f"--rerank: {wrong[0]} has no retrieval task; leave --rerank or the folder out")
    mteb_tasks = find_tasks(settings.mteb) if settings.mteb else []
    client = EvalClient(server, settings)
    for folder, task in tasks:
        yield {"data": folder.resolve().name, **_report(task, client, settings)}
    if mteb_tasks:
        yield from run_tasks(mteb_tasks, client)


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
    return {name: rounded(score) for name, score in scores.items()}


class MtebEncoder:
    """Implements EncoderProtocol of mteb with a client of the server."""

    def __init__(self, client: EvalClient) -> None:
        self._client = client

    @property
    def mteb_model_meta(self) -> Any:
        """A ModelMeta with the name of the model and the cosine as similarity."""
        from mteb.models.model_meta import ModelMeta, ScoringFunction

        known = {"name": self._client.model, "similarity_fn_name": ScoringFunction.COSINE}
        return ModelMeta.create_empty(overwrites=known)

    def encode(
        self, inputs: Iterable[dict[str, Any]], *, task_metadata: Any, prompt_type: Any = None, **_: Any
    ) -> NDArray[Any]:
        """Returns [N, D] float32.

        Args:
            inputs: Batches with `text`.
            task_metadata: Its type selects the prompt of the model.
            prompt_type: Query or document; has precedence over the type of the task.
        """
        texts = [text for batch in inputs for text in batch["text"]]
        input_type: InputType
        if prompt_type is not None:
            input_type = "query" if prompt_type.value == "query" else "document"
        else:
            input_type = _INPUT_TYPES.get(task_metadata.type, "similarity")
        return self._client.embed(texts, input_type)

    def similarity(self, embeddings1: NDArray[Any], embeddings2: NDArray[Any]) -> Any:
        """Returns the cosines [N, M] of [N, D] and [M, D] as a tensor."""
        from mteb.similarity_functions import cos_sim

        return cos_sim(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: NDArray[Any], embeddings2: NDArray[Any]) -> Any:
        """Returns the cosines [N] of the rows of [N, D] and [N, D] as a tensor."""
        from mteb.similarity_functions import pairwise_cos_sim

        return pairwise_cos_sim(embeddings1, embeddings2)


def find_tasks(names: Sequence[str]) -> list[Any]:
    """Returns tasks of MTEB by name, without their data.

    Raises:
        UsageError: mteb is missing, or it has no such task for texts.
    """
    try:
        import mteb
    except ImportError as error:
        raise UsageError(f"--mteb: needs mteb; run `pip install 'penstock[mteb]'` ({error})") from error
    tasks = []
    for name in names:
        try:
            task = mteb.get_task(name)
        except KeyError as error:
            raise UsageError(f"--mteb: {str(error.args[0]).removeprefix('KeyError: ')} (got {name!r})") from error
        if list(task.metadata.modalities) != ["text"]:
            raise UsageError(f"--mteb: {name} needs {', '.join(task.metadata.modalities)}, but penstock embeds text")
        tasks.append(task)
    return tasks


def run_tasks(tasks: Iterable[Any], client: EvalClient) -> Iterator[dict[str, Any]]:
    """Yields the report of each task, as soon as it is complete. MTEB's cache of results is not used.

    Args:
        tasks: Instances of AbsTask of mteb.
        client: Embeds the texts.

    Raises:
        CommandError: The data of a task cannot be loaded, or a request failed.
    """
    import mteb

    for task in tasks:
        metadata = task.metadata
        try:
            task.load_data()
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise CommandError(
                f"--mteb: the data of {metadata.name} cannot be loaded from the hub or its cache: {reason}"
            ) from error
        batches = {"batch_size": client.texts_per_request, "show_progress_bar": False}
        found = mteb.evaluate(
            MtebEncoder(client), task, encode_kwargs=batches, cache=None, show_progress_bar=False, co2_tracker=False
        )
        (result,) = found.task_results
        yield {
            "data": metadata.name,
            "model": client.model,
            "dimensions": client.dimensions,
            "task": metadata.type,
            "scores": {metadata.main_score: rounded(result.get_score())},
            "splits": {
                split: {row["hf_subset"]: rounded(row["main_score"]) for row in rows}
                for split, rows in result.scores.items()
            },
        }
