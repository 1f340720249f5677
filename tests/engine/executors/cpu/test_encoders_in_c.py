"""The native kernels give what transformers gives, for every family that runs through them, and the same to the bit
alone and in any batch, on any number of lanes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.executors.cpu.array_encoder import read_spec
from penstock.engine.executors.torch.packed_batch import PackedBatch
from penstock.engine.protocol.errors import ModelLoadError, UnsupportedTaskError
from penstock.engine.protocol.request import TokenizedInput
from penstock.kernels.cpu import Format

from ..array_model import ArrayModel, load_model
from ..parity import assert_close
from ..torch.test_encoders import FAMILIES, SIZES, arguments, boundaries_of


@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_hidden_states_equal_transformers(family, config, machine, save_model, resolve, pack, sequences):
    folder, reference = save_model(f"{family}Model", **config)
    boundaries = boundaries_of(family, config, sequences)
    model = load_model(resolve(folder), machine=machine)
    assert isinstance(model, ArrayModel)
    output = model.forward(pack(sequences, boundaries))
    expected = [reference(**arguments(s, b)).last_hidden_state[0] for s, b in zip(sequences, boundaries, strict=True)]
    assert output.attention_weights is None
    assert_close(output.hidden_states, torch.cat(expected))


@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_attention_of_the_first_token_equals_transformers(family, config, widest, save_model, resolve, pack, sequences):
    folder, reference = save_model(f"{family}Model", **config)
    output = load_model(resolve(folder), machine=widest).forward(pack(sequences), need_attention=True)
    reference.set_attn_implementation("eager")
    expected = [reference(**arguments(s, 0), output_attentions=True).attentions[-1][0, :, 0].t() for s in sequences]
    assert_close(output.attention_weights, torch.cat(expected))


@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_heads_equal_transformers(family, config, widest, save_model, resolve, pack, sequences):
    folder, reference = save_model(f"{family}ForSequenceClassification", **config)
    model = load_model(resolve(folder), machine=widest)
    hidden = model.forward(pack(sequences)).hidden_states.split([len(s) for s in sequences])
    is_mean = config.get("classifier_pooling") == "mean"
    pooled = torch.stack([rows.mean(0) if is_mean else rows[0] for rows in hidden])
    assert_close(model.classify(pooled), torch.cat([reference(**arguments(s, 0)).logits for s in sequences]))
    with pytest.raises(UnsupportedTaskError):
        model.classify_tokens(pooled)
    folder, reference = save_model(f"{family}ForTokenClassification", **config)
    model = load_model(resolve(folder), machine=widest)
    logits = model.classify_tokens(model.forward(pack(sequences)).hidden_states)
    assert_close(logits, torch.cat([reference(**arguments(s, 0)).logits[0] for s in sequences]))
    with pytest.raises(UnsupportedTaskError):
        model.classify(logits)


@pytest.mark.parametrize(
    ("dtype", "arithmetic"),
    [("float32", None), ("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("int8", "float32"), ("int8", "bfloat16")],
)
@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_the_same_to_the_bit_in_any_batch(family, config, dtype, arithmetic, widest, save_model, resolve, pack):
    if dtype == "int8" and Format.INT8 not in widest.formats:
        pytest.skip("this processor has no int8 products")
    if arithmetic == "bfloat16" and Format.DOT not in widest.formats:
        pytest.skip("this processor has no bfloat16 products")
    folder, _ = save_model(f"{family}Model", **config)
    model = load_model(replace(resolve(folder, dtype), arithmetic=arithmetic), machine=widest)
    numbers = np.random.default_rng(1)
    texts = [
        numbers.integers(3, SIZES["vocab_size"], n).tolist() for n in (1, 2, 3, 5, 8, 13, 31, 47, 64, 90, 129, 150)
    ]
    alone = [model.forward(pack([text])).hidden_states for text in texts]
    for _ in range(6):
        order = numbers.permutation(len(texts))[: numbers.integers(2, len(texts) + 1)]
        rows = model.forward(pack([texts[i] for i in order])).hidden_states
        assert torch.equal(rows, torch.cat([alone[i] for i in order]))


@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_bfloat16_stays_close(family, config, machine, save_model, resolve, pack, sequences):
    folder, _ = save_model(f"{family}Model", **config)
    exact = load_model(resolve(folder)).forward(pack(sequences)).hidden_states
    for arithmetic in ("float32", "bfloat16") if Format.DOT in machine.formats else ("float32",):
        info = replace(resolve(folder, "bfloat16"), arithmetic=arithmetic)
        reduced = load_model(info, machine=machine).forward(pack(sequences)).hidden_states
        assert torch.cosine_similarity(reduced, exact, dim=1).min() > 0.999


def test_nan_in_one_text_touches_no_other(widest, save_model, resolve, pack, sequences):
    folder, _ = save_model("BertModel", **SIZES)
    model = load_model(resolve(folder), machine=widest)
    sequences = [[min(token, 198) for token in sequence] for sequence in sequences]
    expected = model.forward(pack(sequences)).hidden_states
    tensors = load_file(folder / "model.safetensors")
    tensors["embeddings.word_embeddings.weight"][199] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = load_model(resolve(folder), machine=widest)
    broken = [[199, *sequences[0]], *sequences]
    rows = model.forward(pack(broken)).hidden_states
    assert rows[: len(broken[0])].isnan().all()
    assert torch.equal(rows[len(broken[0]) :], expected)


@pytest.mark.parametrize(("family", "config"), [FAMILIES[0], FAMILIES[11]])
def test_hidden_tokens_are_not_attended_to(family, config, widest, save_model, resolve):
    folder, _ = save_model(f"{family}Model", **config)
    numbers = np.random.default_rng(2)
    inputs = [
        TokenizedInput(numbers.integers(3, 200, length).astype(np.int32), num_hidden=hidden)
        for length, hidden in ((9, 4), (12, 0), (9, 8), (30, 10))
    ]
    batch = PackedBatch.build(inputs, torch.device("cpu"))
    expected = load_model(resolve(folder)).forward(batch).hidden_states
    assert_close(load_model(resolve(folder), machine=widest).forward(batch).hidden_states, expected)


def test_an_activation_that_is_not_there_runs_through_torch(widest, save_model, resolve, pack, sequences):
    folder, reference = save_model("BertModel", **SIZES, hidden_act="mish")
    model = load_model(resolve(folder), machine=widest)
    assert not isinstance(model, ArrayModel)
    expected = [reference(**arguments(s, 0)).last_hidden_state[0] for s in sequences]
    assert_close(model.forward(pack(sequences)).hidden_states, torch.cat(expected))


def test_an_id_without_a_row_is_refused(widest, save_model, resolve, pack):
    folder, _ = save_model("BertModel", **SIZES)
    model = load_model(resolve(folder), machine=widest)
    with pytest.raises(ValueError, match="from 0 to 199"):
        model.forward(pack([[5, 200]]))


@pytest.mark.parametrize(
    ("class_name", "config"),
    [
        ("ModernBertModel", FAMILIES[11].values[1] | {"num_attention_heads": 16}),
        ("BertModel", SIZES | {"hidden_size": 4100}),
    ],
)
def test_heads_that_the_native_kernels_have_not_are_left_to_torch(class_name, config, save_model, resolve):
    """Rotary heads of 3 columns, which turn in pairs, and heads of 1,025, too many for the stack of a lane."""
    folder, _ = save_model(class_name, **(SIZES if class_name == "BertModel" else FAMILIES[11].values[1]))
    info = resolve(folder, hf_overrides=config)
    assert read_spec(info) is None


def test_a_window_of_less_than_nothing_is_refused(save_model, resolve):
    folder, _ = save_model("ModernBertModel", **FAMILIES[11].values[1])
    with pytest.raises(ModelLoadError, match="local_attention is -6"):
        read_spec(resolve(folder, hf_overrides={"local_attention": -6}))
