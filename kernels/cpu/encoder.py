"""Runs a whole encoder or decoder in one call of the C library: packed tokens in, rows of the last layer out.

Shape letters: T packed tokens, N sequences, D model width, H heads.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import _abi
from .encoder_weights import (
    ADAPTED_LINEARS,
    AdapterWeights,
    EncoderWeights,
    Floats,
    LayerWeights,
    LinearWeights,
    LowRankWeights,
    NormWeights,
)
from .kv_cache import BatchBlocks
from .library import CpuKernelError, CpuLibrary, Format, OutputRows, PackedProduct, address_of, aligned

_CALIBRATION_RUNS: Final = 5
_CALIBRATION_TOKENS: Final = 48
"""Tokens of a lane that computes for longer than it reads the weights."""
_PART_TOKENS_RANGE: Final = (6, 128)
"""Bounds of `min_part_tokens`. On a busy computer the measurement may be far too low."""


@dataclass(slots=True)
class _ArrayReferences:
    """References to the arrays that the structs point to, so that they are not freed."""

    arrays: list[Any] = field(default_factory=list)

    def add(self, array: Any) -> int | None:
        """Adds a contiguous array and returns its address."""
        if array is None:
            return None
        array = np.ascontiguousarray(array)
        self.arrays.append(array)
        return address_of(array)


class EncoderInput(NamedTuple):
    """The packed input of one forward: T tokens of N sequences.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, rows of EncoderWeights.position_embeddings.
        cu_seqlens: [N + 1] int32, prefix sums of the lengths.
        embeddings: [T, E] float32, used instead of the word embeddings of `token_ids`; None: the word embeddings.
        visible_lens: [N] int32, number of leading tokens of each sequence that attention may read; None: all. Encoders
            only.
        adapters: [N] int32, index of each sequence's adapter in EncoderWeights.adapters, -1: no adapter; None: no
            sequence has one.
        kv_blocks: Blocks of chunks of sequences. Decoders only. None: all sequences are whole, and no keys or values
            are stored.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    embeddings: Floats | None = None
    visible_lens: NDArray[np.int32] | None = None
    adapters: NDArray[np.int32] | None = None
    kv_blocks: BatchBlocks | None = None


class CpuForward:
    """A forward that runs on worker threads (lanes).

    Args:
        handle: Handle of the forward in the library.
        hidden_TD: [T, D] float32, the output array.
        weights_TH: [T, H] float32, the output array of attention weights; None if not requested.
        inputs: Objects that the forward reads. Kept alive until it has finished.
    """

    def __init__(
        self, library: CpuLibrary, handle: int, hidden_TD: Floats, weights_TH: Floats | None, inputs: tuple[Any, ...]
    ) -> None:
        self._library = library
        self._handle: int | None = handle
        self._outputs = hidden_TD, weights_TH
        self._inputs = inputs
        self._is_done = False

    def __del__(self) -> None:
        if self._handle is not None:  # wait, because lanes may still write into the arrays
            with contextlib.suppress(MemoryError):
                self.result()

    @property
    def is_done(self) -> bool:
        """Whether `result` returns without waiting."""
        if not self._is_done and self._handle is not None:
            self._is_done = self._library.is_done(self._handle)
        return self._is_done

    def result(self) -> tuple[Floats, Floats | None]:
        """Waits for the forward.

        Returns:
            The hidden states, [T, D] float32 ([N, D] for one row per sequence), and the attention weights, [T, H]
            float32, or None if not requested. The weights are those of the first token of each sequence for all its
            tokens in the last layer.

        Raises:
            MemoryError: There was not enough memory.
        """
        if self._handle is not None:
            handle = self._handle
            self._handle = None
            self._is_done = True
            self._library.end(handle)
        return self._outputs


