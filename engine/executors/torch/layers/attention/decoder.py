"""Self-attention of decoders: grouped queries, local windows, and a past that lies in a paged cache.

Without a cache in the batch every sequence is whole and attends to itself. With one, what is new is stored first; the
sequences that begin in this batch still attend to their packed rows alone, the others to their blocks.

Shape letters: T packed tokens in R rows, D model width, H query heads, G key heads, K head size, C tokens before a
chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from penstock.kernels.attention import PagedLengths, attention, attention_paged
from penstock.kernels.rotary import HeadNorm, KvSlots, rotary

from .....scheduling import KvLayerSpec
from ...packed_batch import BatchCache, KvCache
from ..fusion import Fusion
from ..linear import Linear
from ..norm import RmsNorm
from ..rows import Rows
from ..weights import Weights
from .rotary import Rotation

_NAMES: Final = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The shape of one attention layer.

    Attributes:
        num_heads: H.
        num_kv_heads: G; query head h reads key head h // (H / G).
        head_size: K.
        scale: Factor of the scores.
        is_causal: Whether a token sees only itself and earlier ones.
        window: (left, right) tokens that a query sees beside its own, the right one bounded by `is_causal` too; None
            sees all.
        softcap: c: scaled scores s become c * tanh(s / c).
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    is_causal: bool = True
    window: tuple[int, int] | None = None
    softcap: float | None = None

    @property
    def kv_layer(self) -> KvLayerSpec:
        """What a cache keeps of every token."""
        return KvLayerSpec(self.num_kv_heads, self.head_size)


@dataclass(frozen=True, slots=True, eq=False)
class DecoderPlan:
    """How the layers of one window walk a batch: first the sequences that begin in it, then those with a past.

    Attributes:
        num_new_tokens: Rows of the former.
        new_cu_seqlens: Prefix sums of their lengths, int32.
        new_seq_lens: Their lengths.
        past_cu_seqlens: Prefix sums of the lengths of the latter, from 0; None where there are none.
        past: Their lengths; None where there are none.
        slots: [T] int64, the slot of the cache for every token, -1 for none; None where the rotation does not store.
    """

    num_new_tokens: int
    new_cu_seqlens: Tensor
    new_seq_lens: tuple[int, ...]
    past_cu_seqlens: Tensor | None
    past: PagedLengths | None
    slots: Tensor | None = None


class DecoderAttention:
    """softmax(scale * q k^T) v per head; the output projection is the caller's.

    Args:
        qkv: Product that gives the heads of q, k and v side by side, [T, (H + 2 * G) * K].
        spec: The shape.
        kv_index: Number of this layer among the attention layers, which is its number in the cache.
        qk_norm: Norm of every head of q and k before the rotation, weight [H + G, K]; None has none.
        fusion: With FUSED, kernels/rotary norms, turns and stores at once.
    """

    def __init__(
        self,
        qkv: Linear,
        spec: AttentionSpec,
        kv_index: int,
        *,
        qk_norm: RmsNorm | None = None,
        fusion: Fusion = Fusion.NONE,
    ) -> None:
        self._is_fused = fusion is Fusion.FUSED
        self._head_norm = None if qk_norm is None else HeadNorm(qk_norm.norm.weight, qk_norm.norm.eps)
        self.qkv = qkv
        self.spec = spec
        self.kv_index = kv_index
        self.qk_norm = qk_norm

    @classmethod
    def load(
        cls,
        weights: Weights,
        size: int,
        spec: AttentionSpec,
        kv_index: int,
        *,
        names: tuple[str, ...] = _NAMES,
        bias: bool = False,
        qk_norm: RmsNorm | None = None,
    ) -> DecoderAttention:
        """Reads the projections and makes them one product.

        Args:
            weights: View that holds them.
            size: D.
            spec: As for the class.
            kv_index: As for the class.
            names: Those of q, k and v, or of one map that gives all three.
            bias: Whether they have one.
            qk_norm: As for the class.
        """
        widths = [spec.num_heads * spec.head_size, *[spec.num_kv_heads * spec.head_size] * 2]
        if len(names) == 1:
            widths = [sum(widths)]
        parts = list(zip(names, widths, strict=True))
        weight = torch.cat([weights.tensor(f"{name}.weight", width, size) for name, width in parts])
        bias_O = torch.cat([weights.tensor(f"{name}.bias", width) for name, width in parts]) if bias else None
        return cls(Linear(weight, bias_O), spec, kv_index, qk_norm=qk_norm, fusion=weights.fusion)

    def plan(self, rows: Rows) -> DecoderPlan:
        """Returns how the kernels walk this batch; layers of one window share it."""
        batch = rows.batch
        num_new_seqs = len(batch.seq_lens) if batch.cache is None else batch.cache.num_new_seqs
        seq_lens, cu_seqlens = batch.seq_lens, batch.cu_seqlens
        has_past = batch.cache is not None and num_new_seqs < len(seq_lens)
        return DecoderPlan(
            num_new_tokens=batch.cache.num_new_tokens if batch.cache is not None else batch.num_tokens,
            new_cu_seqlens=cu_seqlens[: num_new_seqs + 1],
            new_seq_lens=seq_lens[:num_new_seqs],
            past_cu_seqlens=cu_seqlens[num_new_seqs:] - cu_seqlens[num_new_seqs] if has_past else None,
            past=PagedLengths.of(seq_lens[num_new_seqs:], batch.cache.past_lens)
            if batch.cache is not None and has_past
            else None,
            slots=_slots_of_tokens(rows) if self._is_fused else None,
        )

    def __call__(self, hidden_RD: Tensor, rows: Rows, plan: DecoderPlan, rotation: Rotation | None = None) -> Tensor:
        """Returns [R, H * K]; writes the cache of the batch, where it has one.

        Args:
            hidden_RD: [R, D].
            rows: Which rows are tokens, and where sequences begin.
            plan: What `plan` of a layer with the same shape gave.
            rotation: Rotary position embedding of q and k; None has none.
        """
        cache = rows.batch.cache
        store = None
        if rotation is not None and plan.slots is not None and cache is not None and cache.kv is not None:
            store = KvSlots(cache.kv.k[self.kv_index], cache.kv.v[self.kv_index], plan.slots)
        q_THK, k_TGK, v_TGK = self._project(hidden_RD, rows, rotation, store)
        parts = []
        if cache is not None and store is None:
            self._store(k_TGK, v_TGK, cache)
        if plan.new_seq_lens:
            new = slice(plan.num_new_tokens)
            parts.append(self._attend_new(q_THK[new], k_TGK[new], v_TGK[new], plan))
        if cache is not None and plan.past is not None and plan.past_cu_seqlens is not None:
            kv, block_tables = _paged(cache)
            parts.append(
                attention_paged(
                    q_THK[plan.num_new_tokens :],
                    kv.k[self.kv_index],
                    kv.v[self.kv_index],
                    block_tables,
                    plan.past_cu_seqlens,
                    plan.past.seq_lens,
                    plan.past.context_lens,
                    lengths=plan.past,
                    context_lens_on_device=cache.past_lens_on_device,
                    scale=self.spec.scale,
                    window=self.spec.window,
                    softcap=self.spec.softcap,
                )
            )
        attended_THK = parts[0] if len(parts) == 1 else torch.cat(parts)
        return rows.pad(attended_THK.flatten(1))

    def end_weights(self, hidden_RD: Tensor, rows: Rows, rotation: Rotation | None = None) -> Tensor:
        """Returns how much one token of each sequence attends to its tokens, per head: ModelOutput.attention_weights.

        It is the last token of a causal layer and the first of another. In a batch of chunks the keys before a chunk
        come from the cache, so the call of the layer comes first. Projects q and k anew: only ATTENTION pooling asks
        for it, and only of the last layer.
        """
        batch, cache = rows.batch, rows.batch.cache
        q_THK, k_TGK, _ = self._project(hidden_RD, rows, rotation)
        num_new_seqs = len(batch.seq_lens) if cache is None else cache.num_new_seqs
        weights = []
        end = 0
        for n, length in enumerate(batch.seq_lens):
            start, end = end, end + length
            keys_LGK = k_TGK[start:end]
            if cache is not None and n >= num_new_seqs:
                kv, block_tables = _paged(cache)
                keys_LGK = _gather(kv.k[self.kv_index], block_tables[n - num_new_seqs], cache.context_lens[n] + length)
            weights.append(self._weights(q_THK[end - 1 if self.spec.is_causal else start], keys_LGK))
        return torch.cat(weights)

    def _attend_new(self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, plan: DecoderPlan) -> Tensor:
        """Attention of the sequences that begin in this batch, over their own rows."""
        return attention(
            q_THK,
            k_TGK,
            v_TGK,
            plan.new_cu_seqlens,
            plan.new_seq_lens,
            max_seqlen=max(plan.new_seq_lens),
            scale=self.spec.scale,
            is_causal=self.spec.is_causal,
            window=self.spec.window,
            softcap=self.spec.softcap,
        )

    def _project(
        self, hidden_RD: Tensor, rows: Rows, rotation: Rotation | None, store: KvSlots | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q [T, H, K], k and v [T, G, K]; with a rotation, k and v are in the slots of `store` too."""
        spec = self.spec
        num_qk = spec.num_heads + spec.num_kv_heads
        qkv_TUK = rows.trim(self.qkv(hidden_RD)).unflatten(1, (-1, spec.head_size))
        qk_TUK, v_TGK = qkv_TUK[:, :num_qk], qkv_TUK[:, num_qk:]
        if rotation is not None and self._is_fused:
            rotary(qkv_TUK, *rotation.angles, num_qk, norm=self._head_norm, store=store, backend="triton")
            return qk_TUK[:, : spec.num_heads], qk_TUK[:, spec.num_heads :], v_TGK
        if self.qk_norm is not None:
            qk_TUK = self.qk_norm(qk_TUK)
        if rotation is not None:
            rotation.apply_(qk_TUK[:, None])
        return qk_TUK[:, : spec.num_heads], qk_TUK[:, spec.num_heads :], v_TGK

    def _store(self, k_TGK: Tensor, v_TGK: Tensor, cache: BatchCache) -> None:
        """Writes the keys and values that later chunks read into their slots of the cache."""
        slots_S = cache.store_slots
        if cache.kv is None or slots_S is None or not len(slots_S):
            return
        for x_TGK, cache_PBGK in ((k_TGK, cache.kv.k[self.kv_index]), (v_TGK, cache.kv.v[self.kv_index])):
            x_SGK = x_TGK if cache.store_rows is None else x_TGK.index_select(0, cache.store_rows)
            cache_PBGK.view(-1, *cache_PBGK.shape[2:]).index_copy_(0, slots_S, x_SGK)

    def _weights(self, query_HK: Tensor, keys_LGK: Tensor) -> Tensor:
        """Returns [L, H] float32, the attention of the last (or first) of L tokens."""
        spec, length = self.spec, len(keys_LGK)
        query_GUK = query_HK.float().unflatten(0, (spec.num_kv_heads, -1)) * spec.scale
        scores_LH = torch.einsum("guk,lgk->lgu", query_GUK, keys_LGK.float()).flatten(1)
        if spec.softcap is not None:
            scores_LH = torch.tanh(scores_LH / spec.softcap) * spec.softcap
        if spec.window is not None:
            left, right = spec.window
            if spec.is_causal and 0 <= left < length - 1:
                scores_LH[: length - 1 - left] = float("-inf")
            elif not spec.is_causal and 0 <= right < length - 1:
                scores_LH[right + 1 :] = float("-inf")
        return scores_LH.softmax(0)


def _slots_of_tokens(rows: Rows) -> Tensor | None:
    """Returns [T] int64, the slot of every token, -1 for those that nothing will look at; None where there are none."""
    cache = rows.batch.cache
    if cache is None or cache.store_slots is None or not len(cache.store_slots):
        return None
    if cache.store_rows is None:
        return cache.store_slots
    return cache.store_slots.new_full((rows.num_tokens,), -1).index_copy_(0, cache.store_rows, cache.store_slots)


def _paged(cache: BatchCache) -> tuple[KvCache, Tensor]:
    """Returns where the past of a batch lies."""
    if cache.kv is None or cache.block_tables is None:
        raise ValueError("a batch of chunks with a past must bring its keys, values and block tables")
    return cache.kv, cache.block_tables


def _gather(cache_PBGK: Tensor, block_table: Tensor, length: int) -> Tensor:
    """Returns the first `length` rows [L, G, K] of one sequence."""
    num_blocks = -(-length // cache_PBGK.shape[1])
    return cache_PBGK.index_select(0, block_table[:num_blocks]).flatten(0, 1)[:length]
