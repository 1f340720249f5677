"""The packed batch, and an encoder or decoder with its head on the C library: packed arrays in, arrays out.

Shape letters: T packed tokens, N sequences, D model width, H heads, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.cpu import (
    AdapterWeights,
    BatchBlocks,
    CpuEncoder,
    CpuForward,
    CpuLibrary,
    EncoderInput,
    Format,
    OutputRows,
)

from ...checkpoint.views import ArrayWeights, Floats
from ...families.registry import find_family
from ...families.spec import EmbeddingSpec, ModelSpec
from ...protocol.errors import UnsupportedTaskError
from ...protocol.images import ImagePatches
from ...protocol.messages import TokenizedInput
from ...protocol.model_info import ModelInfo, ModelKind
from ...protocol.multi_vector import SparseKind
from .array_head import ArrayHead
from .read_weights import (
    has_kernels,
    read_attention_pool,
    read_encoder,
    read_head,
    read_patches,
    read_vocabulary_head,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedArrays:
    """T packed tokens of N sequences.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, position of each token in its whole sequence, from 0.
        token_type_ids: [T] int64; None if all are 0.
        cu_seqlens: [N+1] int32, prefix sums of the lengths.
        seq_lens: Rows of each sequence.
        skip_tokens: [N] int32, tokens at the start of each sequence that pooling leaves out; None: no tokens.
        num_masked: [N] int32, tokens at the end of each sequence that no token attends to; None: no tokens.
        adapters: [N] int32, number of each sequence's adapter, -1: no adapter; None: no sequence has one.
        kv_blocks: Blocks of keys and values; None if all sequences are whole and nothing is stored.
        images: The images of the sequences, in order; None: there are none.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    token_type_ids: NDArray[np.int64] | None
    cu_seqlens: NDArray[np.int32]
    seq_lens: tuple[int, ...]
    skip_tokens: NDArray[np.int32] | None = None
    num_masked: NDArray[np.int32] | None = None
    adapters: NDArray[np.int32] | None = None
    kv_blocks: BatchBlocks | None = None
    images: Sequence[ImagePatches] | None = None

    @classmethod
    def build(
        cls,
        inputs: Sequence[TokenizedInput],
        starts: Sequence[int] | None = None,
        kv_blocks: BatchBlocks | None = None,
        adapters: NDArray[np.int32] | None = None,
    ) -> PackedArrays:
        """Packs `inputs` in their order.

        Args:
            inputs: At least one. Whole sequences or chunks, not empty.
            starts: Position of each chunk in its sequence; None: all begin at 0.
            kv_blocks: Blocks of keys and values; None if all sequences are whole and nothing is stored.
            adapters: [N] int32, number of each sequence's adapter, -1: no adapter; None: no sequence has one.
        """
        seq_lens = tuple(map(len, inputs))
        lengths = np.array(seq_lens, np.int32)
        cu_seqlens = np.zeros(len(inputs) + 1, np.int32)
        lengths.cumsum(out=cu_seqlens[1:])
        positions = np.arange(cu_seqlens[-1], dtype=np.int64)
        if len(inputs) > 1:
            positions -= cu_seqlens[:-1].repeat(lengths)
        if starts is not None:
            positions += np.repeat(np.asarray(starts, np.int64), lengths)
        types = skips = num_masked = None
        if any(i.type_boundary for i in inputs):
            boundaries = np.array([i.type_boundary for i in inputs], np.int64)
            never = np.iinfo(np.int64).max
            types = (positions >= np.repeat(np.where(boundaries > 0, boundaries, never), lengths)).astype(np.int64)
        if any(i.num_skipped_tokens for i in inputs):
            skips = np.array([i.num_skipped_tokens for i in inputs], np.int32)
        if any(i.num_masked for i in inputs):
            num_masked = np.array([i.num_masked for i in inputs], np.int32)
        return cls(
            token_ids=np.concatenate([i.token_ids for i in inputs], dtype=np.int64),
            positions=positions,
            token_type_ids=types,
            cu_seqlens=cu_seqlens,
            seq_lens=seq_lens,
            skip_tokens=skips,
            num_masked=num_masked,
            adapters=adapters,
            kv_blocks=kv_blocks,
            images=[image for i in inputs for image in i.images] or None,
        )

    @property
    def num_tokens(self) -> int:
        """T, the number of packed tokens."""
        return len(self.token_ids)

    def with_first_tokens(self) -> PackedArrays:
        """Returns the batch after a step that pools each sequence to one row."""
        num_seqs = len(self.seq_lens)
        firsts = self.cu_seqlens[:-1]
        return replace(
            self,
            token_ids=self.token_ids[firsts],
            positions=self.positions[firsts],
            cu_seqlens=np.arange(num_seqs + 1, dtype=np.int32),
            seq_lens=(1,) * num_seqs,
        )


