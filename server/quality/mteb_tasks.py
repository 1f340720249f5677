"""Runs tasks of MTEB on a served model (extra `mteb`). MTEB loads their data from the hub or its local cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from numpy.typing import NDArray

from ..settings import CommandError, UsageError
from .client import EvalClient
from .tasks import InputType, rounded

_INPUT_TYPES: Final[dict[str, InputType]] = {
    "Classification": "classification",
    "MultilabelClassification": "classification",
    "Clustering": "clustering",
}
"""Purpose of the texts by type of task. Retrieval and reranking name query or document; others compare texts."""


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
