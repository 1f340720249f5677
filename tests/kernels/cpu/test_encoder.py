"""CpuEncoder equals float64 for every option, and gives the same bits in any batch, in chunks and on any lanes."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from penstock.kernels.cpu import BatchBlocks, CpuEncoder, CpuLibrary, Format, OutputRows, PagedKvCache

from ...conftest import ISAS
from ..assertions import assert_close
from ..parameters import every_pair
from .chunked import ChunkedDecoder
from .reference import encode
from .specs import DECODERS, LONGEST, SHAPES, Shape, Texts, format_pairs, make_spec, make_texts

# Share of the largest value: float32 sums, and functions within 1e-6, through one or two layers.
TOLERANCE = 5e-6
CAUSAL = [shape for shape in DECODERS if shape.window is not None and shape.window[1] == 0]
MPNET = next(shape for shape in SHAPES if shape.distance_bias)
FAR_APART = [(256, 1), (300, 128)]
"""Chunks of many KV blocks, and chunks of parts of blocks."""

every_shape = pytest.mark.parametrize("shape", [*SHAPES, *DECODERS], ids=lambda shape: shape.name)


def run(encoder: CpuEncoder, texts: Texts, need_attention: bool | None = None) -> tuple[torch.Tensor, Any]:
    """Rows and attention weights; the weights of a decoder are None."""
    need_attention = not encoder._struct.is_decoder if need_attention is None else need_attention
    rows, weights = encoder.begin(texts.input(), need_attention=need_attention).result()
    return torch.from_numpy(rows), None if weights is None else torch.from_numpy(weights)


def join(texts: Sequence[Texts]) -> Texts:
    starts = np.concatenate([[0], np.cumsum([text.lengths[0] for text in texts])]).astype(np.int32)
    visible = None if texts[0].visible is None else np.concatenate([text.visible for text in texts])
    return Texts(np.concatenate([t.ids for t in texts]), np.concatenate([t.positions for t in texts]), starts, visible)


@cache  # for all instruction sets
def exact(shape: Shape, lengths: tuple[int, ...], seed: int, hides: bool, form: Format) -> tuple[torch.Tensor, ...]:
    return encode(make_spec(shape), make_texts([*lengths], seed, hides), form)


@every_shape
def test_float32_equals_float64(library: CpuLibrary, shape: Shape) -> None:
    spec = make_spec(shape)
    encoder = CpuEncoder(library, spec, Format.F32)
    numbers = np.random.default_rng(1)
    batches = [[1], [513], [2, 3, 31, 32, 33], [5, 300, 1, 64]]
    batches += [numbers.integers(1, 130, numbers.integers(1, 9)).tolist() for _ in range(2)]
    for seed, lengths in enumerate(batches):
        hides = seed % 2 == 1 and not shape.is_decoder
        rows, weights = run(encoder, make_texts(lengths, seed, hides))
        expected_rows, expected_weights = exact(shape, tuple(lengths), seed, hides, Format.F32)
        assert_close(f"rows of {lengths}", expected_rows, rows, TOLERANCE)
        if weights is not None:
            assert_close(f"weights of {lengths}", expected_weights, weights, TOLERANCE)


@every_shape
def test_every_format_stays_close(library: CpuLibrary, shape: Shape) -> None:
    """BF16 rounds weights only; DOT and INT8 round both factors and the scores."""
    spec, lengths = make_spec(shape), (70, 3, 150, 17)
    for form, attention in format_pairs(library):
        actual, _ = run(CpuEncoder(library, spec, form, attention_format=attention), make_texts([*lengths]))
        expected, _ = exact(shape, lengths, 0, False, Format.F32 if form is Format.INT8 else form)
        if form in (Format.F32, Format.BF16):
            assert_close(form.name, expected, actual, TOLERANCE)
        else:
            min_cosine = {Format.DOT: 0.9995, Format.INT8: 0.99 if shape.is_decoder else 0.995}[form]
            assert torch.cosine_similarity(actual.double(), expected, dim=1).min() > min_cosine, form


@every_shape
def test_bits_do_not_depend_on_batch_and_lanes(three_lane_library: CpuLibrary, shape: Shape) -> None:
    spec = make_spec(shape)
    lengths = [1, 2, 5, 13, 31, 32, 33, 64, 90, 129, 150, 300]
    texts = make_texts(lengths, hides=not shape.is_decoder)
    # One long text, or few tokens after a calibration: all lanes share them. Many texts: each lane runs some.
    orders = [[11], [0], [11, 0], [10, 11], [2, 0, 1], np.random.default_rng(4).permutation(12).tolist()]
    for form, attention in format_pairs(three_lane_library):
        alone: list[Any] = []
        for num_lanes in (1, 2, 3, 5):
            with CpuLibrary(num_lanes) as library:
                encoder = CpuEncoder(library, spec, form, attention_format=attention)
                if num_lanes % 2:
                    encoder.calibrate()
                    assert 6 <= encoder.min_part_tokens <= 128
                    encoder._struct.min_part_tokens = 24  # the measured number depends on the machine
                alone = alone or [run(encoder, texts[i]) for i in range(12)]
                for order in orders:
                    rows, weights = run(encoder, join([texts[i] for i in order]))
                    assert torch.equal(rows, torch.cat([alone[i][0] for i in order])), f"{num_lanes} lanes, {order}"
                    assert weights is None or torch.equal(weights, torch.cat([alone[i][1] for i in order]))


@every_shape
def test_kept_rows_have_the_bits_of_all_rows(three_lane_library: CpuLibrary, shape: Shape) -> None:
    """One long text runs on all lanes jointly; each lane runs some of several texts."""
    spec = make_spec(shape)
    for form, attention in format_pairs(three_lane_library):
        encoder = CpuEncoder(three_lane_library, spec, form, attention_format=attention)
        for lengths in ([300], [1], [1, 1, 2], [70, 1, 33, 2, 200, 31, 150, 90]):
            texts = make_texts(lengths, hides=not shape.is_decoder)
            rows, _ = encoder.begin(texts.input()).result()
            for output_rows, indices in (
                (OutputRows.FIRST, texts.starts[:-1]),
                (OutputRows.LAST, texts.starts[1:] - 1),
            ):
                actual, _ = encoder.begin(texts.input(), output_rows=output_rows).result()
                assert np.array_equal(actual, rows[indices]), (form, lengths, output_rows)
        adapters = np.full(len(lengths), -1, np.int32)
        with pytest.raises(ValueError, match="output_rows must be ALL with adapters"):
            encoder.begin(texts.input(adapters=adapters), output_rows=OutputRows.LAST)


def check_chunks(library: CpuLibrary, shape: Shape, size: int, block_size: int) -> None:
    spec = make_spec(shape)
    lengths = [1, 31, 300, 2, 513, 64, 257]
    texts = make_texts([length for length in lengths if length < 30 * size + 80], 3)
    for form, attention in format_pairs(library):
        decoder = CpuEncoder(library, spec, form, attention_format=attention)
        assert decoder.kv_itemsize == (2 if attention is Format.DOT and shape.head_size % 2 == 0 else 4)
        chunked = ChunkedDecoder(decoder, spec, texts, block_size).run(size)
        assert np.array_equal(chunked, run(decoder, texts)[0]), form.name


@every_pair(indirect=["library"], library=ISAS, shape=CAUSAL, sizes=[(1, 16), (7, 3), (100, 16), *FAR_APART])
def test_chunks_equal_the_whole_bit_for_bit(library: CpuLibrary, shape: Shape, sizes: tuple[int, int]) -> None:
    check_chunks(library, shape, *sizes)


def test_chunk_may_run_again(three_lane_library: CpuLibrary) -> None:
    spec, texts = make_spec(DECODERS[0]), make_texts([200, 120])
    decoder = CpuEncoder(three_lane_library, spec, Format.F32)
    chunked = ChunkedDecoder(decoder, spec, texts, 16)
    chunked.step([(0, 0, 90), (1, 0, 33)])
    chunked.rows = [[], []]
    chunked.step([(0, 0, 90), (1, 0, 33)])
    chunked.step([(0, 90, 200), (1, 33, 120)])
    assert np.array_equal(chunked.result(), run(decoder, texts)[0])


@every_shape
def test_nan_stays_in_its_text(library: CpuLibrary, shape: Shape) -> None:
    spec = make_spec(shape)
    texts = make_texts([31, 7, 64, 33])
    texts = replace(texts, ids=np.minimum(texts.ids, 48))
    spec.word_embeddings[49] = np.nan
    dirty = replace(texts, ids=texts.ids.copy())
    dirty.ids[33] = 49
    for form, attention in format_pairs(library):
        encoder = CpuEncoder(library, spec, form, attention_format=attention)
        clean, _ = run(encoder, texts)
        rows, weights = run(encoder, dirty)
        results = [rows]
        if shape in CAUSAL:
            results.append(torch.from_numpy(ChunkedDecoder(encoder, spec, dirty, 16).run(50)))
        for found in results:
            assert torch.equal(found[:31], clean[:31])
            assert torch.equal(found[38:], clean[38:])
            assert found[33].isnan().all()
        assert clean.isfinite().all()
        if shape.window is None:
            assert rows[31:38].isnan().all()
            assert weights is None or weights[31:38].isnan().all()


def test_tables_may_be_bfloat16(library: CpuLibrary) -> None:
    spec, texts = make_spec(SHAPES[0]), make_texts([12, 40])
    words = torch.from_numpy(spec.word_embeddings).bfloat16()
    rounded = replace(spec, word_embeddings=words.float().numpy())
    in_bfloat16 = replace(spec, word_embeddings=words.view(torch.int16).numpy().view(np.uint16))
    actual, expected = (run(CpuEncoder(library, each, Format.F32), texts)[0] for each in (in_bfloat16, rounded))
    assert torch.equal(actual, expected)


LONG = make_texts([3, LONGEST + 2])


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        (SHAPES[0], {"ids": np.full(5, 50)}, "token_ids must be 5 numbers from 0 to 49"),
        (SHAPES[0], {"ids": np.full(5, -1)}, "token_ids must be 5 numbers from 0 to 49"),
        (SHAPES[0], {"ids": np.zeros(4, np.int64)}, "from 0"),
        (SHAPES[0], {"positions": np.full(5, 513)}, "positions must be 5 numbers from 0 to 512"),
        (SHAPES[0], {"positions": np.zeros(4, np.int64)}, "positions must be 5 numbers from 0 to 512"),
        (SHAPES[0], {"starts": np.array([0, 3, 3, 5], np.int32)}, "cu_seqlens must rise"),
        (SHAPES[0], {"starts": np.array([0, 4], np.int32)}, "cu_seqlens must rise"),
        (SHAPES[0], {"starts": np.array([1, 5], np.int32)}, "cu_seqlens must rise"),
        (SHAPES[0], {"visible": np.array([2], np.int32)}, "visible_lens must be 2 numbers"),
        (SHAPES[0], {"visible": np.array([2, 4], np.int32)}, "visible_lens must be 2 numbers"),
        (SHAPES[0], {"visible": np.array([-1, 3], np.int32)}, "visible_lens must be 2 numbers"),
        (MPNET, vars(replace(LONG, positions=np.minimum(LONG.positions, 9))), "515 tokens; the limit is 514"),
        (SHAPES[7], vars(LONG), "515 tokens; the limit is 513"),
        (DECODERS[0], {"visible": np.array([1, 2], np.int32)}, "not supported by decoders"),
    ],
)
def test_value_outside_the_tables_is_rejected(
    three_lane_library: CpuLibrary, shape: Shape, changes: dict[str, np.ndarray], message: str
) -> None:
    encoder = CpuEncoder(three_lane_library, make_spec(shape), Format.F32)
    with pytest.raises(ValueError, match=message):
        run(encoder, replace(make_texts([2, 3]), **changes))


def test_invalid_kv_blocks_are_rejected(three_lane_library: CpuLibrary) -> None:
    spec, texts = make_spec(DECODERS[0]), make_texts([4, 3])
    decoder = CpuEncoder(three_lane_library, spec, Format.F32)
    with pytest.raises(ValueError, match="not supported by decoders"):
        run(decoder, texts, need_attention=True)
    cache = ChunkedDecoder(decoder, spec, make_texts([40, 3]), 16).cache
    valid = BatchBlocks(
        cache=cache,
        context_lens=np.array([20, 0], np.int32),
        block_tables=np.array([[1, 0], [-1, -1]], np.int32),
        slot_mapping=np.full(7, -1, np.int64),
    )
    narrow = [np.zeros((4, 16, 2, 31), np.float32)] * 2
    halves = [np.zeros((4, 16, 2, 32), np.uint16)] * 2
    for changes, message in (
        ({"context_lens": np.array([-1, 0])}, "context_lens must be 2 numbers of at least 0"),
        ({"context_lens": np.array([20])}, "context_lens must be 2 numbers"),
        ({"context_lens": np.array([33, 0])}, "the blocks of 2 sequences"),
        ({"block_tables": np.array([[1, 0]])}, "the blocks of 2 sequences"),
        ({"block_tables": np.array([[1, cache.num_blocks], [0, 0]])}, "blocks from 0 to 6"),
        ({"block_tables": np.array([[1, -1], [0, 0]])}, "blocks from 0 to 6"),
        ({"slot_mapping": np.full(7, 7 * 16)}, "slot_mapping must be 7 numbers from -1 to 111"),
        ({"slot_mapping": np.full(7, -2)}, "slot_mapping must be 7 numbers"),
        ({"slot_mapping": np.full(6, 0)}, "slot_mapping must be 7 numbers"),
        ({"cache": PagedKvCache(narrow, narrow)}, "does not fit this model"),
        ({"cache": PagedKvCache(halves, halves)}, "does not fit this model"),
        (
            {"context_lens": np.array([LONGEST - 3, 0]), "block_tables": np.zeros((2, 40), np.int32)},
            "514 tokens; the limit is 513",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            decoder.begin(texts.input(kv_blocks=replace(valid, **changes)))
    decoder.begin(texts.input(kv_blocks=replace(valid, context_lens=np.zeros(2, np.int32)))).result()
    with pytest.raises(ValueError, match="contiguous arrays of one shape"):
        PagedKvCache(narrow, halves)
