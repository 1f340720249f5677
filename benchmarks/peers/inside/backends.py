"""Libraries that embed in process, each at its best: texts sorted by length, in batches of like length.

Each environment has only one of the libraries, so functions import them.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

BATCH_SIZE = 32


class Backend(Protocol):
    """A library with the model loaded."""

    def embed(self, texts: list[str]) -> NDArray[np.float32]:
        """Returns [N, D] embeddings, normalised."""


class SentenceTransformers:
    """sentence-transformers, which sorts by length itself.

    Args:
        options: model, dtype, threads.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(options["threads"])
        self._model = SentenceTransformer(options["model"], device="cpu").to(getattr(torch, options["dtype"]))

    def embed(self, texts: list[str]) -> NDArray[np.float32]:
        """Returns [N, D] embeddings."""
        vectors = self._model.encode(
            texts, batch_size=BATCH_SIZE, normalize_embeddings=True, show_progress_bar=False, convert_to_numpy=True
        )
        return np.asarray(vectors, np.float32)


class _Graph:
    """Base class of the two graph runtimes: tokenization, order, pooling. Batches may run in several streams at once.

    Args:
        options: model, max_tokens, streams.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(Path(options["model"]) / "tokenizer.json"))
        self._tokenizer.enable_truncation(options["max_tokens"])
        self._tokenizer.no_padding()
        self._streams = ThreadPoolExecutor(options["streams"]) if options["streams"] > 1 else None

    def embed(self, texts: list[str]) -> NDArray[np.float32]:
        """Returns [N, D] embeddings: the mean over the tokens of each text, normalised."""
        rows = [encoding.ids for encoding in self._tokenizer.encode_batch(texts)]
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        batches = [[rows[i] for i in order[start : start + BATCH_SIZE]] for start in range(0, len(order), BATCH_SIZE)]
        parts = list(self._streams.map(self._pooled, batches) if self._streams else map(self._pooled, batches))
        vectors = np.concatenate(parts)
        found = np.empty_like(vectors)
        found[order] = vectors
        return found

    def _pooled(self, rows: list[list[int]]) -> NDArray[np.float32]:
        width = max(map(len, rows))
        ids = np.zeros((len(rows), width), np.int64)
        mask = np.zeros((len(rows), width), np.int64)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = row
            mask[number, : len(row)] = 1
        hidden = self._hidden({"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)})
        vectors = np.einsum("nld,nl->nd", hidden, mask.astype(np.float32))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors

    def _hidden(self, inputs: dict[str, NDArray[np.int64]]) -> NDArray[np.float32]:
        """Returns [N, L, D], the rows of the last layer."""
        raise NotImplementedError


class OnnxRuntime(_Graph):
    """ONNX Runtime.

    Args:
        options: Those of _Graph, and graph, threads.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        import onnxruntime

        super().__init__(options)
        how = onnxruntime.SessionOptions()
        how.intra_op_num_threads = options["threads"] // options["streams"]
        how.inter_op_num_threads = 1
        how.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        self._session = onnxruntime.InferenceSession(options["graph"], how, providers=["CPUExecutionProvider"])
        self._names = {entry.name for entry in self._session.get_inputs()}

    def _hidden(self, inputs: dict[str, NDArray[np.int64]]) -> NDArray[np.float32]:
        known = {name: value for name, value in inputs.items() if name in self._names}
        return np.asarray(self._session.run(["last_hidden_state"], known)[0], np.float32)


class OpenVino(_Graph):
    """OpenVINO.

    Args:
        options: Those of _Graph, and graph, threads, dtype.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        import openvino

        super().__init__(options)
        how = {
            "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[options["dtype"]],
            "INFERENCE_NUM_THREADS": options["threads"],
            "NUM_STREAMS": options["streams"],
        }
        self._model = openvino.Core().compile_model(options["graph"], "CPU", how)
        self._names = {entry.get_any_name() for entry in self._model.inputs}
        # A request of a stream is not to be shared: each call takes one and puts it back.
        self._requests = [self._model.create_infer_request() for _ in range(options["streams"])]

    def _hidden(self, inputs: dict[str, NDArray[np.int64]]) -> NDArray[np.float32]:
        known = {name: value for name, value in inputs.items() if name in self._names}
        request = self._requests.pop()
        try:
            request.infer(known)
            return np.array(request.get_tensor("last_hidden_state").data, np.float32)
        finally:
            self._requests.append(request)
