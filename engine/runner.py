"""Runs tokenized inputs on the device. The only module above models/ and pooling/ that knows it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from .config import EngineConfig
from .errors import ModelLoadError
from .load_tokenizer import load_tokenizer
from .loader import load_dense, load_model
from .messages import TokenizerSpec
from .model_files import resolve_model, with_device
from .model_info import ModelInfo
from .packed_batch import PackedBatch
from .params import PoolingParams
from .pooling import ModelPooler, PoolingMetadata
from .request import TokenizedInput

Outputs = Mapping[str, NDArray[np.float32]]


class ModelRunner:
    """One model on one device. Used by one thread at a time.

    Args:
        config: What to load and where.

    Raises:
        ModelLoadError: The model cannot be served.
    """

    def __init__(self, config: EngineConfig) -> None:
        torch.set_num_threads(config.num_threads or _usable_cores())
        device, dtype = _resolve_device(config)
        self.info: ModelInfo = with_device(resolve_model(config), device, dtype)
        self.tokenizer: TokenizerSpec = load_tokenizer(self.info, trust_remote_code=config.trust_remote_code)
        self._device = torch.device(device)
        self._model = load_model(self.info, trust_remote_code=config.trust_remote_code)
        self._pooler = ModelPooler(self.info, self._model, load_dense(self.info))

    @torch.inference_mode()
    def execute(self, inputs: Sequence[TokenizedInput], params: Sequence[PoolingParams]) -> list[Outputs]:
        """Runs one forward and pools it.

        Args:
            inputs: One sequence each; ascending length is fastest.
            params: Resolved parameters, one per input; tasks may be mixed.

        Returns:
            Per input, float32 arrays by output name.
        """
        batch = PackedBatch.build(inputs, self._device)
        metadata = PoolingMetadata.for_batch(batch, params)
        output = self._model.forward(batch, need_attention=self._pooler.needs_attention(params))
        return list(self._pooler.pool(output, metadata).to_numpy())

    def warm_up(self) -> None:
        """Runs one small batch, so that the first request does not pay for what happens once."""
        tokens = TokenizedInput(np.array(self.tokenizer.sample_ids[-self.info.max_model_len :], np.int32))
        params = PoolingParams().resolved(self.info.tasks[0], self.info)
        self.execute([tokens, tokens], [params, params])


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _resolve_device(config: EngineConfig) -> tuple[str, str]:
    """Returns the device and dtype that "auto" stands for on this machine.

    Raises:
        ModelLoadError: The device is not there.
    """
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    index = int(device.partition(":")[2] or 0)
    if device != "cpu" and index >= torch.cuda.device_count():
        raise ModelLoadError(
            f"--device is {device}, but torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices; "
            "install a CUDA build of torch and a driver, or take --device cpu."
        )
    if config.dtype != "auto":
        return device, config.dtype
    if device == "cpu":
        return device, "float32"
    return device, "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