def read_spec(info: ModelInfo) -> ModelSpec | None:
    """Returns the spec of a model that the C library can run; None for other models.

    Raises:
        ModelLoadError: The model belongs to no family, or a value of its config.json is invalid.
    """
    if not info.packed or info.device != "cpu" or info.dtype == "float16":
        return None
    family = find_family(info.architecture, info.model_type, info.config)
    spec = family.read(info)
    return spec if has_kernels(spec, info) else None


class ProductFormats(NamedTuple):
    """Number formats of the C library for one model.

    Attributes:
        products: Format of the products with weights.
        attention: Format of the products without an INT8 form, those of attention and of patches: DOT or F32.
    """

    products: Format
    attention: Format

    @classmethod
    def of(cls, info: ModelInfo) -> ProductFormats:
        """Returns the formats of a model. int8 models with bfloat16 arithmetic also use DOT for attention."""
        if info.dtype == "float32":
            return cls(Format.F32, Format.F32)
        rounds = info.arithmetic == "bfloat16"
        attention = Format.DOT if rounds else Format.F32
        if info.dtype == "int8":
            return cls(Format.INT8, attention)
        return cls(Format.DOT if rounds else Format.BF16, attention)


class ArrayOutput(NamedTuple):
    """Output of one forward.

    Attributes:
        hidden_states: [T, D] float32: the last layer's rows.
        attention_weights: [T, H] float32: attention of the first token of each sequence to each of its tokens in the
            last layer; None if it was not requested.
        logits: None: the pooler calls the head.
    """

    hidden_states: Floats
    attention_weights: Floats | None
    logits: Floats | None = None


