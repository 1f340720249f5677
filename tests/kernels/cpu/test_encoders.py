"""Whole encoders: every option against float64, the same to the bit in any batch and on any number of lanes."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.kernels.cpu import CpuEncoder, CpuKernelError, EncoderSpec, Format, Machine

from ..assertions import assert_close
from .reference import encode
from .specs import LONGEST, SHAPES, Shape, Texts, make_spec, make_texts, ways

shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
# Of the largest value: float32 sums, and functions within 1e-6, through one or two layers.
TOLERANCE = 5e-6

MPNET = next(shape for shape in SHAPES if shape.distance_bias)


def run(encoder: CpuEncoder, texts: Texts, need_attention: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
    rows, weights = encoder(
        texts.ids, texts.places, texts.starts, visible_N=texts.visible, need_attention=need_attention
    )
    return torch.from_numpy(rows), None if weights is None else torch.from_numpy(weights)


def rows_of(
    machine: Machine, spec: EncoderSpec, texts: Texts, form: Format = Format.F32, attention: Format | None = None
) -> torch.Tensor:
    return run(CpuEncoder(machine, spec, form, attention=attention), texts)[0]


@shapes
def test_equals_float64(machine: Machine, shape: Shape) -> None:
    spec = make_spec(shape)
    encoder = CpuEncoder(machine, spec, Format.F32)
    numbers = np.random.default_rng(1)
    batches = [[1], [513], [2, 3, 31, 32, 33], [5, 300, 1, 64]]
    batches += [numbers.integers(1, 130, numbers.integers(1, 9)).tolist() for _ in range(3)]
    for seed, lengths in enumerate(batches):
        texts = make_texts(lengths, seed, hides=seed % 2 == 1)
        rows, weights = run(encoder, texts)
        expected_rows, expected_weights = encode(spec, texts)
        assert_close(f"rows of {lengths}", expected_rows, rows, TOLERANCE)
        assert_close(f"weights of {lengths}", expected_weights, weights, TOLERANCE)


@shapes
def test_every_format_stays_close(machine: Machine, shape: Shape) -> None:
    """BF16 rounds weights alone and is held to that; DOT and INT8 round both factors, and so the scores."""
    spec, texts = make_spec(shape), make_texts([70, 3, 150, 17])
    for form, attention in ways(machine):
        expected, _ = encode(spec, texts, form)
        actual = rows_of(machine, spec, texts, form, attention).double()
        if form in (Format.F32, Format.BF16):
            assert_close(form.name, expected, actual, TOLERANCE)
        else:
            if form is Format.INT8:
                expected, _ = encode(spec, texts)
            least = {Format.DOT: 0.9995, Format.INT8: 0.99}[form]
            assert torch.cosine_similarity(actual, expected, dim=1).min() > least, form


@shapes
def test_the_same_to_the_bit_in_any_batch_on_any_lanes(widest: Machine, shape: Shape) -> None:
    for form in widest.formats:
        check_batches_and_lanes(widest, shape, form)


def check_batches_and_lanes(widest: Machine, shape: Shape, form: Format) -> None:
    spec = make_spec(shape)
    attention = [of for products, of in ways(widest) if products is form][-1]
    texts = make_texts([1, 2, 5, 13, 31, 32, 33, 64, 90, 129, 150, 300], hides=True)
    with Machine(1) as single:
        encoder = CpuEncoder(single, spec, form, attention=attention)
        alone = [run(encoder, texts[i]) for i in range(len(texts.lengths))]
    numbers = np.random.default_rng(4)
    for num_lanes in (1, 2, 3, 4, 5):
        with Machine(num_lanes) as machine:
            encoder = CpuEncoder(machine, spec, form, attention=attention)
            # One long text: lanes go together. Many: each lane takes some.
            for order in ([11], [0], [11, 0], [10, 11], numbers.permutation(12), numbers.permutation(12)[:5]):
                rows, weights = run(encoder, join([texts[int(i)] for i in order]))
                assert torch.equal(rows, torch.cat([alone[i][0] for i in order])), f"{num_lanes} lanes, {order}"
                assert weights is not None
                assert torch.equal(weights, torch.cat([alone[i][1] for i in order])), f"{num_lanes} lanes, {order}"


def join(texts: list[Texts]) -> Texts:
    starts = np.concatenate([[0], np.cumsum([text.lengths[0] for text in texts])]).astype(np.int32)
    visible = None if texts[0].visible is None else np.concatenate([text.visible for text in texts])
    return Texts(np.concatenate([t.ids for t in texts]), np.concatenate([t.places for t in texts]), starts, visible)


@shapes
def test_nan_touches_no_other_text(machine: Machine, shape: Shape) -> None:
    spec = make_spec(shape)
    texts = make_texts([31, 7, 64, 33])
    texts = replace(texts, ids=np.minimum(texts.ids, 48))
    spec.words[49] = np.nan
    dirty = replace(texts, ids=texts.ids.copy())
    dirty.ids[33] = 49
    for form, attention in ways(machine):
        encoder = CpuEncoder(machine, spec, form, attention=attention)
        clean_rows, _ = run(encoder, texts)
        rows, weights = run(encoder, dirty)
        assert weights is not None
        assert torch.equal(rows[:31], clean_rows[:31])
        assert torch.equal(rows[38:], clean_rows[38:])
        assert clean_rows.isfinite().all()
        assert rows[33].isnan().all()
        if shape.window is None:
            assert rows[31:38].isnan().all()
            assert weights[31:38].isnan().all()


def test_unknown_attention_format_is_refused() -> None:
    spec = make_spec(SHAPES[0])
    with Machine(1, isa="plain") as plain, pytest.raises(CpuKernelError, match="plain has no attention in DOT"):
        CpuEncoder(plain, spec, Format.F32, attention=Format.DOT)


def test_attention_in_bfloat16_is_another_than_in_float32(widest: Machine) -> None:
    if Format.DOT not in widest.formats:
        pytest.skip(f"{widest.isa} has no DOT")
    spec, texts = make_spec(SHAPES[0]), make_texts([20])
    exact = rows_of(widest, spec, texts, Format.F32)
    rounded = rows_of(widest, spec, texts, Format.F32, Format.DOT)
    assert 1e-6 < (exact - rounded).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_scores_that_are_not_finite_do_as_in_torch(machine: Machine, value: float) -> None:
    """-inf hides a key, as long as another one is there; inf and NaN make the query's row NaN."""
    spec = make_spec(MPNET)
    layer = next(iter(spec.layers))
    assert layer.bias is not None
    layer.bias[1, LONGEST + 2 :: 3] = value
    texts = make_texts([40, 2, 3, 1])
    for form in machine.formats - {Format.INT8}:
        rows, weights = run(CpuEncoder(machine, spec, form), texts)
        expected_rows, expected_weights = encode(spec, texts, form)
        assert weights is not None
        tolerance = 0.05 if form is Format.DOT else TOLERANCE
        assert_close("rows", expected_rows, rows, tolerance)
        assert_close("weights", expected_weights, weights, tolerance)


