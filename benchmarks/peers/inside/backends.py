"""Libraries that embed in process, each at its best: texts sorted by length, in batches of like length.

Each environment has only one of the libraries, so functions import them.
"""

from __future__ import annotations

import base64
import io
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
    """sentence-transformers, which sorts by length itself. Computes the reference.

    Args:
        options: model, threads, dtype, and batch_size if it is not BATCH_SIZE.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(options["threads"])
        self._batch_size = options.get("batch_size", BATCH_SIZE)
        self._model = SentenceTransformer(options["model"], device="cpu").to(getattr(torch, options["dtype"]))

    def embed(self, texts: list[str]) -> NDArray[np.float32]:
        """Returns [N, D] embeddings of texts, or of images as data URIs."""
        inputs = [_image(text) if text.startswith("data:image/") else text for text in texts]
        vectors = self._model.encode(
            inputs,
            batch_size=self._batch_size,
            normalize_embeddings=True,
            show_progress_bar=False,
            convert_to_tensor=True,
        )
        return np.asarray(vectors.float().numpy(), np.float32)


def _image(uri: str) -> Any:
    """Returns an image of Pillow, which is decoded when the library reads its pixels."""
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))


class _Graph:
    """Base class of the two graph runtimes: tokenization, order, pooling.

    Args:
        options: model, max_tokens, pooling.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(Path(options["model"]) / "tokenizer.json"))
        self._tokenizer.enable_truncation(options["max_tokens"])
        self._tokenizer.no_padding()
        self._pooling = options["pooling"]

    def embed(self, texts: list[str]) -> NDArray[np.float32]:
        """Returns [N, D] embeddings, normalised."""
        rows = [encoding.ids for encoding in self._tokenizer.encode_batch(texts)]
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        batches = [[rows[i] for i in order[start : start + BATCH_SIZE]] for start in range(0, len(order), BATCH_SIZE)]
        vectors = np.concatenate([self._pooled(batch) for batch in batches])
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
        positions = np.broadcast_to(np.arange(width), ids.shape)
        inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        hidden = self._hidden(inputs | {"position_ids": positions})
        if self._pooling == "mean":
            vectors = np.einsum("nld,nl->nd", hidden, mask.astype(np.float32))
        else:
            vectors = hidden[np.arange(len(rows)), mask.sum(axis=1) - 1 if self._pooling == "lasttoken" else 0]
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

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
        how.intra_op_num_threads = options["threads"]
        how.inter_op_num_threads = 1
        how.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        self._session = onnxruntime.InferenceSession(options["graph"], how, providers=["CPUExecutionProvider"])
        self._names = {entry.name for entry in self._session.get_inputs()}

    def _hidden(self, inputs: dict[str, NDArray[np.int64]]) -> NDArray[np.float32]:
        known = {name: value for name, value in inputs.items() if name in self._names}
        return np.asarray(self._session.run(["last_hidden_state"], known)[0], np.float32)


class OpenVino(_Graph):
    """OpenVINO. int8: weights compressed by NNCF, and activations rounded at run time.

    Args:
        options: Those of _Graph, and graph, threads, dtype.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        import openvino

        super().__init__(options)
        core = openvino.Core()
        model = core.read_model(options["graph"])
        how = {
            "INFERENCE_PRECISION_HINT": "f32" if options["dtype"] == "float32" else "bf16",
            "INFERENCE_NUM_THREADS": options["threads"],
            "NUM_STREAMS": 1,
        }
        if options["dtype"] == "int8":
            import nncf

            model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
            how["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 32
        compiled = core.compile_model(model, "CPU", how)
        self._names = {entry.get_any_name() for entry in compiled.inputs}
        self._request = compiled.create_infer_request()

    def _hidden(self, inputs: dict[str, NDArray[np.int64]]) -> NDArray[np.float32]:
        self._request.infer({name: value for name, value in inputs.items() if name in self._names})
        return np.array(self._request.get_tensor("last_hidden_state").data, np.float32)
