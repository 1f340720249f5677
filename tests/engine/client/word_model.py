"""A model with a vocabulary of a few words, its tokenizer, and a core that runs it."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.engine.client.dispatcher import Dispatcher
from penstock.engine.protocol.messages import Frame, SubmitRequest, TokenizedInput
from penstock.engine.protocol.model_info import ModelInfo, ModelKind, TokenizerSpec
from penstock.engine.protocol.multi_vector import MultiVectorTokens
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.tasks import PoolingTask, PoolingType
from penstock.engine.tokenization.tokenizer import TokenizerPool

from ..steps import Row, step_of, unpacked

WORDS = ["?", "a", "b", "c", "d", "e", "query:", "document:", "Instruct:", "Query:", "find"]
TABLE = np.random.default_rng(3).normal(size=(len(WORDS), 4)).astype(np.float32)
"""The vector of each word. The vector of a text is their sum."""


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def info(**changes: Any) -> ModelInfo:
    fields: dict[str, Any] = {
        "name": "words",
        "path": "/words",
        "architecture": "any",
        "model_type": "any",
        "packed": True,
        "kind": ModelKind.EMBEDDING,
        "tasks": (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.SCORE),
        "hidden_size": 4,
        "vocab_size": len(WORDS),
        "max_model_len": 24,
        "embedding_size": 4,
        "sequence_pooling": (PoolingType.MEAN,),
    }
    return ModelInfo(**{**fields, **changes})


def tokenizer_pool(multi_vector_tokens: MultiVectorTokens | None = None) -> TokenizerPool:
    model = {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(WORDS)}, "unk_token": "?"}
    parts = dict.fromkeys(("added_tokens", "normalizer", "post_processor", "decoder"), None)
    spec = {"version": "1.0", **parts, "added_tokens": [], "model": model, "pre_tokenizer": {"type": "WhitespaceSplit"}}
    tokenizer = TokenizerSpec(
        json=json.dumps(spec),
        truncation_side="right",
        uses_token_types=False,
        multi_vector_tokens=multi_vector_tokens or MultiVectorTokens(),
    )
    return TokenizerPool(tokenizer, vocab_size=len(WORDS), do_lower_case=False, num_threads=1)


class WordCore:
    """Answers every request in the next iteration of the event loop, and records it with its inputs."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.sent: list[tuple[SubmitRequest, Sequence[TokenizedInput]]] = []
        dispatcher.replicas[0].connect(self.send)

    @property
    def num_inputs(self) -> int:
        return sum(len(inputs) for _, inputs in self.sent)

    def texts(self, place: int = 0) -> list[list[int]]:
        """Returns the token ids of each input of a request."""
        return [tokens.token_ids.tolist() for tokens in self.sent[place][1]]

    def send(self, first: bytes, frames: Sequence[Frame]) -> None:
        for request in unpacked(first, frames)[1]:
            self.sent.append((request, request.inputs))
            asyncio.get_running_loop().call_soon(self._answer, request)

    def _answer(self, request: SubmitRequest) -> None:
        rows = [
            Row(request.request_id, index, *output)
            for index, tokens in enumerate(request.inputs)
            for output in outputs(request.params, tokens)
        ]
        self.dispatcher.replicas[0].receive(*step_of(rows))


def outputs(params: PoolingParams, tokens: TokenizedInput) -> list[tuple[str, np.ndarray]]:
    rows = TABLE[tokens.token_ids]
    if params.is_compared:
        assert tokens.query_vectors is not None
        return [("similarities", rows @ tokens.query_vectors.T)]
    made = []
    for task in (params.task, *params.extra_tasks):
        if task is PoolingTask.EMBED:
            total = rows.sum(axis=0)
            made.append(("embedding", total / np.linalg.norm(total) if params.normalize else total))
        elif task is PoolingTask.TOKEN_EMBED:
            made.append(("token_embeddings", rows))
        elif task is PoolingTask.SPARSE_EMBED:
            token_ids, counts = np.unique(tokens.token_ids, return_counts=True)
            made.append(("sparse", np.stack([token_ids, counts], axis=1).astype(np.float32)))
        else:
            name = "token_scores" if task is PoolingTask.TOKEN_CLASSIFY else "scores"
            made.append((name, np.array([tokens.token_ids[0], tokens.token_ids[-1]], np.float32)))
    return made