def test_a_query_whose_scores_are_all_minus_infinity_is_nan(machine: Machine) -> None:
    spec = make_spec(MPNET)
    layer = next(iter(spec.layers))
    assert layer.bias is not None
    layer.bias[:] = -np.inf
    rows, weights = run(CpuEncoder(machine, spec, Format.F32), make_texts([40, 3]))
    assert rows.isnan().all()
    assert weights is not None
    assert weights.isnan().all()


def test_norms_hold_rows_of_any_size(machine: Machine) -> None:
    """As float32 torch, up to where squares are no float32 any more: there torch itself gives now NaN, now 0."""
    shapes_of_norms = (SHAPES[0], next(shape for shape in SHAPES if shape.rms))
    for shape, size in itertools.product(shapes_of_norms, (1e-30, 1e-3, 1e3, 1e15)):
        spec = make_spec(replace(shape, places=False))
        spec.words[3] *= np.float32(size)
        texts = make_texts([1])
        texts.ids[:] = 3
        norm = spec.embedding_norm
        rows = torch.from_numpy(spec.words[texts.ids])
        if norm.rms:
            scaled = torch.nn.functional.rms_norm(rows, rows.shape[1:], torch.from_numpy(norm.weight), norm.eps)
        else:
            bias = torch.from_numpy(norm.bias)
            scaled = torch.nn.functional.layer_norm(rows, rows.shape[1:], torch.from_numpy(norm.weight), bias, norm.eps)
        # A table that holds the normalised row, and no norm.
        given = replace(spec, words=spec.words.copy(), embedding_norm=None)
        given.words[3] = scaled[0].numpy()
        actual, expected = rows_of(machine, spec, texts), rows_of(machine, given, texts)
        assert_close(f"rows of {size}", expected, actual, TOLERANCE)


def test_tables_in_bfloat16(machine: Machine) -> None:
    spec, texts = make_spec(SHAPES[0]), make_texts([12, 40])
    words = torch.from_numpy(spec.words).bfloat16()
    rounded = rows_of(machine, replace(spec, words=words.float().numpy()), texts)
    actual = rows_of(machine, replace(spec, words=words.view(torch.int16).numpy().view(np.uint16)), texts)
    assert torch.equal(actual, rounded)


LONG = make_texts([3, LONGEST + 2])


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        (SHAPES[0], {"ids": np.full(5, 50)}, "ids must be 5 numbers from 0 to 49"),
        (SHAPES[0], {"ids": np.full(5, -1)}, "ids must be 5 numbers from 0 to 49"),
        (SHAPES[0], {"ids": np.zeros(4, np.int64)}, "from 0"),
        (SHAPES[0], {"places": np.full(5, 513)}, "places must be 5 numbers from 0 to 512"),
        (SHAPES[0], {"places": np.zeros(4, np.int64)}, "places must be 5 numbers from 0 to 512"),
        (SHAPES[0], {"starts": np.array([0, 3, 3, 5], np.int32)}, "starts must rise"),
        (SHAPES[0], {"starts": np.array([0, 4], np.int32)}, "starts must rise"),
        (SHAPES[0], {"starts": np.array([1, 5], np.int32)}, "starts must rise"),
        (SHAPES[0], {"visible": np.array([2], np.int32)}, "visible must be 2 numbers"),
        (SHAPES[0], {"visible": np.array([2, 4], np.int32)}, "visible must be 2 numbers"),
        (SHAPES[0], {"visible": np.array([-1, 3], np.int32)}, "visible must be 2 numbers"),
        (MPNET, vars(replace(LONG, places=np.minimum(LONG.places, 9))), "515 tokens, of at most 514"),
        (SHAPES[7], vars(LONG), "515 tokens, of at most 513"),
    ],
)
def test_values_outside_the_tables_are_refused(
    widest: Machine, shape: Shape, changes: dict[str, np.ndarray], message: str
) -> None:
    encoder = CpuEncoder(widest, make_spec(shape), Format.F32)
    with pytest.raises(ValueError, match=message):
        run(encoder, replace(make_texts([2, 3]), **changes))


def test_a_closed_machine_is_refused(widest: Machine) -> None:
    encoder = CpuEncoder(widest, make_spec(SHAPES[0]), Format.F32)
    widest.close()
    widest.close()
    with pytest.raises(CpuKernelError, match="closed"):
        run(encoder, make_texts([3]))
