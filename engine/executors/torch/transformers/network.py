"""Calls a network of transformers with a packed batch: padded, or with all sequences in one row.

In one row, an attention function of penstock separates the sequences. transformers calls it with q, k and v of one
layer. The borders of the sequences come from the context `packed_row`, because not every model passes keyword arguments
to its attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface

from penstock.kernels.attention import attention

from ..packed_batch import PackedBatch
from .image_inputs import ImageInputs

_OUTPUTS: Final = ("logits", "embeddings", "last_hidden_state")


class Sharing(Enum):
    """Sequences that may share a padded forward without changing the results of each other.

    Attributes:
        max_length_ratio: Largest ratio of the longest to the shortest length; 0 if no sequences may share a forward.
        log_message: Explanation for the log.
    """

    LIKE = 1.25, ""
    EQUAL = 1.0, "; padding changes its results, so only sequences of equal length share a forward"
    NONE = 0.0, "; other sequences in a batch change its results, so each sequence runs alone"

    def __init__(self, max_length_ratio: float, log_message: str) -> None:
        self.max_length_ratio = max_length_ratio
        self.log_message = log_message

    def groups(self, seq_lens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yields the first and last + 1 of consecutive sequences that may share a forward."""
        first = 0
        for last in range(1, len(seq_lens) + 1):
            members = seq_lens[first : last + 1]
            if last == len(seq_lens) or max(members) > self.max_length_ratio * min(members):
                yield first, last
                first = last


class Network:
    """A network of transformers that runs packed batches.

    Attributes:
        module: The network.
        gives_logits: Whether the network pools and returns logits [N, num_labels] instead of rows [T, D].
        pad_token_id: Padding token of the config; None if it has none.
        images: Builds the arguments for images; None: the network reads texts only.
        best_sharing: Sequences that may share a padded forward at most: its arguments allow no more.
    """

    def __init__(self, module: Any, *, gives_logits: bool, images: ImageInputs | None = None) -> None:
        self.module = module
        self.images = images
        self.gives_logits = gives_logits
        self.pad_token_id: int | None = self.text_config.pad_token_id
        self._accepted = _argument_names(module) | ({"position_ids"} if images is not None else set())
        pools_at_marker = gives_logits and (module.config.is_encoder_decoder or self.pad_token_id is None)
        can_share = "attention_mask" in self._accepted and not pools_at_marker
        self.best_sharing = Sharing.LIKE if can_share else Sharing.NONE

    @property
    def text_config(self) -> Any:
        """The config of the language model, also in multimodal models."""
        return self.module.config.get_text_config()

    @property
    def language_model(self) -> Any:
        """The network without its encoder of images."""
        return self.module if self.images is None else self.module.get_decoder()

    @property
    def takes_positions(self) -> bool:
        """Whether the network accepts position ids, which packing needs."""
        return "position_ids" in self._accepted

    def run_packed(self, batch: PackedBatch, position_offset: int) -> tuple[Tensor, PackedRow]:
        """Runs all sequences in one row; returns [T, D] and the row of the attention function.

        Args:
            batch: The sequences.
            position_offset: Added to the positions; those of RoBERTa begin at pad_token_id + 1.
        """
        arguments: dict[str, Any] = {
            "input_ids": batch.input_ids[None],
            "position_ids": (batch.positions + position_offset)[None],
        }
        if batch.token_type_ids is not None:
            arguments["token_type_ids"] = batch.token_type_ids[None]
        added = {} if self.images is None else self.images.packed(batch)
        with packed_row(batch) as row:
            return self._call(arguments, added)[0], row

    def run_padded(self, batch: PackedBatch, sharing: Sharing) -> Tensor:
        """Runs groups of sequences that may share a forward, padded on the right; returns [T, D] or [N, num_labels]."""
        parts = []
        for first, last in sharing.groups(batch.seq_lens):
            lengths = batch.seq_lens[first:last]
            start = sum(batch.seq_lens[:first])
            span = slice(start, start + sum(lengths))
            ids = pad_sequence(list(batch.input_ids[span].split(lengths)), True, float(self.pad_token_id or 0))
            is_token = torch.arange(ids.shape[1], device=ids.device) < torch.tensor(lengths, device=ids.device)[:, None]
            arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": is_token.long()}
            if batch.token_type_ids is not None:
                arguments["token_type_ids"] = pad_sequence(list(batch.token_type_ids[span].split(lengths)), True)
            group_images = [image for images in batch.images[first:last] for image in images]
            output = self._call(arguments, {} if self.images is None else self.images.padded(group_images, ids))
            parts.append(output if self.gives_logits else output[is_token])
        return torch.cat(parts)

    def _call(self, arguments: dict[str, Any], added: Mapping[str, Any]) -> Tensor:
        """Calls the network; returns its logits, or else its hidden states or the vectors of its tokens.

        Args:
            arguments: Passed if the network accepts them.
            added: Passed in any case, in place of equal names in `arguments`.
        """
        accepted = self._accepted
        if "use_cache" in accepted:
            arguments["use_cache"] = False
        passed = {name: value for name, value in arguments.items() if name in accepted}
        output = self.module(**{**passed, **added}, return_dict=True)
        rows: Tensor = next(output[name] for name in _OUTPUTS if name in output)
        return rows


