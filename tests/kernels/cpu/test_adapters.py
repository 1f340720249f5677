"""Sequences with low-rank adapters equal merged weights in float64, with the same bits in any batch and in chunks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.kernels.cpu import (
    ADAPTED_LINEARS,
    AdapterWeights,
    BatchBlocks,
    CpuEncoder,
    CpuLibrary,
    EncoderInput,
    EncoderWeights,
    Format,
    LowRankWeights,
    PagedKvCache,
)

from ..assertions import assert_close
from .reference import encode
from .specs import DECODERS, SHAPES, Shape, Texts, format_pairs, make_spec, make_texts

NAMES = ("bert_8", "wide_embedding", "modernbert_64", "nomic_gated", "jina_code_alibi", "qwen3", "gemma2")
some_shapes = pytest.mark.parametrize(
    "shape", [shape for shape in (*SHAPES, *DECODERS) if shape.name in NAMES], ids=lambda shape: shape.name
)
LENGTHS = [1, 70, 3, 33, 150, 17, 40]
ADAPTERS = np.array([-1, 0, 1, 1, 0, -1, 0], np.int32)


def with_adapters(spec: EncoderWeights) -> EncoderWeights:
    """Adds an adapter of all maps and the embedding, and one of two maps of a layer, with a rank above a panel."""
    numbers = np.random.default_rng(5)

    def term(num_out: int, num_in: int, rank: int) -> LowRankWeights:
        down = numbers.standard_normal((rank, num_in), np.float32) / np.float32(np.sqrt(num_in))
        up = numbers.standard_normal((num_out, rank), np.float32) * np.float32(0.5 / np.sqrt(rank))
        return LowRankWeights(down, up)

    layers = list(spec.layers)
    everything = [{name: term(*getattr(layer, name).weight.shape, 5) for name in ADAPTED_LINEARS} for layer in layers]
    some = [{name: term(*getattr(layers[0], name).weight.shape, 67) for name in ("qkv", "mlp_in")}]
    some += [{} for _ in layers[1:]]
    num_words, width = spec.word_embeddings.shape
    adapters = (AdapterWeights(everything, term(width, num_words, 3)), AdapterWeights(some))
    return replace(spec, layers=layers, adapters=adapters)


def merged(spec: EncoderWeights, number: int) -> EncoderWeights:
    """The same model with the weights of an adapter merged; of none for -1."""
    if number < 0:
        return spec
    adapter, layers = spec.adapters[number], []
    for layer, terms in zip(spec.layers, adapter.layers, strict=True):
        changes = {}
        for name, term in terms.items():
            linear = getattr(layer, name)
            changes[name] = replace(linear, weight=linear.weight + term.up @ term.down)
        layers.append(replace(layer, **changes))
    embedding, words = adapter.embedding, spec.word_embeddings
    words = words if embedding is None else words + (embedding.up @ embedding.down).T
    return replace(spec, layers=layers, word_embeddings=words)


def run(encoder: CpuEncoder, texts: Texts, adapters: np.ndarray | None) -> torch.Tensor:
    rows, _ = encoder.begin(texts.input(adapters=adapters)).result()
    return torch.from_numpy(rows)


@some_shapes
def test_adapters_of_a_batch_equal_merged_weights(library: CpuLibrary, shape: Shape) -> None:
    spec, texts = with_adapters(make_spec(shape)), make_texts(LENGTHS)
    rows = [encode(merged(spec, number), texts[index])[0] for index, number in enumerate(ADAPTERS)]
    for form, attention in format_pairs(library):
        actual = run(CpuEncoder(library, spec, form, attention_format=attention), texts, ADAPTERS)
        if form is Format.F32:
            assert_close("rows", torch.cat(rows), actual, 1e-5)
        else:
            assert torch.cosine_similarity(actual.double(), torch.cat(rows), dim=1).min() > 0.98, form


@some_shapes
def test_bits_of_an_adapter_do_not_depend_on_batch_and_lanes(three_lane_library: CpuLibrary, shape: Shape) -> None:
    spec, texts = with_adapters(make_spec(shape)), make_texts([*LENGTHS, 300])
    adapters = np.append(ADAPTERS, np.int32(1))
    plain = make_spec(shape)
    for form, attention in format_pairs(three_lane_library):
        alone = []
        for num_lanes in (1, 3):
            with CpuLibrary(num_lanes) as lanes:
                encoder = CpuEncoder(lanes, spec, form, attention_format=attention)
                alone = alone or [run(encoder, texts[i], adapters[i : i + 1]) for i in range(len(adapters))]
                assert torch.equal(run(encoder, texts, adapters), torch.cat(alone))
                assert torch.equal(
                    run(encoder, texts, None),
                    run(CpuEncoder(lanes, plain, form, attention_format=attention), texts, None),
                )


def test_chunks_with_an_adapter_equal_the_whole(library: CpuLibrary) -> None:
    spec, texts, size = with_adapters(make_spec(DECODERS[0])), make_texts([90]), 37
    encoder, adapters = CpuEncoder(library, spec, Format.F32), np.array([0], np.int32)
    cache = PagedKvCache.allocate(2, (3, 40, 2, 32), encoder.kv_itemsize)
    rows = []
    for first in range(0, 90, size):
        at = np.arange(first, min(first + size, 90))
        kv_blocks = BatchBlocks(
            cache=cache,
            context_lens=np.array([first], np.int32),
            block_tables=np.arange(3, dtype=np.int32)[None],
            slot_mapping=at.astype(np.int64),
        )
        starts = np.array([0, len(at)], np.int32)
        chunk = EncoderInput(texts.ids[at], at, starts, adapters=adapters, kv_blocks=kv_blocks)
        rows.append(encoder.begin(chunk).result()[0])
    assert np.array_equal(np.concatenate(rows), run(encoder, texts, adapters))


def test_number_of_an_adapter_must_exist(library: CpuLibrary) -> None:
    spec, texts = with_adapters(make_spec(SHAPES[0])), make_texts([2, 3])
    encoder = CpuEncoder(library, spec, Format.F32)
    for wrong in ([0, 2], [-2, 0], [0]):
        with pytest.raises(ValueError, match="adapters must be 2 numbers from -1 to 1"):
            run(encoder, texts, np.array(wrong, np.int32))
