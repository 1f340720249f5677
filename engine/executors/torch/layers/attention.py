"""Self-attention over packed tokens of whole sequences, and of chunks with a paged cache.

Without a cache in the batch every sequence is whole and attends to itself. With a cache, new keys and values are stored
first. Sequences that begin in this batch attend to their packed rows, the other sequences to their blocks.

DeBERTa adds terms with learned embeddings of the distance between query and key (Distances).

Shape letters: T packed tokens, N sequences, B sequences of one length, D model width, H query heads, G key heads, K
head size, C tokens before a chunk, L longest sequence, R rows of the table of distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.attention import PagedLengths, attention, attention_paged, bias_block
from penstock.kernels.backends import Backend, upload
from penstock.kernels.rotary import HeadNorm, KvDestination, rotary

from ....families.spec import AttentionSpec, DisentangledSpec, LayerSpec, LinearSpec
from ..packed_batch import BatchCache, KvCache, MaskedTokens, PackedBatch
from .linear import Linear
from .norm import LayerNorm, RmsNorm, load_norm
from .rotary import Rotation
from .weights import Fusion, Weights

RowNorm = LayerNorm | RmsNorm
_MAX_SCORES: Final = 1 << 22
"""Scores of the sequences that share a call, unless one sequence has more."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """Lengths of a batch for the layers with one window: first new sequences, then sequences with a past.

    Attributes:
        num_new_tokens: Rows of new sequences.
        new_cu_seqlens: Prefix sums of the lengths of new sequences, int32.
        new_seq_lens: Lengths of new sequences.
        new_max_seqlen: Upper bound of the lengths of new sequences.
        past_cu_seqlens: Prefix sums of the lengths of sequences with a past, from 0; None if there are none.
        past: Lengths of sequences with a past; None if there are none.
        slot_mapping: [T] int64, the cache slot of every token, -1: not stored; None if the rotation does not store.
    """

    num_new_tokens: int
    new_cu_seqlens: Tensor
    new_seq_lens: tuple[int, ...]
    new_max_seqlen: int
    past_cu_seqlens: Tensor | None
    past: PagedLengths | None
    slot_mapping: Tensor | None = None


class Attention:
    """softmax(scale * q k^T + bias) v per head, without the output projection.

    Args:
        qkv: Projection to the heads of q, k and v, [T, (H + 2 * G) * K].
        window: (left, right) tokens that a query attends to beside itself; None: no window.
        kv_index: Index of this layer among the attention layers, and in the cache.
        head_norm: Norm of every head of q and k before the rotation, weight [H + G, K]; None: no norm.
        row_norms: Norms of all heads of q and of k together, [H * K] and [G * K]; None: no norms.
        terms: Terms of the scores with embeddings of distances; None: no such terms. Needs H = G and no window.
        fusion: With FUSED, one kernel normalises, rotates and stores.
    """

    def __init__(
        self,
        qkv: Linear,
        spec: AttentionSpec,
        window: tuple[int, int] | None = None,
        *,
        kv_index: int = 0,
        head_norm: HeadNorm | None = None,
        row_norms: tuple[RowNorm, RowNorm] | None = None,
        terms: DistanceTerms | None = None,
        fusion: Fusion = Fusion.NONE,
    ) -> None:
        self._is_fused = fusion is Fusion.FUSED
        self._backend: Backend = "triton" if self._is_fused else "torch"
        self._head_norm = head_norm
        self._row_norms = row_norms
        self._terms = terms
        self.qkv = qkv
        self.spec = spec
        self.window = window
        self.kv_index = kv_index

    @classmethod
    def load(
        cls,
        weights: Weights,
        qkv: LinearSpec,
        spec: AttentionSpec,
        window: tuple[int, int] | None = None,
        *,
        kv_index: int = 0,
        layer: LayerSpec | None = None,
        distances: Distances | None = None,
    ) -> Self:
        """Reads the projection, the norms of heads of `layer`, and the projections of `distances`."""
        terms = None if distances is None else DistanceTerms(weights, distances, spec.num_heads, spec.scale)
        head_norm, row_norms = None, None
        if layer is None or layer.query_norm is None or layer.key_norm is None:
            pass
        elif layer.query_norm.is_rms and layer.query_norm.size == spec.head_size:
            parts = [
                (weights.tensor(f"{norm.name}.weight", norm.size, dtype=torch.float32) + norm.offset).expand(count, -1)
                for norm, count in ((layer.query_norm, spec.num_heads), (layer.key_norm, spec.num_kv_heads))
            ]
            head_norm = HeadNorm(torch.cat(parts), layer.query_norm.eps)
        else:
            row_norms = load_norm(weights, layer.query_norm), load_norm(weights, layer.key_norm)
        product = Linear.load(weights, qkv)
        return cls(
            product,
            spec,
            window,
            kv_index=kv_index,
            head_norm=head_norm,
            row_norms=row_norms,
            terms=terms,
            fusion=weights.fusion,
        )

    def metadata(self, batch: PackedBatch) -> AttentionMetadata:
        """Returns the metadata of a batch, for all layers with the same window."""
        cache = batch.cache
        num_new_seqs = len(batch.seq_lens) if cache is None else cache.num_new_seqs
        seq_lens, cu_seqlens = batch.seq_lens, batch.cu_seqlens
        new_seq_lens = seq_lens[:num_new_seqs]
        has_past = cache is not None and num_new_seqs < len(seq_lens)
        return AttentionMetadata(
            num_new_tokens=batch.num_tokens if cache is None else cache.num_new_tokens,
            new_cu_seqlens=cu_seqlens[: num_new_seqs + 1],
            new_seq_lens=new_seq_lens,
            new_max_seqlen=batch.max_seqlen if cache is None else max(new_seq_lens, default=0),
            past_cu_seqlens=cu_seqlens[num_new_seqs:] - cu_seqlens[num_new_seqs] if has_past else None,
            past=PagedLengths.of(seq_lens[num_new_seqs:], cache.continued_context_lens)
            if cache is not None and has_past
            else None,
            slot_mapping=_slots_of_tokens(batch) if self._is_fused else None,
        )

    def __call__(
        self,
        hidden_TD: Tensor,
        batch: PackedBatch,
        metadata: AttentionMetadata,
        rotation: Rotation | None = None,
        relative_bias: Tensor | None = None,
    ) -> Tensor:
        """Returns [T, H * K]. Writes to the cache of the batch, if it has one.

        Args:
            hidden_TD: [T, D].
            batch: The sequences.
            metadata: The result of `metadata` of a layer with the same window.
            rotation: Rotary position embedding of q and k; None: no rotation.
            relative_bias: [H, 2 * L + 1], added by distance to the scaled scores of sequences without a past.
        """
        cache = batch.cache
        store = None
        if rotation is not None and metadata.slot_mapping is not None and cache is not None and cache.kv is not None:
            store = KvDestination(cache.kv.k[self.kv_index], cache.kv.v[self.kv_index], metadata.slot_mapping)
        q_THK, k_TGK, v_TGK = self._project(hidden_TD, batch.positions, rotation, store)
        parts = []
        if cache is not None and store is None:
            self._store(k_TGK, v_TGK, cache)
        if metadata.new_seq_lens:
            new = slice(metadata.num_new_tokens)
            parts.append(self._attend_new(q_THK[new], k_TGK[new], v_TGK[new], metadata, relative_bias))
        if cache is not None and metadata.past is not None and metadata.past_cu_seqlens is not None:
            kv, block_tables = _paged(cache)
            parts.append(
                attention_paged(
                    q_THK[metadata.num_new_tokens :],
                    kv.k[self.kv_index],
                    kv.v[self.kv_index],
                    block_tables,
                    metadata.past_cu_seqlens,
                    metadata.past.seq_lens,
                    metadata.past.context_lens,
                    lengths=metadata.past,
                    context_lens_on_device=cache.continued_context_lens_on_device,
                    scale=self.spec.scale,
                    window=self.window,
                    softcap=self.spec.softcap,
                )
            )
        attended_THK = parts[0] if len(parts) == 1 else torch.cat(parts)
        for masked in batch.masked:
            self._attend_to_visible(q_THK, k_TGK, v_TGK, attended_THK, masked, relative_bias)
        return attended_THK.flatten(1)

    def pooling_weights(
        self,
        hidden_TD: Tensor,
        batch: PackedBatch,
        rotation: Rotation | None = None,
        relative_bias: Tensor | None = None,
    ) -> Tensor:
        """Returns ModelOutput.attention_weights: attention of one token of each sequence to its tokens, per head.

        The token is the last one in a causal layer, otherwise the first. Call the layer first: in a batch of chunks the
        keys before a chunk are read from the cache. Takes the arguments of `__call__` except the metadata. Computes q
        and k again, because only ATTENTION pooling needs the weights, and only those of the last layer.
        """
        spec = self.spec
        q_THK, k_TGK, _ = self._project(hidden_TD, batch.positions, rotation)
        if batch.cache is None:
            lengths_N = batch.cu_seqlens.diff().long()
            positions_T = batch.positions
        else:
            k_TGK, lengths_N, positions_T = self._keys_of_chunks(k_TGK, batch, batch.cache)
        num_keys = len(k_TGK)
        seq_of_T = torch.repeat_interleave(lengths_N, output_size=num_keys)
        ends_N = batch.cu_seqlens[1:].long() - 1 if spec.is_causal else batch.cu_seqlens[:-1].long()
        q_TGUK = q_THK[ends_N][seq_of_T].unflatten(1, (spec.num_kv_heads, -1)).float()
        scores_TH = (q_TGUK * k_TGK[:, :, None].float()).sum(-1).flatten(1) * spec.scale
        if spec.softcap is not None:
            scores_TH = torch.tanh(scores_TH / spec.softcap) * spec.softcap
        if self._terms is not None:
            parts = zip(q_THK.split(batch.seq_lens), k_TGK.split(batch.seq_lens), strict=True)
            terms = [self._terms(*(x.transpose(0, 1)[None] for x in part))[0, :, 0].t() for part in parts]
            scores_TH += torch.cat(terms).float()
        if relative_bias is not None:
            scores_TH += relative_bias[:, relative_bias.shape[1] // 2 :].float().t()[positions_T]
        if self.window is not None:
            reach = self.window[0] if spec.is_causal else self.window[1]
            distance_T = lengths_N[seq_of_T] - 1 - positions_T if spec.is_causal else positions_T
            if reach >= 0:
                scores_TH.masked_fill_((distance_T > reach)[:, None], float("-inf"))
        return _segment_softmax(scores_TH, seq_of_T, len(lengths_N))

    def _keys_of_chunks(self, k_TGK: Tensor, batch: PackedBatch, cache: BatchCache) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the keys of all tokens up to the end of each chunk, their number [N], and their positions."""
        keys, lengths, end = [], [], 0
        for n, length in enumerate(batch.seq_lens):
            start, end = end, end + length
            part_LGK = k_TGK[start:end]
            if n >= cache.num_new_seqs:
                kv, block_tables = _paged(cache)
                table = block_tables[n - cache.num_new_seqs]
                num_keys = cache.context_lens[n] + length
                num_blocks = -(-num_keys // kv.block_size)
                part_LGK = kv.k[self.kv_index].index_select(0, table[:num_blocks]).flatten(0, 1)[:num_keys]
            keys.append(part_LGK)
            lengths.append(len(part_LGK))
        device = k_TGK.device
        positions = [torch.arange(length, device=device) for length in lengths]
        return torch.cat(keys), upload(torch.tensor(lengths), device), torch.cat(positions)

    def _attend_new(
        self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, metadata: AttentionMetadata, relative_bias: Tensor | None
    ) -> Tensor:
        if self._terms is not None:
            return self._attend_by_distance(q_THK, k_TGK, v_TGK, metadata.new_seq_lens, self._terms)
        return attention(
            q_THK,
            k_TGK,
            v_TGK,
            metadata.new_cu_seqlens,
            metadata.new_seq_lens,
            max_seqlen=metadata.new_max_seqlen,
            scale=self.spec.scale,
            is_causal=self.spec.is_causal,
            window=self.window,
            softcap=self.spec.softcap,
            relative_bias=relative_bias,
        )

    def _attend_by_distance(
        self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, seq_lens: Sequence[int], terms: DistanceTerms
    ) -> Tensor:
        """Attention with terms of distances. Neighbours of equal length share a call."""
        attended_THK = torch.empty_like(q_THK, memory_format=torch.contiguous_format)
        start = 0
        for length, run in groupby(seq_lens):
            max_count = max(1, _MAX_SCORES // (self.spec.num_heads * length**2))
            rest = sum(1 for _ in run)
            while rest:
                count = min(rest, max_count)
                rows = slice(start, start + count * length)
                q, k, v = (x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in (q_THK, k_TGK, v_TGK))
                block = F.scaled_dot_product_attention(q, k, v, attn_mask=terms(q, k), scale=self.spec.scale)
                attended_THK[rows] = block.transpose(1, 2).flatten(0, 1)
                start = rows.stop
                rest -= count
        return attended_THK

    def _project(
        self, hidden_TD: Tensor, positions_T: Tensor, rotation: Rotation | None, store: KvDestination | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q [T, H, K], k and v [T, G, K]. With a rotation, also stores k and v in the slots of `store`."""
        spec = self.spec
        num_qk = spec.num_heads + spec.num_kv_heads
        qkv_TC = self.qkv(hidden_TD)
        if self._row_norms is not None:
            sizes = [heads * spec.head_size for heads in (spec.num_heads, spec.num_kv_heads)]
            for norm, part_TC in zip(self._row_norms, qkv_TC.split([*sizes, sizes[1]], dim=1), strict=False):
                part_TC.copy_(norm(part_TC))
        qkv_TUK = qkv_TC.unflatten(1, (-1, spec.head_size))
        if rotation is not None:
            rotary(qkv_TUK, *rotation, num_qk, norm=self._head_norm, store=store, backend=self._backend)
        else:
            assert self._head_norm is None, "norms of heads come with rotary positions"
        if spec.query_growth is not None:
            growth, length = spec.query_growth
            factor_T = 1 + growth * torch.log1p(positions_T // length)
            qkv_TUK[:, : spec.num_heads] *= factor_T[:, None, None].to(qkv_TUK.dtype)
        return qkv_TUK[:, : spec.num_heads], qkv_TUK[:, spec.num_heads : num_qk], qkv_TUK[:, num_qk:]

    def _store(self, k_TGK: Tensor, v_TGK: Tensor, cache: BatchCache) -> None:
        """Stores the keys and values of later chunks' past in the cache."""
        slots_S = cache.store_slots
        if cache.kv is None or slots_S is None or not len(slots_S):
            return
        for x_TGK, cache_PBGK in ((k_TGK, cache.kv.k[self.kv_index]), (v_TGK, cache.kv.v[self.kv_index])):
            x_SGK = x_TGK if cache.store_rows is None else x_TGK.index_select(0, cache.store_rows)
            cache_PBGK.view(-1, *cache_PBGK.shape[2:]).index_copy_(0, slots_S, x_SGK)

    def _attend_to_visible(
        self,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGK: Tensor,
        attended_THK: Tensor,
        masked: MaskedTokens,
        relative_bias: Tensor | None,
    ) -> None:
        """Recomputes the rows of `masked` in `attended_THK` from the visible keys and values.

        Uses a mask without packing, because the sequences are few and short.
        """
        num_tokens = masked.rows.shape[1]
        mask = masked.is_visible[:, None, None, :].expand(-1, 1, num_tokens, -1)
        if self.window is not None:
            positions = torch.arange(num_tokens, device=q_THK.device)
            ahead_LL = positions[None, :] - positions[:, None]
            left, right = (reach if reach >= 0 else num_tokens for reach in self.window)
            mask = mask & (ahead_LL >= -left) & (ahead_LL <= right)
        if relative_bias is not None:
            bias_HLL = bias_block(relative_bias, range(num_tokens), range(num_tokens)).to(q_THK.dtype)
            mask = torch.where(mask, bias_HLL, float("-inf"))
        q_BHLK, k_BGLK, v_BGLK = (x[masked.rows].transpose(1, 2) for x in (q_THK, k_TGK, v_TGK))
        if self._terms is not None:
            mask = torch.where(mask, self._terms(q_BHLK, k_BGLK), float("-inf"))
        attended_BHLK = F.scaled_dot_product_attention(
            q_BHLK, k_BGLK, v_BGLK, attn_mask=mask, scale=self.spec.scale, enable_gqa=q_BHLK.shape[1] != k_BGLK.shape[1]
        )
        attended_THK[masked.rows.flatten()] = attended_BHLK.transpose(1, 2).flatten(0, 1)


def _segment_softmax(scores_TH: Tensor, segment_of_T: Tensor, num_segments: int) -> Tensor:
    index_TH = segment_of_T[:, None].expand_as(scores_TH)
    shape = (num_segments, scores_TH.shape[1])
    highest_NH = scores_TH.new_full(shape, float("-inf")).scatter_reduce_(0, index_TH, scores_TH, "amax")
    exp_TH = (scores_TH - highest_NH[segment_of_T]).exp_()
    total_NH = scores_TH.new_zeros(shape).index_add_(0, segment_of_T, exp_TH)
    return exp_TH / total_NH[segment_of_T]


def _slots_of_tokens(batch: PackedBatch) -> Tensor | None:
    """Returns [T] int64, the slot of every token, -1 for tokens that are not stored; None without a cache."""
    cache = batch.cache
    if cache is None or cache.store_slots is None or not len(cache.store_slots):
        return None
    if cache.store_rows is None:
        return cache.store_slots
    return cache.store_slots.new_full((batch.num_tokens,), -1).index_copy_(0, cache.store_rows, cache.store_slots)


def _paged(cache: BatchCache) -> tuple[KvCache, Tensor]:
    """Returns the cache and the block tables of a batch with a past."""
    if cache.kv is None or cache.block_tables is None:
        raise ValueError("a batch of chunks with a past needs keys, values and block tables")
    return cache.kv, cache.block_tables


class Distances:
    """The table of distances, which all layers share.

    Attributes:
        rows_RD: [R, D], the embeddings after their norm.
    """

    def __init__(self, weights: Weights, spec: DisentangledSpec, max_len: int) -> None:
        self.spec = spec
        rows_RD = weights.tensor(spec.distances, spec.num_distances, weights_width(spec))
        self.rows_RD = rows_RD if spec.norm is None else load_norm(weights, spec.norm)(rows_RD)
        self._max_len = max_len
        row_of = torch.from_numpy(spec.row_of(np.arange(max_len - 1, -max_len, -1)))
        self._row_of = row_of.to(weights.device)

    def rows(self, length: int) -> Tensor:
        """Returns [L, L] int64, the row of the distance of each query and key."""
        nearest = self._row_of[self._max_len - length : self._max_len + length - 1]
        return nearest.unfold(0, length, 1).flip(0)


def weights_width(spec: DisentangledSpec) -> int:
    """Returns D, the width of the distance embeddings."""
    projection = spec.key or spec.query
    assert projection is not None
    return projection.in_features


class DistanceTerms:
    """The terms of the attention scores of one layer that depend on distances between tokens."""

    def __init__(self, weights: Weights, distances: Distances, num_heads: int, scale: float) -> None:
        self._distances = distances
        self._keys_HKR, self._queries_HKR = (
            None
            if spec is None
            else Linear.load(weights, spec)(distances.rows_RD).unflatten(1, (num_heads, -1)).permute(1, 2, 0) * scale
            for spec in (distances.spec.key, distances.spec.query)
        )

    def __call__(self, q_BHLK: Tensor, k_BHLK: Tensor) -> Tensor:
        """Returns the scaled terms [B, H, L, L] of sequences of one length, in the type of q."""
        rows_LL = self._distances.rows(q_BHLK.shape[2]).expand(*q_BHLK.shape[:2], -1, -1)
        terms: list[Tensor] = []
        if self._keys_HKR is not None:
            terms.append((q_BHLK @ self._keys_HKR).gather(3, rows_LL))
        if self._queries_HKR is not None:
            # [B, H, key, R]. A key and a query use the row of the query and the key, so `rows_LL` is transposed.
            terms.append((k_BHLK @ self._queries_HKR).gather(3, rows_LL.mT).mT)
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]
