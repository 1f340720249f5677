"""`penstock eval`: runs tasks on the models of a server, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..settings import EvalSettings, UsageError
from ..target_server import TargetServer
from .client import EvalClient
from .mteb_tasks import find_tasks, run_tasks
from .tasks import DEPTH, RetrievalTask, SimilarityTask, Task, read_task, rounded


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
