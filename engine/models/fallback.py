"""Models without a native family, run by transformers: packed where a probe shows that this is right, padded otherwise."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import UnsupportedModelError, UnsupportedTaskError, WeightError
from ..model_info import ModelInfo, ModelKind
from ..packed_batch import PackedBatch
from ..params import PoolingType
from ..request import TokenizedInput
from .base import ModelOutput, PackedModel
from .packed_attention import NAME, NotPackableError, PackedRow, packed_row, register

logger = logging.getLogger("penstock.engine")

_PROBE_TOLERANCE: Final = 1e-4
_PROBE_LENGTHS: Final = (5, 11)
# Windows up to this many tokens are probed with a sequence longer than they are.
_MAX_PROBE_LENGTH: Final = 1100
# A padded forward takes sequences whose lengths differ by no more than this factor.
_MAX_PADDING: Final = 1.25
# What a model may raise when it is called in a way that it was not written for.
_CALL_ERRORS: Final = (
    NotPackableError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


class TransformersModel(PackedModel):
    """A model of transformers behind penstock's interface.

    A token classifier's hidden states are its logits already. A sequence classifier whose head is one map of a row (`score`,
    as decoders have it) gives hidden states like an embedding model; any other pools by itself and gives `logits`.

    Args:
        info: The resolved model.
        trust_remote_code: Let transformers run code that comes with the model.

    Raises:
        UnsupportedModelError: transformers cannot load or run it.
        WeightError: A tensor is missing or has the wrong shape.
    """

    def __init__(self, info: ModelInfo, *, trust_remote_code: bool = False) -> None:
        transformers.utils.logging.disable_progress_bar()
        self._info = info
        self._device = torch.device(info.device)
        self._config = _load_config(info, trust_remote_code=trust_remote_code)
        self._model = _load_model(info, self._config, trust_remote_code=trust_remote_code)
        self._runs_classifier = info.kind in (ModelKind.SEQUENCE_CLASSIFIER, ModelKind.CROSS_ENCODER)
        self._network: Any = self._model
        self._accepts = frozenset(inspect.signature(self._model.forward).parameters)
        self.hidden_size = info.hidden_size
        self._is_packed = False
        self._position_offset = 0
        if info.kind is ModelKind.TOKEN_CLASSIFIER:
            self.token_head = _identity
        self._choose_mode()

    def forward(self, batch: PackedBatch, *, need_attention: bool = False) -> ModelOutput:
        """See PackedModel."""
        if need_attention:
            raise UnsupportedTaskError(
                f"{self._info.name} runs through transformers, which gives no attention weights; ATTENTION pooling needs a native family.",
                param="pooling_type",
            )
        if self._is_packed:
            with packed_row(batch):
                return ModelOutput(hidden_states=self._run_packed(batch))
        if not self._runs_classifier:
            return ModelOutput(hidden_states=torch.cat(list(self._run_padded(batch))))
        logits_NC = torch.cat(list(self._run_padded(batch))).float()
        return ModelOutput(hidden_states=logits_NC.new_empty(batch.num_tokens, 0), logits=logits_NC)
