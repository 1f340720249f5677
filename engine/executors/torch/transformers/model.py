"""Runs models without a native family with transformers: packed if a probe gives equal results, otherwise padded."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from ....families.decoder import answer_head
from ....families.vision_language import UNREADABLE
from ....model_files.model_folder import one_line
from ....protocol.errors import UnsupportedModelError, UnsupportedTaskError
from ....protocol.model_info import ModelInfo, ModelKind
from ....protocol.request import TokenizedInput
from ....protocol.tasks import PoolingType
from ..base import ModelOutput, PackedModel
from ..model_heads import AnswerHead
from ..packed_batch import PackedBatch
from .image_inputs import ImageInputs, image_inputs
from .network import NAME, Network, NotPackableError, Sharing, in_float32, register
from .pretrained import CODE_ERRORS, load_pretrained, other_inputs

logger = logging.getLogger("penstock.engine")

_TOLERANCE: Final = 1e-4
_PROBE_LENGTHS: Final = (5, 11)
# A probe of an attention window has this many tokens more than the window.
_PAST_WINDOW: Final = 8
# Longer probes would make the start slow.
_MAX_PROBE_LENGTH: Final = 1100
# Lengths of the probes for sharing a forward; models with sparse attention use it for the last one.
_SHARED_LENGTHS: Final = (10, 60, 250, _MAX_PROBE_LENGTH)
# Models with at most this many parameters run the longest probe in seconds on a CPU.
_SMALL: Final = 200_000_000
# Errors of a model that does not support the call.
_CALL_ERRORS: Final = (
    NotPackableError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class TransformersModel(PackedModel):
    """A PackedModel that transformers runs.

    Results of `forward`:

    - Embedding model: hidden states [T, D].
    - Token classifier: its logits [T, C] as hidden states, which `token_head` returns unchanged.
    - Sequence classifier: hidden states [T, D] if `sequence_head` is set, otherwise logits [N, C]. It is set if the
      head is one map of a single row: `score`, or rows of the output embedding of a language model.

    Args:
        trust_remote_code: Whether transformers may run code from the model folder.

    Raises:
        UnsupportedModelError: transformers cannot load or run the model.
        WeightError: A tensor is missing or has the wrong shape.
    """

    def __init__(self, info: ModelInfo, *, trust_remote_code: bool = False) -> None:
        self._name = info.name
        self._device = torch.device(info.device)
        module = load_pretrained(info, trust_remote_code=trust_remote_code)
        self._images = image_inputs(info, module.config)
        self._network = Network(module, gives_logits=False, images=self._images)
        self.hidden_size = info.hidden_size
        if info.kind is ModelKind.TOKEN_CLASSIFIER:
            self.token_head = _identity
        with torch.no_grad(), in_float32(self._network.module):
            if info.classifier_tokens:
                self._take_token_rows(info)
            elif info.kind in (ModelKind.SEQUENCE_CLASSIFIER, ModelKind.CROSS_ENCODER):
                self._separate_head(info)
            pools = self._network.gives_logits
            packing = "its classification head includes pooling" if pools else self._probe_packing(info)
            self._position_offset = packing if isinstance(packing, int) else None
            sharing = self._probe_sharing(info) if self._position_offset is None else ""
        network = f"{type(self._network.module).__name__}, {info.dtype}"
        if self._position_offset is not None:
            logger.info("%s runs packed through transformers (%s).", info.name, network)
        else:
            logger.warning("%s runs padded through transformers (%s): %s%s.", info.name, network, packing, sharing)

    def forward(self, batch: PackedBatch, *, need_attention: bool = False) -> ModelOutput:
        """See PackedModel."""
        if need_attention:
            raise UnsupportedTaskError(
                f"pooling_type is ATTENTION, but transformers runs {self._name} and returns no attention weights. Set "
                "seq_pooling_type in --pooler-config to another type, such as MEAN.",
                param="pooling_type",
            )
        if self._position_offset is not None:
            return ModelOutput(hidden_states=self._network.run_packed(batch, self._position_offset)[0])
        rows = self._network.run_padded(batch)
        if not self._network.gives_logits:
            return ModelOutput(hidden_states=rows)
        return ModelOutput(hidden_states=rows.new_empty(batch.num_tokens, 0), logits=rows.float())

    def _separate_head(self, info: ModelInfo) -> None:
        """Separates the head if it is one map of the row that penstock pools; otherwise keeps it in the network."""
        classifier = self._network.module
        self._network = pooling = Network(classifier, gives_logits=True)
        score = getattr(classifier, "score", None)
        if not isinstance(score, nn.Linear) or info.sequence_pooling not in ((PoolingType.LAST,), (PoolingType.CLS,)):
            return
        row = -1 if info.sequence_pooling == (PoolingType.LAST,) else 0
        probe = self._probe((_PROBE_LENGTHS[0],), info)
        try:
            backbone = Network(classifier.base_model, gives_logits=False)
            rows = backbone.run_padded(probe)
            is_same = _agree(score(rows[row : row + 1 or None]), pooling.run_padded(probe))
        except _CALL_ERRORS as error:
            raise _cannot_run(info, error, self._network.module) from error
        if is_same:
            self._network, self.sequence_head = backbone, _ScoreHead(score)

    def _take_token_rows(self, info: ModelInfo) -> None:
        """Replaces the output embedding of a language model by its rows for the answer tokens."""
        network, answers = self._network.module, list(info.classifier_tokens)
        output = network.get_output_embeddings()
        if not isinstance(output, nn.Linear):
            raise UnsupportedModelError(f"classifier_from_token needs an output embedding; {info.name} has none.")
        bias_O: Tensor | None = output.bias
        bias_C = bias_O[answers] if bias_O is not None else None
        config = self._network.text_config.to_dict()
        head = AnswerHead(output.weight[answers], bias_C, answer_head(info, info.hidden_size, config))
        probe = self._probe((_PROBE_LENGTHS[0],), info)
        try:
            expected = self._network.run_padded(probe)[-1:, answers]
            self._network = Network(network.base_model, gives_logits=False, images=self._images)
            is_same = _agree(head.logits(self._network.run_padded(probe)[-1:]), expected)
        except _CALL_ERRORS as error:
            raise _cannot_run(info, error, self._network.module) from error
        if not is_same:
            raise UnsupportedModelError(
                f"classifier_from_token does not support the way in which {info.name} computes its logits."
            )
        self.sequence_head = head

    def _probe_packing(self, info: ModelInfo) -> int | str:
        """Probes whether the network can run packed; returns its position offset, or the reason why not."""
        network, module = self._network, self._network.language_model
        probe = self._probe(self._probe_lengths(info), info)
        try:
            expected = network.run_padded(probe)
            pictured = None if self._images is None else self._image_probe(self._images, info)
            expected_pictured = None if pictured is None else network.run_padded(pictured)
        except _CALL_ERRORS as error:
            raise _cannot_run(info, error, self._network.module) from error
        if not network.takes_positions:
            return "it does not accept position ids"
        implementation = module.config._attn_implementation
        reason = "packed sequences change the results of each other"
        register()
        try:
            module.set_attn_implementation(NAME)
            for offset in (0, (network.pad_token_id or 0) + 1):
                rows, row = network.run_packed(probe, offset)
                if row.num_calls == 0:
                    reason = "its attention does not use the interface of transformers"
                elif (
                    _agree(rows, expected)
                    and self._is_right_past_window(row.max_window, offset, info, implementation)
                    and (
                        pictured is None
                        or expected_pictured is None
                        or _agree(network.run_packed(pictured, offset)[0], expected_pictured)
                    )
                ):
                    return offset
        except _CALL_ERRORS as error:
            reason = str(error).rstrip(".") or repr(error)
        module.set_attn_implementation(implementation)
        return reason

    def _probe_sharing(self, info: ModelInfo) -> str:
        """Probes which sequences can be padded together and sets `sharing`; returns its log message."""
        try:
            while not self._is_independent_of_batch(info):
                # Convolutions read the padding after a text; experts with a size limit drop tokens of full batches.
                is_equal = self._network.sharing is Sharing.EQUAL
                self._network.sharing = Sharing.NONE if is_equal else Sharing.EQUAL
        except _CALL_ERRORS as error:
            raise _cannot_run(info, error, self._network.module) from error
        return self._network.sharing.log_message

    def _is_independent_of_batch(self, info: ModelInfo) -> bool:
        network, sharing = self._network, self._network.sharing
        if sharing is Sharing.NONE:
            return True
        is_small = sum(weight.numel() for weight in network.module.parameters()) <= _SMALL
        lengths = _SHARED_LENGTHS if is_small or self._device.type != "cpu" else _SHARED_LENGTHS[:-1]
        for length in lengths:
            if length > info.max_model_len:
                break
            shortest = math.ceil(length / sharing.max_length_ratio)
            probe = self._probe((shortest, (shortest + length) // 2, length), info)
            together = network.run_padded(probe)
            network.sharing = Sharing.NONE
            alone = network.run_padded(probe)
            network.sharing = sharing
            if not _agree(together, alone):
                return False
        return True

    def _is_right_past_window(self, window: int, offset: int, info: ModelInfo, implementation: str) -> bool:
        """Whether packed results are equal for a sequence that is longer than the attention window."""
        length = window + _PAST_WINDOW
        if not window or length > min(_MAX_PROBE_LENGTH, info.max_model_len):
            return True
        probe = self._probe((_PROBE_LENGTHS[0], length), info)
        rows, _ = self._network.run_packed(probe, offset)
        self._network.language_model.set_attn_implementation(implementation)
        expected = self._network.run_padded(probe)
        self._network.language_model.set_attn_implementation(NAME)
        return _agree(rows, expected)

    def _image_probe(self, images: ImageInputs, info: ModelInfo) -> PackedBatch:
        """Returns a batch of a text and of texts with an image."""
        text = self._probe((_PROBE_LENGTHS[0],), info).token_ids
        assert text is not None, "the batch was built from arrays"
        sequences: list[TokenizedInput] = [TokenizedInput(text.astype(np.int32))]
        for image in images.probe_images():
            rows = np.full(images.num_rows(image), images.token_id)
            sequences.append(TokenizedInput(np.concatenate([text, rows, text]).astype(np.int32), images=(image,)))
        return PackedBatch.build(sequences, self._device)

    def _probe_lengths(self, info: ModelInfo) -> tuple[int, ...]:
        """Returns two short lengths and, for short models, enough lengths that their sum passes the position limit."""
        limit = max(info.max_model_len, getattr(self._network.text_config, "max_position_embeddings", None) or 0)
        if limit > _MAX_PROBE_LENGTH:
            return _PROBE_LENGTHS
        length = min(info.max_model_len, limit // 2 + 1)
        return (*_PROBE_LENGTHS, *[length] * (limit // length + 1))

    def _probe(self, lengths: Sequence[int], info: ModelInfo) -> PackedBatch:
        """Returns a batch of sequences without special tokens."""
        config = self._network.text_config
        special = {getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "cls", "sep")}
        ordinary = [i for i in range(min(info.vocab_size, 1000)) if i not in special] or [0]
        ids = np.resize(np.random.default_rng(0).permutation(ordinary), sum(lengths)).astype(np.int32)
        return PackedBatch.build(
            [TokenizedInput(part) for part in np.split(ids, np.cumsum(lengths)[:-1])], self._device
        )


class _ScoreHead:
    def __init__(self, score: nn.Linear) -> None:
        self._score = score

    def __call__(self, pooled_ND: Tensor) -> Tensor:
        """Returns [N, num_labels] float32."""
        logits: Tensor = self._score(pooled_ND.to(self._score.weight.dtype))
        return logits.float()


def _cannot_run(info: ModelInfo, error: Exception, network: nn.Module) -> UnsupportedModelError:
    """Returns the error for a model that transformers cannot run, and logs the traceback with level debug."""
    logger.debug("transformers cannot run %s", info.name, exc_info=error)
    name = f"{info.name} (model_type {info.model_type!r})"
    if others := other_inputs(type(network)):
        return UnsupportedModelError(f"{name} reads {others} in addition to text; {UNREADABLE}")
    reason = (
        f"{type(network).__name__} does not run with only token ids (--log-level debug shows the traceback)"
        if isinstance(error, CODE_ERRORS)
        else one_line(error)
    )
    return UnsupportedModelError(f"transformers cannot run {name} from {info.path}: {reason}")


def _identity(logits: Tensor) -> Tensor:
    return logits


def _agree(rows: Tensor, expected: Tensor) -> bool:
    if rows.shape != expected.shape:
        return False
    return bool((rows - expected).abs().max() <= _TOLERANCE * max(1.0, expected.abs().max().item()))