class CpuEncoder:
    """An encoder or a decoder with weights packed for one CpuLibrary. Called by one thread; its forwards may overlap.

    Args:
        library: The C library that runs it.
        spec: The model. Its weights are copied, except `word_embeddings`, which are read in place.
        product_format: Format of the products. With INT8 and `attention_format` DOT, the product of q, k and v is DOT,
            too.
        attention_format: Format of attention, DOT or F32. DOT becomes F32 if the head size is odd. None: DOT if
            `product_format` is DOT, else F32.

    Attributes:
        hidden_size: D.
        kv_itemsize: Bytes per number in the KV blocks of a decoder: 4 if attention computes in float32, 2 for bfloat16.

    Raises:
        CpuKernelError: The library does not support these formats.
    """

    def __init__(
        self,
        library: CpuLibrary,
        spec: EncoderWeights,
        product_format: Format,
        *,
        attention_format: Format | None = None,
    ) -> None:
        self._library = library
        if attention_format is None:
            attention_format = Format.DOT if product_format is Format.DOT else Format.F32
        if attention_format is Format.DOT and Format.DOT not in library.formats:
            raise CpuKernelError(f"{library.isa} does not support attention in {Format.DOT.name}")
        self._product_format = product_format
        # Rounding the product of q, k and v to int8 causes half of the error of all products.
        has_dot_qkv = product_format is Format.INT8 and attention_format is Format.DOT
        self._qkv_format = Format.DOT if has_dot_qkv else product_format
        self._references = _ArrayReferences()
        self._vocab_size = len(spec.word_embeddings)
        self._num_positions = None if spec.position_embeddings is None else len(spec.position_embeddings)
        self._num_heads = spec.num_heads
        # Tokens of the longest sequence that the rotary and bias tables support.
        self._max_length: float = math.inf
        layers = [self._layer(layer) for layer in spec.layers]
        self._layers = (_abi.Layer * max(len(layers), 1))(*layers)  # the library reads sizes of the first layer
        first = self._layers[0].attention_out
        self.hidden_size = int(first.outputs) if layers else spec.word_embeddings.shape[1]
        head_size = int(first.inputs) // spec.num_heads if layers else 0
        self._adapters = (_abi.Adapter * len(spec.adapters))(*map(self._adapter, spec.adapters))
        terms = [term for adapter in spec.adapters for layer in adapter.layers for term in layer.values()]
        uses_dot = attention_format is Format.DOT and head_size % 2 == 0
        self.kv_itemsize = 2 if uses_dot else 4
        self._struct = _abi.Encoder(
            width=self.hidden_size,
            num_layers=len(layers),
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads or spec.num_heads,
            head_size=head_size,
            pre_norm=spec.pre_norm,
            is_decoder=spec.is_decoder,
            table_is_bf16=spec.word_embeddings.dtype == np.uint16,
            attention_dot=uses_dot,
            word_embeddings=self._references.add(spec.word_embeddings),
            position_embeddings=self._references.add(spec.position_embeddings),
            embedding_width=spec.word_embeddings.shape[1],
            embedding_norm=self._norm(spec.embedding_norm),
            projection=self._product(spec.projection),
            layers=self._layers,
            final_norm=self._norm(spec.final_norm),
            adapters=ctypes.addressof(self._adapters),
            max_rank=max((len(term.down) for term in terms), default=0),
            min_part_tokens=1,
        )

    @property
    def min_part_tokens(self) -> int:
        """Tokens that a lane runs at once at least, unless a batch has fewer; see `calibrate`."""
        return int(self._struct.min_part_tokens)

    def calibrate(self) -> None:
        """Measures `min_part_tokens`: with so many tokens, the products take as long as reading all weights.

        Fewer tokens take a lane about as long. All lanes run at once, because they share the memory bandwidth. Results
        do not depend on it. Takes the time of a few hundred tokens.
        """
        self._struct.min_part_tokens = 1
        lanes = self._library.num_lanes
        length = int(min(_CALIBRATION_TOKENS, self._max_length))
        one_s, all_s = (self._time(lanes, num_tokens) for num_tokens in (1, length))
        self._struct.min_part_tokens = round(float(np.clip(length * one_s / all_s, *_PART_TOKENS_RANGE)))

    def _time(self, num_seqs: int, length: int) -> float:
        """Returns the least seconds of a forward of sequences of one length."""
        zeros_T = np.zeros(num_seqs * length, np.int64)
        cu_seqlens = np.arange(num_seqs + 1, dtype=np.int32) * np.int32(length)
        batch = EncoderInput(token_ids=zeros_T, positions=zeros_T, cu_seqlens=cu_seqlens)
        times_s = []
        for _ in range(_CALIBRATION_RUNS):
            began_s = time.perf_counter()
            self.begin(batch).result()
            times_s.append(time.perf_counter() - began_s)
        return min(times_s)

    def begin(
        self, batch: EncoderInput, *, need_attention: bool = False, output_rows: OutputRows = OutputRows.ALL
    ) -> CpuForward:
        """Starts a forward. Returns before it ends, so that several forwards of one thread run at once.

        Args:
            batch: The packed input. Its arrays must not change before the forward has ended.
            need_attention: Also return the attention weights. Encoders only.
            output_rows: Rows of each sequence that are returned. With one row per sequence, most of the last layer runs
                for these rows only. They have the same bits. ALL with adapters and attention weights.

        Raises:
            ValueError: An id, a position or a block is out of range, a sequence is longer than the tables of a layer,
                array shapes do not match, or an argument is for encoders or decoders only.
            MemoryError: There is not enough memory.
        """
        self._check(batch)
        if self._struct.is_decoder and (need_attention or batch.visible_lens is not None):
            raise ValueError("visible_lens and need_attention are not supported by decoders")
        is_unsupported = batch.adapters is not None or need_attention or not self._struct.num_layers
        if output_rows is not OutputRows.ALL and is_unsupported:
            raise ValueError("output_rows must be ALL with adapters, with attention weights and without layers")
        num_tokens, num_seqs = len(batch.token_ids), len(batch.cu_seqlens) - 1
        num_rows = num_tokens if output_rows is OutputRows.ALL else num_seqs
        hidden_TD: Floats = aligned(num_rows * self.hidden_size, np.float32).reshape(num_rows, -1)
        weights_TH = np.empty((num_tokens, self._num_heads), np.float32) if need_attention else None
        ids_T = np.ascontiguousarray(batch.token_ids, np.int64)
        positions_T = np.ascontiguousarray(batch.positions, np.int64)
        cu_seqlens = np.ascontiguousarray(batch.cu_seqlens, np.int32)
        visible_N = None if batch.visible_lens is None else np.ascontiguousarray(batch.visible_lens, np.int32)
        adapters_N = None if batch.adapters is None else np.ascontiguousarray(batch.adapters, np.int32)
        embeddings_TE = None if batch.embeddings is None else np.ascontiguousarray(batch.embeddings, np.float32)
        blocks, block_arrays = (None, ()) if batch.kv_blocks is None else batch.kv_blocks.struct()
        struct = _abi.Batch(
            ids=address_of(ids_T),
            rows=address_of(embeddings_TE),
            positions=address_of(positions_T),
            starts=address_of(cu_seqlens),
            visible=address_of(visible_N),
            num_seqs=num_seqs,
            kv_blocks=None if blocks is None else ctypes.pointer(blocks),
            hidden=address_of(hidden_TD),
            first_weights=address_of(weights_TH),
            adapters=address_of(adapters_N),
            kept=output_rows,
        )
        handle = self._library.begin(self._struct, struct)
        # The library reads these objects until the forward has ended.
        arrays = ids_T, positions_T, cu_seqlens, visible_N, adapters_N, embeddings_TE
        inputs = (self, *arrays, blocks, block_arrays, batch.kv_blocks)
        return CpuForward(self._library, handle, hidden_TD, weights_TH, inputs)

    def _check(self, batch: EncoderInput) -> None:
        """Raises ValueError for arrays that do not fit the weights or each other."""
        num_tokens = len(batch.token_ids)
        cu_seqlens = batch.cu_seqlens
        lengths_N = cu_seqlens[1:] - cu_seqlens[:-1]
        if num_tokens == 0 or cu_seqlens[0] != 0 or cu_seqlens[-1] != num_tokens or lengths_N.min() <= 0:
            raise ValueError("cu_seqlens must rise from 0 to the number of tokens")
        _check_rows("token_ids", batch.token_ids, num_tokens, self._vocab_size)
        if self._num_positions is not None:
            _check_rows("positions", batch.positions, num_tokens, self._num_positions)
        if batch.kv_blocks is not None:
            self._check_blocks(batch.kv_blocks, len(lengths_N), num_tokens)
        embeddings = batch.embeddings
        width = self._struct.embedding_width
        if embeddings is not None and embeddings.shape != (num_tokens, width):
            raise ValueError(f"embeddings must be [{num_tokens}, {width}], got {embeddings.shape}")
        ends_N = lengths_N if batch.kv_blocks is None else lengths_N + batch.kv_blocks.context_lens
        if (longest := int(ends_N.max())) > self._max_length:
            raise ValueError(f"a sequence has {longest} tokens; the limit is {self._max_length}")
        visible_N, adapters_N = batch.visible_lens, batch.adapters
        if visible_N is not None and (
            visible_N.shape != lengths_N.shape or (visible_N < 0).any() or (visible_N > lengths_N).any()
        ):
            raise ValueError(f"visible_lens must be {len(lengths_N)} numbers from 0 to the lengths of the sequences")
        if adapters_N is not None and (
            adapters_N.shape != lengths_N.shape or adapters_N.min() < -1 or adapters_N.max() >= len(self._adapters)
        ):
            raise ValueError(f"adapters must be {len(lengths_N)} numbers from -1 to {len(self._adapters) - 1}")

    def _layer(self, spec: LayerWeights) -> _abi.Layer:
        left, right = spec.window or (-1, -1)
        if spec.rotary is not None:
            self._max_length = min(self._max_length, len(spec.rotary))
        if spec.bias is not None:
            self._max_length = min(self._max_length, spec.bias.shape[1] // 2 + 1)
        distances = spec.distances
        if distances is not None:
            self._max_length = min(self._max_length, len(distances.rows) // 2 + 1)
        return _abi.Layer(
            attention_norm=self._norm(spec.attention_norm),
            mlp_norm=self._norm(spec.mlp_norm),
            qkv=self._product(spec.qkv, self._qkv_format),
            attention_out=self._product(spec.attention_out),
            mlp_in=self._product(spec.mlp_in),
            mlp_out=self._product(spec.mlp_out),
            left=left,
            right=right,
            rotary=self._references.add(spec.rotary),
            bias=self._references.add(spec.bias),
            bias_reach=0 if spec.bias is None else spec.bias.shape[1] // 2,
            distance_keys=None if distances is None else self._references.add(distances.keys),
            distance_queries=None if distances is None else self._references.add(distances.queries),
            distance_rows=None if distances is None else self._references.add(distances.rows),
            distance_reach=0 if distances is None else len(distances.rows) // 2,
            num_distances=0 if distances is None else distances.num_distances,
            query_norm=self._norm(spec.query_norm),
            key_norm=self._norm(spec.key_norm),
            after_attention=self._norm(spec.after_attention),
            after_mlp=self._norm(spec.after_mlp),
            softcap=spec.softcap,
        )

    def _check_blocks(self, blocks: BatchBlocks, num_seqs: int, num_tokens: int) -> None:
        struct = self._struct
        cache = blocks.cache
        expected = (struct.num_layers, struct.num_kv_heads, struct.head_size, self.kv_itemsize)
        if not struct.is_decoder or expected != (cache.num_layers, cache.num_kv_heads, cache.head_size, cache.itemsize):
            raise ValueError("the KV cache does not fit this model")
        blocks.check(num_seqs, num_tokens)

    def _product(self, spec: LinearWeights | None, form: Format | None = None) -> _abi.Product:
        if spec is None:
            return _abi.Product()
        packed: PackedProduct = self._library.pack(
            spec.weight,
            spec.bias,
            self._product_format if form is None else form,
            activation=spec.activation,
            gated=spec.gated,
        )
        self._references.arrays.append(packed)
        return packed.struct

    def _adapter(self, adapter: AdapterWeights) -> _abi.Adapter:
        terms = (_abi.LowRank * (len(self._layers) * len(ADAPTED_LINEARS)))()
        for index, (layer, weights) in enumerate(zip(self._layers, adapter.layers, strict=True)):
            for number, name in enumerate(ADAPTED_LINEARS):
                if name in weights:
                    terms[index * len(ADAPTED_LINEARS) + number] = self._low_rank(weights[name], getattr(layer, name))
        self._references.arrays.append(terms)
        embedding = adapter.embedding
        add = self._references.add
        if embedding is None:
            return _abi.Adapter(terms=ctypes.addressof(terms))
        return _abi.Adapter(
            terms=ctypes.addressof(terms),
            embedding_down=add(embedding.down.T),
            embedding_up=add(embedding.up.T),
            embedding_rank=len(embedding.down),
        )

    def _low_rank(self, term: LowRankWeights, product: _abi.Product) -> _abi.LowRank:
        form = Format.DOT if product.format == Format.DOT else Format.F32
        down = self._library.pack(term.down, None, form)
        up = self._library.pack(term.up, None, Format.F32, gated=bool(product.gated))
        self._references.arrays += [down, up]
        return _abi.LowRank(down=down.struct, up=up.struct)

    def _norm(self, spec: NormWeights | None) -> _abi.Norm:
        if spec is None:
            return _abi.Norm()
        add = self._references.add
        return _abi.Norm(weight=add(spec.weight), bias=add(spec.bias), eps=spec.eps, rms=spec.rms)


def _check_rows(name: str, rows_T: NDArray[Any], num_tokens: int, count: int) -> None:
    """Raises ValueError for indices outside a table, which would make the library read invalid memory."""
    if len(rows_T) != num_tokens or rows_T.view(np.uint64).max() >= count:  # negative ones become large
        raise ValueError(f"{name} must be {num_tokens} numbers from 0 to {count - 1}")
