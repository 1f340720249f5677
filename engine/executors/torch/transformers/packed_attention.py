"""Packed attention as an attention function of transformers.

transformers calls an attention function with q, k and v of one layer. The borders of the sequences come from the
context `packed_row`, because not every model passes keyword arguments to its attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from torch import Tensor, nn
from transformers import AttentionInterface

from penstock.kernels.attention import attention

from ..packed_batch import PackedBatch

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
