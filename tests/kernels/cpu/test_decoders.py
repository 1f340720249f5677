"""Decoders: every option against float64, and the same to the bit whatever the batch, the chunks and the lanes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.kernels.cpu import CpuEncoder, Format, Machine, Pages, Past

from ...conftest import ISAS
from ..assertions import assert_close
from ..parameters import every_pair
from .chunked import ChunkedDecoder
from .reference import encode
from .specs import DECODERS, LONGEST, Shape, Texts, make_spec, make_texts, ways

shapes = pytest.mark.parametrize("shape", DECODERS, ids=lambda shape: shape.name)
CAUSAL = [shape for shape in DECODERS if shape.window is not None and shape.window[1] == 0]
causal = pytest.mark.parametrize("shape", CAUSAL, ids=lambda shape: shape.name)
TOLERANCE = 5e-6
LENGTHS = [1, 31, 300, 2, 513, 64, 257]


def rows_of(decoder: CpuEncoder, texts: Texts) -> torch.Tensor:
    return torch.from_numpy(decoder(texts.ids, texts.places, texts.starts)[0])


@shapes
def test_equals_float64(machine: Machine, shape: Shape) -> None:
    spec = make_spec(shape)
    decoder = CpuEncoder(machine, spec, Format.F32)
    for seed, lengths in enumerate([[1], [513], [2, 3, 31, 32, 33], [5, 300, 1, 64]]):
        texts = make_texts(lengths, seed)
        assert_close(f"rows of {lengths}", encode(spec, texts)[0], rows_of(decoder, texts), TOLERANCE)


@shapes
def test_every_format_stays_close(machine: Machine, shape: Shape) -> None:
    """BF16 rounds weights alone and is held to that; DOT and INT8 round both factors, and so the scores."""
    spec, texts = make_spec(shape), make_texts([70, 3, 150, 17])
    for form, attention in ways(machine):
        expected, _ = encode(spec, texts, form)
        actual = rows_of(CpuEncoder(machine, spec, form, attention=attention), texts).double()
        if form in (Format.F32, Format.BF16):
            assert_close(form.name, expected, actual, TOLERANCE)
        else:
            if form is Format.INT8:
                expected, _ = encode(spec, texts)
            least = {Format.DOT: 0.9995, Format.INT8: 0.985}[form]
            assert torch.cosine_similarity(actual, expected, dim=1).min() > least


def check_chunks(machine: Machine, shape: Shape, size: int, page_size: int) -> None:
    spec = make_spec(shape)
    texts = make_texts([length for length in LENGTHS if size > 1 or length < 100], 3)
    for form, attention in ways(machine):
        decoder = CpuEncoder(machine, spec, form, attention=attention)
        assert decoder.page_itemsize == (2 if attention is Format.DOT and shape.head_size % 2 == 0 else 4)
        whole = rows_of(decoder, texts)
        assert np.array_equal(ChunkedDecoder(decoder, spec, texts, page_size).run(size), whole), form.name


FAR_APART = [(256, 1), (300, 128)]
"""Chunks of many pages, and of parts of pages, whatever computes them."""


@every_pair(indirect=["machine"], machine=ISAS, shape=CAUSAL, sizes=[(1, 16), (7, 3), (100, 16), *FAR_APART])
def test_chunks_give_the_whole_to_the_bit(machine: Machine, shape: Shape, sizes: tuple[int, int]) -> None:
    check_chunks(machine, shape, *sizes)


@causal
@pytest.mark.parametrize(("size", "page_size"), FAR_APART)
def test_chunks_and_pages_of_sizes_far_apart_give_the_whole(
    widest: Machine, shape: Shape, size: int, page_size: int
) -> None:
    check_chunks(widest, shape, size, page_size)


@shapes
def test_the_same_to_the_bit_in_any_batch_on_any_number_of_lanes(shape: Shape) -> None:
    spec, texts = make_spec(shape), make_texts(LENGTHS)
    expected: dict[tuple[Format, Format], list[torch.Tensor]] = {}
    for lanes in (1, 2, 3):
        with Machine(lanes) as machine:
            for way in ways(machine):
                decoder = CpuEncoder(machine, spec, way[0], attention=way[1])
                alone = [rows_of(decoder, texts[n]) for n in range(len(LENGTHS))]
                for rows, first in zip(alone, expected.setdefault(way, alone), strict=True):
                    assert torch.equal(rows, first)
                for count in (2, 4, len(LENGTHS)):
                    batch = replace(texts, ids=texts.ids[: sum(LENGTHS[:count])], starts=texts.starts[: count + 1])
                    assert torch.equal(rows_of(decoder, batch), torch.cat(alone[:count]))


@causal
def test_chunks_are_the_same_to_the_bit_on_any_number_of_lanes(shape: Shape) -> None:
    spec, texts = make_spec(shape), make_texts(LENGTHS)
    found = []
    for lanes in (1, 2, 3):
        with Machine(lanes) as machine:
            decoder = CpuEncoder(machine, spec, Format.F32)
            found.append(ChunkedDecoder(decoder, spec, texts, 16).run(90))
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


@causal
def test_nan_in_one_text_touches_no_other(machine: Machine, shape: Shape) -> None:
    spec = make_spec(shape)
    spec.words[7] = np.nan
    texts = make_texts([40, 90, 300], 1)
    texts.ids[texts.ids == 7] = 8
    decoder = CpuEncoder(machine, spec, Format.F32)
    expected = rows_of(decoder, texts)
    texts.ids[45] = 7
    for rows in (rows_of(decoder, texts), torch.from_numpy(ChunkedDecoder(decoder, spec, texts, 16).run(50))):
        assert rows[45].isnan().all()
        assert torch.equal(rows[:40], expected[:40])
        assert torch.equal(rows[130:], expected[130:])


def test_a_chunk_can_run_again(widest: Machine) -> None:
    """As after a forward that failed: the same keys go to the same places."""
    spec, texts = make_spec(DECODERS[0]), make_texts([200, 120])
    decoder = CpuEncoder(widest, spec, Format.F32)
    chunked = ChunkedDecoder(decoder, spec, texts, 16)
    chunked.step([(0, 0, 90), (1, 0, 33)])
    chunked.rows = [[], []]
    chunked.step([(0, 0, 90), (1, 0, 33)])
    chunked.step([(0, 90, 200), (1, 33, 120)])
    assert np.array_equal(chunked.result(), rows_of(decoder, texts))


def test_pages_that_the_library_could_not_read_are_refused(widest: Machine) -> None:
    spec, texts = make_spec(DECODERS[0]), make_texts([4, 3])
    decoder = CpuEncoder(widest, spec, Format.F32)
    pages = ChunkedDecoder(decoder, spec, make_texts([40, 3]), 16).pages
    good = Past(
        pages=pages,
        lengths=np.array([20, 0], np.int32),
        tables=np.array([[1, 0], [-1, -1]], np.int32),
        slots=np.full(7, -1, np.int64),
    )
    other = [np.zeros((4, 16, 2, 31), np.float32)] * 2
    halves = [np.zeros((4, 16, 2, 32), np.uint16)] * 2
    for changes, message in (
        ({"lengths": np.array([-1, 0])}, "past lengths must be 2 numbers from 0"),
        ({"lengths": np.array([20])}, "past lengths must be 2 numbers"),
        ({"lengths": np.array([33, 0])}, "the pages of 2 sequences"),
        ({"tables": np.array([[1, 0]])}, "the pages of 2 sequences"),
        ({"tables": np.array([[1, pages.num_pages], [0, 0]])}, "pages from 0 to 6"),
        ({"tables": np.array([[1, -1], [0, 0]])}, "pages from 0 to 6"),
        ({"slots": np.full(7, 7 * 16)}, "slots must be 7 numbers from -1 to 111"),
        ({"slots": np.full(7, -2)}, "slots must be 7 numbers"),
        ({"slots": np.full(6, 0)}, "slots must be 7 numbers"),
        ({"pages": Pages(other, other)}, "not of this model"),
        ({"pages": Pages(halves, halves)}, "not of this model"),
        ({"lengths": np.array([LONGEST - 3, 0]), "tables": np.zeros((2, 40), np.int32)}, "514 tokens, of at most 513"),
    ):
        with pytest.raises(ValueError, match=message):
            decoder(texts.ids, texts.places, texts.starts, past=replace(good, **changes))
    decoder(texts.ids, texts.places, texts.starts, past=replace(good, lengths=np.zeros(2, np.int32)))
    with pytest.raises(ValueError, match="contiguous arrays of one shape"):
        Pages(other, halves)
    with pytest.raises(ValueError, match="neither attention weights nor hidden tokens"):
        decoder(texts.ids, texts.places, texts.starts, need_attention=True)