class ArrayEncoder:
    """An encoder or decoder with its head. Called by one thread; its forwards may overlap.

    Args:
        spec: Spec of the model. `has_kernels` must be True for it.
        weights: View of the whole checkpoint. Its files may be closed afterwards.

    Attributes:
        vocabulary_head: Maps hidden states [R, D] to vocabulary logits [R, V]; None unless ModelInfo.sparse needs it.
        cache_spec: Keys and values of the model; None if sequences cannot run in chunks.
        kv_itemsize: Bytes of a number in the KV blocks: 4 for float32, 2 for bfloat16.
        has_layers: Whether there are layers; False for static embeddings.
        attention_pool: Pools the rows of each sequence to one row; None in a model without this step.

    Raises:
        WeightError: A tensor is missing, has another shape, or contains NaN or inf.
        UnsupportedModelError: An option of the model is not known.
    """

    def __init__(
        self,
        info: ModelInfo,
        spec: ModelSpec,
        weights: ArrayWeights,
        library: CpuLibrary,
        adapters: Sequence[AdapterWeights] = (),
    ) -> None:
        self.library = library
        self.hidden_size = spec.hidden_size
        self.cache_spec = spec.cache_spec
        self._embedding = spec.embedding
        formats = ProductFormats.of(info)
        self._encoder = CpuEncoder(
            library, read_encoder(spec, info, weights, adapters), formats.products, attention_format=formats.attention
        )
        steps = read_head(spec, weights)
        head = None if steps is None else ArrayHead(library, steps)
        self.kv_itemsize = self._encoder.kv_itemsize
        self.has_layers = bool(spec.layers)
        self._patches = read_patches(spec, info, weights, library, formats.attention)
        self.attention_pool = read_attention_pool(spec, weights, library)
        self.vocabulary_head: ArrayHead | None = None
        if info.sparse is not None and info.sparse.kind is SparseKind.VOCABULARY_LOGITS:
            self.vocabulary_head = ArrayHead(library, read_vocabulary_head(spec, info, weights))
        is_token_classifier = info.kind is ModelKind.TOKEN_CLASSIFIER
        self.sequence_head = None if is_token_classifier else head
        self.token_head = head if is_token_classifier or spec.scores_rows else None

    @property
    def min_part_tokens(self) -> int:
        """Tokens that a thread of the C library runs at once at least, unless a batch has fewer."""
        return self._encoder.min_part_tokens

    def calibrate(self) -> None:
        """Measures `min_part_tokens` on this machine."""
        self._encoder.calibrate()

    def begin(
        self, batch: PackedArrays, *, need_attention: bool = False, output_rows: OutputRows = OutputRows.ALL
    ) -> CpuForward:
        """Starts a forward. Returns before it ends, so that several forwards of one thread run at once.

        Args:
            batch: Whole sequences, or chunks for a decoder.
            need_attention: Also return the attention weights.
            output_rows: Rows of each sequence that are returned. ALL with adapters and attention weights.

        Raises:
            MemoryError: Memory is short.
            ValueError: An id, a position or a block is out of range.
        """
        embeddings = None if batch.images is None or self._patches is None else self._patches(batch.images)
        visible_lens = None if batch.num_masked is None else np.array(batch.seq_lens, np.int32) - batch.num_masked
        encoder_input = EncoderInput(
            token_ids=batch.token_ids,
            positions=_position_rows(batch, self._embedding),
            cu_seqlens=batch.cu_seqlens,
            embeddings=embeddings,
            visible_lens=visible_lens,
            adapters=batch.adapters,
            kv_blocks=batch.kv_blocks,
        )
        return self._encoder.begin(encoder_input, need_attention=need_attention, output_rows=output_rows)

    def forward(self, batch: PackedArrays, *, need_attention: bool = False) -> ArrayOutput:
        """Like `begin`, but waits for the result."""
        return ArrayOutput(*self.begin(batch, need_attention=need_attention).result())

    def classify(self, rows_ND: Floats) -> Floats:
        """Returns class logits [N, C] of pooled rows [N, D]."""
        if self.sequence_head is None:
            raise UnsupportedTaskError("This model has no sequence classification head.", param="task")
        return self.sequence_head(rows_ND)

    def classify_tokens(self, rows_TD: Floats) -> Floats:
        """Returns class logits [T, C] of the rows of tokens [T, D]."""
        if self.token_head is None:
            raise UnsupportedTaskError("This model has no token classification head.", param="task")
        return self.token_head(rows_TD)


def _position_rows(batch: PackedArrays, embedding: EmbeddingSpec) -> NDArray[np.int64]:
    """Returns the row of each token in the table of positions and token types, [T]."""
    positions_T = batch.positions
    if embedding.padding_id is not None:
        positions_T = padding_aware_positions(batch, embedding.padding_id)
    types_T = batch.token_type_ids if embedding.num_token_types > 1 else None
    if embedding.positions is None:
        return np.zeros_like(positions_T) if types_T is None else types_T
    return positions_T if types_T is None else positions_T + types_T * embedding.num_positions


def padding_aware_positions(batch: PackedArrays, padding_id: int) -> NDArray[np.int64]:
    """Returns the positions of RoBERTa and MPNet, [T]: they begin at padding_id + 1.

    As in transformers, a padding token within a text has the position padding_id and is not counted.
    """
    is_text_T = batch.token_ids != padding_id
    firsts_N = batch.cu_seqlens[:-1]
    running_T = is_text_T.cumsum()
    before_N = running_T[firsts_N] - is_text_T[firsts_N]
    positions_T: NDArray[np.int64] = (running_T - np.repeat(before_N, batch.seq_lens)) * is_text_T + padding_id
    return positions_T
