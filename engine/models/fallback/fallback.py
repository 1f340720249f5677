"""Models without a native family, run by transformers: packed where a probe shows that this is right, else padded."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ...layers.rows import Rows
from ...packed_batch import PackedBatch
from ...protocol.errors import UnsupportedModelError, UnsupportedTaskError
from ...protocol.model_info import ModelInfo, ModelKind
from ...protocol.request import TokenizedInput
from ...protocol.tasks import PoolingType
from ..base import ModelOutput, PackedModel
from ..heads import TokenHead
from .packed_attention import NAME, NotPackableError, PackedRow, packed_row, register
from .pretrained import load_pretrained

logger = logging.getLogger("penstock.engine")

_TOLERANCE: Final = 1e-4
_PROBE_LENGTHS: Final = (5, 11)
# Attention windows are probed with a sequence that is longer by this much.
_PAST_WINDOW: Final = 8
# Tokens beyond which a probe would make the start slow.
_MAX_PROBE_LENGTH: Final = 1100
# Sequences share a padded forward while the longest is at most this much longer than the shortest.
_MAX_STRETCH: Final = 1.25
# What a model may raise when it is called in a way that it was not written for.
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


@dataclass(frozen=True, slots=True)
class _Packing:
    """How to call a network on a packed row.

    Attributes:
        position_offset: Added to positions; families in RoBERTa's line number them from pad_token_id + 1.
    """

    position_offset: int


class TransformersModel(PackedModel):
    """A model of transformers behind penstock's interface.

    What `forward` gives depends on the kind of the checkpoint. An embedding model: hidden states. A token classifier:
    its logits as hidden states, which `classify_tokens` passes on. A sequence classifier: hidden states where its head
    is one map of a single row (`score`, or some rows of a language model's output embedding), else logits.

    Args:
        info: The resolved model.
        trust_remote_code: Let transformers run code that comes with the model.

    Raises:
        UnsupportedModelError: transformers cannot load or run it.
        WeightError: A tensor is missing or has the wrong shape.
    """

    def __init__(self, info: ModelInfo, *, trust_remote_code: bool = False) -> None:
        recipe = info.multi_vector
        if recipe is not None and recipe.expansion is not None and not recipe.expansion.attends:
            raise UnsupportedModelError(
                f"{info.name} hides the tokens behind short queries from the others, which only native families can."
            )
        self._name = info.name
        self._device = torch.device(info.device)
        self._use(load_pretrained(info, trust_remote_code=trust_remote_code), gives_logits=False)
        self._pad_token_id = _text_config(self._network).pad_token_id
        self.hidden_size = info.hidden_size
        if info.kind is ModelKind.TOKEN_CLASSIFIER:
            self.token_head = _identity
        with torch.no_grad(), _in_float32(self._network):
            if info.classifier_tokens:
                self._take_token_rows(info)
            elif info.kind in (ModelKind.SEQUENCE_CLASSIFIER, ModelKind.CROSS_ENCODER):
                self._separate_head(info)
            packing = "its classification head pools by itself" if self._gives_logits else self._try_packing(info)
        self._packing: _Packing | None = packing if isinstance(packing, _Packing) else None
        architecture = type(self._network).__name__
        if isinstance(packing, _Packing):
            logger.info("%s runs packed through transformers (%s).", info.name, architecture)
        else:
            logger.warning("%s runs padded through transformers (%s): %s.", info.name, architecture, packing)

    def forward(self, batch: PackedBatch, *, need_attention: bool = False) -> ModelOutput:
        """See PackedModel."""
        if need_attention:
            raise UnsupportedTaskError(
                f"{self._name} runs through transformers, which gives no attention weights: "
                "ATTENTION pooling needs a native family.",
                param="pooling_type",
            )
        if self._packing is not None:
            return ModelOutput(hidden_states=self._run_packed(batch, self._packing)[0])
        rows = self._run_padded(batch)
        if not self._gives_logits:
            return ModelOutput(hidden_states=rows)
        return ModelOutput(hidden_states=rows.new_empty(batch.num_tokens, 0), logits=rows.float())

    def _use(self, network: Any, *, gives_logits: bool) -> None:
        """Sets what a forward calls and whether that pools by itself."""
        self._network: Any = network
        self._gives_logits = gives_logits
        self._accepted = _argument_names(network)

    def _separate_head(self, info: ModelInfo) -> None:
        """Takes the head off where it is one map of the row that penstock pools too; leaves it on otherwise."""
        classifier = self._network
        self._use(classifier, gives_logits=True)
        score = getattr(classifier, "score", None)
        if not isinstance(score, nn.Linear) or info.sequence_pooling not in ((PoolingType.LAST,), (PoolingType.CLS,)):
            return
        row = -1 if info.sequence_pooling == (PoolingType.LAST,) else 0
        probe = self._probe((_PROBE_LENGTHS[0],), info)
        try:
            expected = self._run_padded(probe)
            self._use(classifier.base_model, gives_logits=False)
            is_same = _agree(score(self._run_padded(probe)[row : row + 1 or None]), expected)
        except _CALL_ERRORS as error:
            raise UnsupportedModelError(f"transformers cannot run {info.name}: {error!r}") from error
        if is_same:
            self.sequence_head = _ScoreHead(score)
        else:
            self._use(classifier, gives_logits=True)

    def _take_token_rows(self, info: ModelInfo) -> None:
        """Replaces the output embedding of a language model by the rows of its answers."""
        network, answers = self._network, list(info.classifier_tokens)
        output = network.get_output_embeddings()
        if not isinstance(output, nn.Linear):
            raise UnsupportedModelError(f"{info.name} has no output embedding that classifier_from_token could read.")
        bias_O: Tensor | None = output.bias
        bias_C = bias_O[answers] if bias_O is not None else None
        config = _text_config(network).to_dict()
        head = TokenHead(output.weight[answers], bias_C, info.classifier_method, config)
        probe = self._probe((_PROBE_LENGTHS[0],), info)
        try:
            expected = self._run_padded(probe)[-1:, answers]
            self._use(network.base_model, gives_logits=False)
            is_same = _agree(head.logits(self._run_padded(probe)[-1:]), expected)
        except _CALL_ERRORS as error:
            raise UnsupportedModelError(f"transformers cannot run {info.name}: {error!r}") from error
        if not is_same:
            raise UnsupportedModelError(
                f"{info.name} computes its logits in a way of its own, which classifier_from_token cannot read."
            )
        self.sequence_head = head

    def _try_packing(self, info: ModelInfo) -> _Packing | str:
        """Decides by trial whether the network may run packed, and how; returns why not where it may not."""
        network = self._network
        probe = self._probe(self._probe_lengths(info), info)
        try:
            expected = self._run_padded(probe)
        except _CALL_ERRORS as error:
            raise UnsupportedModelError(f"transformers cannot run {info.name}: {error!r}") from error
        if "position_ids" not in self._accepted:
            return "it takes no position ids"
        implementation = network.config._attn_implementation
        reason = "packed sequences disturb each other"
        register()
        try:
            network.set_attn_implementation(NAME)
            for packing in (_Packing(0), _Packing((self._pad_token_id or 0) + 1)):
                rows, row = self._run_packed(probe, packing)
                if row.num_calls == 0:
                    reason = "its attention does not go through transformers' interface"
                elif _agree(rows, expected) and self._holds_past_window(row.max_window, packing, info, implementation):
                    return packing
        except _CALL_ERRORS as error:
            reason = str(error).rstrip(".") or repr(error)
        network.set_attn_implementation(implementation)
        return reason

    def _holds_past_window(self, window: int, packing: _Packing, info: ModelInfo, implementation: str) -> bool:
        """Probes local attention with a sequence that its window does not cover."""
        length = window + _PAST_WINDOW
        if not window or length > min(_MAX_PROBE_LENGTH, info.max_model_len):
            return True
        probe = self._probe((_PROBE_LENGTHS[0], length), info)
        rows, _ = self._run_packed(probe, packing)
        self._network.set_attn_implementation(implementation)
        expected = self._run_padded(probe)
        self._network.set_attn_implementation(NAME)
        return _agree(rows, expected)

    def _probe_lengths(self, info: ModelInfo) -> tuple[int, ...]:
        """Two short sequences; where that is cheap, also enough tokens to pass every limit that is meant for one."""
        limit = max(info.max_model_len, getattr(_text_config(self._network), "max_position_embeddings", None) or 0)
        if limit > _MAX_PROBE_LENGTH:
            return _PROBE_LENGTHS
        length = min(info.max_model_len, limit // 2 + 1)
        return (*_PROBE_LENGTHS, *[length] * (limit // length + 1))

    def _probe(self, lengths: Sequence[int], info: ModelInfo) -> PackedBatch:
        """Returns sequences of ordinary tokens."""
        config = _text_config(self._network)
        special = {getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "cls", "sep")}
        ordinary = [i for i in range(min(info.vocab_size, 1000)) if i not in special] or [0]
        ids = np.resize(np.random.default_rng(0).permutation(ordinary), sum(lengths)).astype(np.int32)
        return PackedBatch.build(
            [TokenizedInput(part) for part in np.split(ids, np.cumsum(lengths)[:-1])], self._device
        )

    def _run_packed(self, batch: PackedBatch, packing: _Packing) -> tuple[Tensor, PackedRow]:
        """Runs all sequences in one row; returns [T, D] and what attention saw."""
        rows = Rows.of(batch)
        arguments: dict[str, Any] = {
            "input_ids": rows.input_ids[None],
            "position_ids": (rows.positions + packing.position_offset)[None],
        }
        if rows.token_type_ids is not None:
            arguments["token_type_ids"] = rows.token_type_ids[None]
        with packed_row(rows) as row:
            return rows.trim(self._call(arguments)[0]), row

    def _run_padded(self, batch: PackedBatch) -> Tensor:
        """Runs sequences of similar length together, padded on the right; returns [T, D], or [N, num_labels]."""
        parts = []
        for first, last in self._groups(batch.seq_lens):
            lengths = batch.seq_lens[first:last]
            start = sum(batch.seq_lens[:first])
            span = slice(start, start + sum(lengths))
            ids = pad_sequence(list(batch.input_ids[span].split(lengths)), True, float(self._pad_token_id or 0))
            is_token = torch.arange(ids.shape[1], device=ids.device) < torch.tensor(lengths, device=ids.device)[:, None]
            arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": is_token.long()}
            if batch.token_type_ids is not None:
                arguments["token_type_ids"] = pad_sequence(list(batch.token_type_ids[span].split(lengths)), True)
            output = self._call(arguments)
            parts.append(output if self._gives_logits else output[is_token])
        return torch.cat(parts)

    def _groups(self, seq_lens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Cuts a batch into runs of similar length; into single sequences where padding would show in the result."""
        pools_at_marker = self._gives_logits and (self._network.config.is_encoder_decoder or self._pad_token_id is None)
        can_share = "attention_mask" in self._accepted and not pools_at_marker
        first = 0
        for last in range(1, len(seq_lens) + 1):
            members = seq_lens[first : last + 1]
            if last == len(seq_lens) or not can_share or max(members) > _MAX_STRETCH * min(members):
                yield first, last
                first = last

    def _call(self, arguments: dict[str, Any]) -> Tensor:
        """Calls the network with the arguments that it takes; returns its logits, else its hidden states."""
        accepted = self._accepted
        if "use_cache" in accepted:
            arguments["use_cache"] = False
        output = self._network(
            **{name: value for name, value in arguments.items() if name in accepted}, return_dict=True
        )
        rows: Tensor = output.logits if "logits" in output else output.last_hidden_state
        return rows


class _ScoreHead:
    """The map from a decoder's last row to the classes."""

    def __init__(self, score: nn.Linear) -> None:
        self._score = score

    def __call__(self, pooled_ND: Tensor) -> Tensor:
        """Returns [N, num_labels] float32."""
        logits: Tensor = self._score(pooled_ND.to(self._score.weight.dtype))
        return logits.float()


def _argument_names(network: Any) -> frozenset[str]:
    """Names of the inputs that a network takes."""
    parameters = inspect.signature(network.forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if takes_any and "input_ids" not in parameters:
        return frozenset({"input_ids", "attention_mask", "position_ids", "token_type_ids"})
    return frozenset(parameters)


def _identity(logits: Tensor) -> Tensor:
    return logits


def _text_config(network: Any) -> Any:
    """The config of the language model, in multimodal ones too."""
    return network.config.get_text_config()


def _agree(rows: Tensor, expected: Tensor) -> bool:
    """Whether two results are the same but for rounding."""
    if rows.shape != expected.shape:
        return False
    return bool((rows - expected).abs().max() <= _TOLERANCE * max(1.0, expected.abs().max().item()))


@contextmanager
def _in_float32(network: nn.Module) -> Iterator[None]:
    """Runs 16-bit weights in float32 for a while, so that a comparison sees errors and not rounding. Lossless."""
    reduced = [t for t in (*network.parameters(), *network.buffers()) if t.dtype in (torch.bfloat16, torch.float16)]
    dtypes = [t.dtype for t in reduced]
    for tensor in reduced:
        tensor.data = tensor.data.float()
    try:
        yield
    finally:
        for tensor, dtype in zip(reduced, dtypes, strict=True):
            tensor.data = tensor.data.to(dtype)