@contextmanager
def in_float32(network: nn.Module) -> Iterator[None]:
    """Converts 16-bit weights to float32 for a comparison without rounding errors, and restores them exactly."""
    reduced = [t for t in (*network.parameters(), *network.buffers()) if t.dtype in (torch.bfloat16, torch.float16)]
    dtypes = [t.dtype for t in reduced]
    for tensor in reduced:
        tensor.data = tensor.data.float()
    try:
        yield
    finally:
        for tensor, dtype in zip(reduced, dtypes, strict=True):
            tensor.data = tensor.data.to(dtype)


def _argument_names(network: Any) -> frozenset[str]:
    parameters = inspect.signature(network.forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if takes_any and "input_ids" not in parameters:
        return frozenset({"input_ids", "attention_mask", "position_ids", "token_type_ids"})
    return frozenset(parameters)


NAME: Final = "penstock_packed"

# Arguments that do not change the result of attention. A model that sets any other argument runs padded.
_HARMLESS: Final = frozenset(
    [
        "cache_position",
        "deterministic",
        "layer_idx",
        "output_attentions",
        "output_hidden_states",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "target_dtype",
        "use_cache",
    ]
)


class NotPackableError(Exception):
    """The attention of the model needs something that packed attention does not support."""


class PackedRow:
    """One forward with all sequences in a row.

    Attributes:
        batch: The sequences.
        num_calls: Number of calls of attention; 0 if the model does not use the interface of transformers.
        max_window: Largest attention window of a layer; 0 if there is none.
    """

    def __init__(self, batch: PackedBatch) -> None:
        self.batch = batch
        self.num_calls = 0
        self.max_window = 0

    def attend(self, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, scale: float, is_causal: bool, reach: int) -> Tensor:
        """Returns [T, H, K] for inputs [T, H, K]; a query sees `reach` tokens on each side, or all if it is 0."""
        batch = self.batch
        self.num_calls += 1
        self.max_window = max(self.max_window, reach)
        window = (reach, reach) if reach else None
        return attention(
            q_THK,
            k_THK,
            v_THK,
            batch.cu_seqlens,
            batch.seq_lens,
            max_seqlen=batch.max_seqlen,
            scale=scale,
            is_causal=is_causal,
            window=window,
        )


_current_row: ContextVar[PackedRow | None] = ContextVar("penstock_packed_row", default=None)
"""The sequences of the running forward. `packed_row` sets it. `_attention_forward` reads it: transformers calls it."""


@contextmanager
def packed_row(batch: PackedBatch) -> Iterator[PackedRow]:
    """Sets the sequences for the attention of all models that are called inside."""
    row = PackedRow(batch)
    token = _current_row.set(row)
    try:
        yield row
    finally:
        _current_row.reset(token)


def register() -> None:
    """Registers packed attention with transformers as NAME, without a mask function, so that no mask is built."""
    AttentionInterface.register(NAME, _attention_forward)


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Returns [1, R, H, K] for query [1, H, R, K], key and value [1, Hkv, R, K]; called by transformers."""
    row = _current_row.get()
    if row is None:
        raise RuntimeError("packed attention was called outside packed_row().")
    unknown = sorted(name for name, given in kwargs.items() if given is not None and name not in _HARMLESS)
    if attention_mask is not None:
        unknown.append("attention_mask")
    if unknown:
        raise NotPackableError(f"its attention uses {', '.join(unknown)}")
    if query.shape[0] != 1 or query.shape[2] != row.batch.num_tokens or key.shape[2] != query.shape[2]:
        raise NotPackableError(f"its attention has shapes {list(query.shape)} and {list(key.shape)}")
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    # NOTE: transformers includes the query in the window: with 1, a token sees only itself.
    reach = sliding_window - 1 if sliding_window is not None else 0
    if sliding_window is not None and reach < 1:
        raise NotPackableError(f"its attention has a window of {sliding_window}")
    q_THK, k_THK, v_THK = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return row.attend(q_THK, k_THK, v_THK, scale, is_causal, reach)[None], None
