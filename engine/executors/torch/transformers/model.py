"""Runs models without a native family with transformers: packed if a probe gives equal results, otherwise padded."""

from __future__ import annotations

import logging
import math
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from ....families.decoder import answer_head
from ....families.vision_language import UNREADABLE
from ....model_files.model_folder import one_line
from ....protocol.errors import UnsupportedModelError, UnsupportedTaskError
from ....protocol.messages import TokenizedInput
from ....protocol.model_info import ModelInfo, ModelKind
from ....protocol.tasks import PoolingType
from ..model_heads import AnswerHead
from ..packed_batch import Head, ModelOutput, PackedBatch, PackedModel
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
        info: The model.
        network: The model of transformers, without or with a classification head.
        head: Maps the pooled rows of a sequence classifier to logits; None if the network does so, or has no classes.
        position_offset: Added to the positions of packed batches; None: batches are padded.
        sharing: Sequences that may share a padded forward.
    """

    def __init__(
        self,
        info: ModelInfo,
        network: Network,
        head: Head | None,
        *,
        position_offset: int | None = None,
        sharing: Sharing = Sharing.NONE,
    ) -> None:
        self.hidden_size = info.hidden_size
        self.sequence_head = head
        self.token_head = _identity if info.kind is ModelKind.TOKEN_CLASSIFIER else None
        self._name = info.name
        self._network = network
        self._position_offset = position_offset
        self._sharing = sharing

    @classmethod
    def load(cls, info: ModelInfo, *, trust_remote_code: bool = False) -> TransformersModel:
        """Loads a model, separates its head, and probes how it can run.

        Args:
            info: The model.
            trust_remote_code: Whether transformers may run code from the model folder.

        Raises:
            UnsupportedModelError: transformers cannot load or run the model.
            WeightError: A tensor is missing or has the wrong shape.
        """
        module = load_pretrained(info, trust_remote_code=trust_remote_code)
        images = image_inputs(info, module.config)
        network = Network(module, gives_logits=False, images=images)
        head = None
        probes = Probes(info, network.text_config)
        with torch.no_grad(), in_float32(module):
            if info.classifier_tokens:
                network, head = _take_token_rows(network, info, probes)
            elif info.kind in (ModelKind.SEQUENCE_CLASSIFIER, ModelKind.CROSS_ENCODER):
                network, head = _separate_head(module, info, probes)
            pools = network.gives_logits
            packing = "its classification head includes pooling" if pools else probe_packing(network, info, probes)
            name = f"{type(network.module).__name__}, {info.dtype}"
            if isinstance(packing, int):
                logger.info("%s runs packed through transformers (%s).", info.name, name)
                return cls(info, network, head, position_offset=packing)
            sharing = _probe_sharing(network, info, probes)
        logger.warning("%s runs padded through transformers (%s): %s%s.", info.name, name, packing, sharing.log_message)
        return cls(info, network, head, sharing=sharing)

    def forward(self, batch: PackedBatch, *, need_attention: bool = False) -> ModelOutput:
        """Runs the batch padded or packed; raises UnsupportedTaskError for attention weights."""
        if need_attention:
            raise UnsupportedTaskError(
                f"pooling_type is ATTENTION, but transformers runs {self._name} and returns no attention weights. Set "
                "seq_pooling_type in --pooler-config to another type, such as MEAN.",
                param="pooling_type",
            )
        if self._position_offset is not None:
            return ModelOutput(hidden_states=self._network.run_packed(batch, self._position_offset)[0])
        rows = self._network.run_padded(batch, self._sharing)
        if not self._network.gives_logits:
            return ModelOutput(hidden_states=rows)
        return ModelOutput(hidden_states=rows.new_empty(batch.num_tokens, 0), logits=rows.float())


class Probes:
    """Batches of sequences without special tokens, which show how a network can run.

    Args:
        info: The model.
        config: Config of its language model.
    """

    def __init__(self, info: ModelInfo, config: Any) -> None:
        self._device = torch.device(info.device)
        self._max_model_len = info.max_model_len
        self._max_positions = getattr(config, "max_position_embeddings", None) or 0
        special = {getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "cls", "sep")}
        self._ordinary = [i for i in range(min(info.vocab_size, 1000)) if i not in special] or [0]

    def of_lengths(self, *lengths: int) -> PackedBatch:
        """Returns a batch of sequences with these lengths."""
        ids = np.resize(np.random.default_rng(0).permutation(self._ordinary), sum(lengths)).astype(np.int32)
        return PackedBatch.build(
            [TokenizedInput(part) for part in np.split(ids, np.cumsum(lengths)[:-1])], self._device
        )

    def past_positions(self) -> PackedBatch:
        """Returns two short sequences and, for short models, so many that their sum passes the position limit."""
        limit = max(self._max_model_len, self._max_positions)
        if limit > _MAX_PROBE_LENGTH:
            return self.of_lengths(*_PROBE_LENGTHS)
        length = min(self._max_model_len, limit // 2 + 1)
        return self.of_lengths(*_PROBE_LENGTHS, *[length] * (limit // length + 1))

    def of_images(self, images: ImageInputs) -> PackedBatch:
        """Returns a batch of a text and of texts with an image."""
        text = self.of_lengths(_PROBE_LENGTHS[0]).token_ids
        assert text is not None, "the batch was built from arrays"
        sequences: list[TokenizedInput] = [TokenizedInput(text.astype(np.int32))]
        for image in images.probe_images():
            rows = np.full(images.num_rows(image), images.token_id)
            sequences.append(TokenizedInput(np.concatenate([text, rows, text]).astype(np.int32), images=(image,)))
        return PackedBatch.build(sequences, self._device)


def _separate_head(classifier: Any, info: ModelInfo, probes: Probes) -> tuple[Network, Head | None]:
    """Separates the head if it is one map of the row that penstock pools; otherwise keeps it in the network."""
    pooling = Network(classifier, gives_logits=True)
    score = getattr(classifier, "score", None)
    if not isinstance(score, nn.Linear) or info.sequence_pooling not in ((PoolingType.LAST,), (PoolingType.CLS,)):
        return pooling, None
    row = -1 if info.sequence_pooling == (PoolingType.LAST,) else 0
    probe = probes.of_lengths(_PROBE_LENGTHS[0])
    try:
        backbone = Network(classifier.base_model, gives_logits=False)
        rows = backbone.run_padded(probe, Sharing.NONE)
        is_same = _agree(score(rows[row : row + 1 or None]), pooling.run_padded(probe, Sharing.NONE))
    except _CALL_ERRORS as error:
        raise _cannot_run(info, error, classifier) from error
    return (backbone, _ScoreHead(score)) if is_same else (pooling, None)


def _take_token_rows(network: Network, info: ModelInfo, probes: Probes) -> tuple[Network, Head]:
    """Replaces the output embedding of a language model by its rows for the answer tokens."""
    answers = list(info.classifier_tokens)
    output = network.module.get_output_embeddings()
    if not isinstance(output, nn.Linear):
        raise UnsupportedModelError(f"classifier_from_token needs an output embedding; {info.name} has none.")
    bias_O: Tensor | None = output.bias
    bias_C = bias_O[answers] if bias_O is not None else None
    config = network.text_config.to_dict()
    head = AnswerHead(output.weight[answers], bias_C, answer_head(info, info.hidden_size, config))
    probe = probes.of_lengths(_PROBE_LENGTHS[0])
    try:
        expected = network.run_padded(probe, Sharing.NONE)[-1:, answers]
        backbone = Network(network.module.base_model, gives_logits=False, images=network.images)
        is_same = _agree(head.logits(backbone.run_padded(probe, Sharing.NONE)[-1:]), expected)
    except _CALL_ERRORS as error:
        raise _cannot_run(info, error, network.module) from error
    if not is_same:
        raise UnsupportedModelError(
            f"classifier_from_token does not support the way in which {info.name} computes its logits."
        )
    return backbone, head


def probe_packing(network: Network, info: ModelInfo, probes: Probes) -> int | str:
    """Probes whether a network can run packed; returns its position offset, or the reason why not."""
    module = network.language_model
    sharing = network.best_sharing
    probe = probes.past_positions()
    try:
        expected = network.run_padded(probe, sharing)
        pictured = None if network.images is None else probes.of_images(network.images)
        expected_pictured = None if pictured is None else network.run_padded(pictured, sharing)
    except _CALL_ERRORS as error:
        raise _cannot_run(info, error, network.module) from error
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
                and _is_right_past_window(network, row.max_window, offset, info, probes, implementation)
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


def _is_right_past_window(
    network: Network, window: int, offset: int, info: ModelInfo, probes: Probes, implementation: str
) -> bool:
    """Whether packed results are equal for a sequence that is longer than the attention window."""
    length = window + _PAST_WINDOW
    if not window or length > min(_MAX_PROBE_LENGTH, info.max_model_len):
        return True
    probe = probes.of_lengths(_PROBE_LENGTHS[0], length)
    rows, _ = network.run_packed(probe, offset)
    network.language_model.set_attn_implementation(implementation)
    expected = network.run_padded(probe, network.best_sharing)
    network.language_model.set_attn_implementation(NAME)
    return _agree(rows, expected)


def _probe_sharing(network: Network, info: ModelInfo, probes: Probes) -> Sharing:
    """Probes which sequences can be padded together.

    Convolutions read the padding after a text; experts with a size limit drop tokens of full batches.
    """
    options = list(Sharing)
    try:
        return next(
            sharing
            for sharing in options[options.index(network.best_sharing) :]
            if _is_independent_of_batch(network, sharing, info, probes)
        )
    except _CALL_ERRORS as error:
        raise _cannot_run(info, error, network.module) from error


def _is_independent_of_batch(network: Network, sharing: Sharing, info: ModelInfo, probes: Probes) -> bool:
    if sharing is Sharing.NONE:
        return True
    is_small = sum(weight.numel() for weight in network.module.parameters()) <= _SMALL
    lengths = _SHARED_LENGTHS if is_small or info.device != "cpu" else _SHARED_LENGTHS[:-1]
    for length in lengths:
        if length > info.max_model_len:
            break
        shortest = math.ceil(length / sharing.max_length_ratio)
        probe = probes.of_lengths(shortest, (shortest + length) // 2, length)
        if not _agree(network.run_padded(probe, sharing), network.run_padded(probe, Sharing.NONE)):
            return False
    return True


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
