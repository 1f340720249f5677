"""Decoders through the native kernels give what transformers gives: whole and in chunks, with each option and head."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.engine.executors.cpu.array_encoder import read_spec
from penstock.engine.model_files.resolve import with_device
from penstock.engine.protocol.model_info import ClassifierMethod, ModelKind
from penstock.engine.protocol.multi_vector import MultiVector
from penstock.engine.protocol.tasks import PoolingType
from penstock.kernels.cpu import Format, Machine

from ..array_model import ArrayModel, load_model
from ..parity import assert_close, rows_of
from ..torch.test_decoders import CAUSAL, PLAIN, SIZES, TRAINED, TWO_WAY, rope

# Positions by the length of the text, and heads that turn in part.
ON_TORCH = {"rope-dynamic", "rope-longrope", "phi3-window-partial", "phi3-longrope-partial"}
NATIVE = [case for case in CAUSAL if case.id not in ON_TORCH]
FAMILIES = [*PLAIN, pytest.param("Phi3", SIZES | {"sliding_window": 8}, id="phi3-window")]


TEXTS = ["Hi", "The quick brown fox jumps over the lazy dog.", "A penstock leads water to a turbine. " * 12]


def info_of(info, dtype, machine, arithmetic="bfloat16"):
    """The same in another type; skips what the processor has not."""
    if dtype == "int8" and Format.INT8 not in machine.formats:
        pytest.skip("this processor has no int8 products")
    if dtype != "float32" and arithmetic == "bfloat16" and Format.DOT not in machine.formats:
        pytest.skip("this processor has no bfloat16 products")
    return replace(with_device(info, "cpu", dtype), arithmetic=None if dtype == "float32" else arithmetic)


def random_texts(lengths, seed=1):
    numbers = np.random.default_rng(seed)
    return [numbers.integers(3, SIZES["vocab_size"] - 1, length).tolist() for length in lengths]


@pytest.mark.parametrize(("family", "config"), NATIVE + TWO_WAY)
def test_hidden_states_equal_transformers(family, config, widest, save_model, resolve, pack, sequences):
    folder, reference = save_model(f"{family}Model", **config)
    model = load_model(resolve(folder), machine=widest)
    assert isinstance(model, ArrayModel)
    output = model.forward(pack(sequences))
    assert output.attention_weights is None
    assert_close(output.hidden_states, rows_of(reference, sequences))


@pytest.mark.parametrize(("family", "config"), [case for case in CAUSAL if case.id in ON_TORCH])
def test_what_the_native_kernels_have_not_is_left_to_torch(family, config, save_model, resolve):
    folder, _ = save_model(f"{family}Model", **config)
    assert read_spec(resolve(folder)) is None


@pytest.mark.parametrize(("family", "config"), NATIVE)
@pytest.mark.parametrize(
    ("dtype", "arithmetic", "size", "block_size"),
    [
        ("float32", None, 7, 16),
        ("bfloat16", "bfloat16", 64, 4),
        ("bfloat16", "float32", 50, 16),
        ("int8", "bfloat16", 33, 16),
        ("int8", "float32", 33, 16),
    ],
)
def test_slices_equal_the_whole_to_the_bit(
    family, config, dtype, arithmetic, size, block_size, widest, save_model, resolve, pack, sequences, run_chunked
):
    folder, _ = save_model(f"{family}Model", **config)
    model = load_model(info_of(resolve(folder), dtype, widest, arithmetic), machine=widest)
    assert model.cache_dtype is (torch.bfloat16 if arithmetic == "bfloat16" else torch.float32)
    whole = model.forward(pack(sequences)).hidden_states
    chunked = run_chunked(model, sequences, size, model.cache_dtype, block_size=block_size)
    assert torch.equal(torch.cat(chunked), whole)


@pytest.mark.parametrize(("family", "config"), NATIVE + TWO_WAY)
def test_the_same_is_kept_as_on_torch(family, config, widest, save_model, resolve):
    folder, _ = save_model(f"{family}Model", **config)
    info = resolve(folder)
    assert load_model(info, machine=widest).cache_spec == load_model(info).cache_spec


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_the_same_to_the_bit_in_any_batch_on_any_number_of_lanes(family, config, dtype, save_model, resolve, pack):
    folder, _ = save_model(f"{family}Model", **config)
    texts = random_texts((1, 2, 3, 5, 8, 13, 31, 47, 64, 90, 129, 150))
    expected = None
    for lanes in (1, 2, 3):
        with Machine(lanes) as machine:
            model = load_model(info_of(resolve(folder), dtype, machine), machine=machine)
            alone = [model.forward(pack([text])).hidden_states for text in texts]
            expected = alone if expected is None else expected
            assert all(map(torch.equal, alone, expected))
            for start in (0, 4, 9):
                rows = model.forward(pack(texts[start:])).hidden_states
                assert torch.equal(rows, torch.cat(expected[start:]))


@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 0.999), ("int8", 0.98)])
@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_fewer_bits_stay_close(family, config, dtype, least, widest, save_model, resolve, pack, sequences):
    """Of random weights that are four times as wide as trained ones, and rounding with them."""
    folder, _ = save_model(f"{family}Model", **config)
    exact = load_model(resolve(folder)).forward(pack(sequences)).hidden_states
    model = load_model(info_of(resolve(folder), dtype, widest), machine=widest)
    reduced = model.forward(pack(sequences)).hidden_states
    assert torch.cosine_similarity(reduced, exact, dim=1).min() > least


@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_heads_equal_transformers(family, config, widest, save_model, resolve, pack, sequences):
    folder, reference = save_model(f"{family}ForSequenceClassification", **config)
    model = load_model(resolve(folder), machine=widest)
    assert isinstance(model, ArrayModel)
    rows = model.forward(pack(sequences)).hidden_states.split([len(s) for s in sequences])
    logits = model.classify(torch.stack([r[-1] for r in rows]))
    assert_close(logits, torch.cat([reference(torch.tensor(s)[None]).logits for s in sequences]))
    starts = [torch.tensor(sequences[0][: end + 1])[None] for end in range(len(sequences[0]))]
    assert_close(model.classify_tokens(rows[0]), torch.cat([reference(start).logits for start in starts]))


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_token_heads_equal_transformers(family, widest, save_model, resolve, pack, sequences):
    folder, reference = save_model(f"{family}ForTokenClassification", **SIZES)
    model = load_model(resolve(folder), machine=widest)
    assert model.sequence_head is None
    logits = model.classify_tokens(model.forward(pack(sequences)).hidden_states)
    assert_close(logits, torch.cat([reference(torch.tensor(s)[None]).logits[0] for s in sequences]))


@pytest.mark.parametrize("method", list(ClassifierMethod))
@pytest.mark.parametrize(("is_tied", "scales"), [(True, {}), (False, {"logit_scale": 0.5, "logits_scaling": 4.0})])
def test_rerankers_that_answer_with_words(method, is_tied, scales, widest, save_model, resolve, pack, sequences):
    folder, _ = save_model("Qwen3ForCausalLM", **SIZES | {"tie_word_embeddings": is_tied})
    info = resolve(folder, hf_overrides=scales)
    fields = {"kind": ModelKind.CROSS_ENCODER, "classifier_tokens": (7, 4), "classifier_method": method}
    info = replace(info, **fields)
    native, on_torch = load_model(info, machine=widest), load_model(info)
    assert native.token_head is None
    rows = on_torch.forward(pack(sequences)).hidden_states[[0, 5, 70]]
    assert_close(native.classify(rows), on_torch.classify(rows))
    assert read_spec(replace(info, config={**info.config, "final_logit_softcapping": 3.0})) is None
    assert read_spec(replace(info, sequence_pooling=(PoolingType.ATTENTION,))) is None
    assert read_spec(replace(info, multi_vector=MultiVector())) is None


def test_nan_in_one_text_touches_no_other(widest, save_model, resolve, pack, run_chunked):
    folder, _ = save_model("LlamaModel", **SIZES)
    texts = random_texts((20, 90, 130, 7))
    model = load_model(resolve(folder), machine=widest)
    expected = model.forward(pack(texts)).hidden_states.split([len(text) for text in texts])
    tensors = load_file(folder / "model.safetensors")
    tensors["embed_tokens.weight"][199] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = load_model(resolve(folder), machine=widest)
    texts[1][5] = 199
    whole = model.forward(pack(texts)).hidden_states.split([len(text) for text in texts])
    for rows in (whole, run_chunked(model, texts, 33)):
        assert rows[1][5].isnan().all()
        assert all(torch.equal(rows[n], expected[n]) for n in (0, 2, 3))


def test_scaled_positions_run_to_the_last_one_of_a_long_text(widest, save_model, resolve, pack):
    config = rope({"rope_type": "linear", "factor": 4.0}, SIZES | {"max_position_embeddings": 700})
    folder, reference = save_model("LlamaModel", **config)
    texts = random_texts((700, 513))
    assert_close(
        load_model(resolve(folder), machine=widest).forward(pack(texts)).hidden_states, rows_of(reference, texts)
    )


def test_trained_model_equals_transformers(model_folder, widest, resolve, pack, run_chunked):
    folder = model_folder(TRAINED)
    reference = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    sequences = tokenizer(TEXTS)["input_ids"]
    model = load_model(resolve(folder), machine=widest)
    expected = rows_of(reference, sequences)
    rows = model.forward(pack(sequences)).hidden_states
    assert_close(rows, expected)
    assert torch.equal(torch.cat(run_chunked(model, sequences, 50)), rows)


@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 0.9995), ("int8", 0.99)])
def test_fewer_bits_stay_close_to_a_trained_model(dtype, least, model_folder, widest, resolve, pack):
    folder = model_folder(TRAINED)
    sequences = transformers.AutoTokenizer.from_pretrained(folder)(TEXTS)["input_ids"]
    exact = load_model(resolve(folder)).forward(pack(sequences)).hidden_states
    model = load_model(info_of(resolve(folder), dtype, widest), machine=widest)
    assert torch.cosine_similarity(model.forward(pack(sequences)).hidden_states, exact, dim=1).min() > least
