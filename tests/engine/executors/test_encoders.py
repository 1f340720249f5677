"""Encoders on both executors give the results of transformers."""

import numpy as np
import pytest
import torch

from penstock.engine.executors.torch.packed_batch import PackedBatch
from penstock.engine.protocol.errors import UnsupportedModelError, UnsupportedTaskError
from penstock.engine.protocol.messages import TokenizedInput
from penstock.engine.protocol.tasks import PoolingType

from .families import (
    DECODER_SIZES,
    ENCODER_SIZES as SIZES,
    ENCODERS,
    MODERNBERT,
    arguments,
    assert_close,
    boundaries_of,
    chosen,
    logits_of,
    models,
    on_executors,
    relative_error,
    rows_of,
)


@on_executors(ENCODERS)
def test_hidden_states_equal_transformers(executor, family, config, load, save_model, resolve, pack, sequences):
    folder, reference = save_model(f"{family}Model", **config)
    boundaries = boundaries_of(family, config, sequences)
    model = load(resolve(folder))
    output = model.forward(pack(sequences, boundaries))
    expected = [reference(**arguments(s, b)).last_hidden_state[0] for s, b in zip(sequences, boundaries, strict=True)]
    assert output.attention_weights is None
    assert output.logits is None
    assert_close(output.hidden_states, torch.cat(expected))
    alone = [model.forward(pack([s], [b])).hidden_states for s, b in zip(sequences, boundaries, strict=True)]
    assert relative_error(output.hidden_states, torch.cat(alone)) <= (0 if executor == "cpu" else 1e-6)


@on_executors(ENCODERS)
def test_heads_equal_transformers(executor, family, config, load, save_model, resolve, pack, sequences):
    folder, reference = save_model(f"{family}ForSequenceClassification", **config)
    model = load(resolve(folder))
    hidden = model.forward(pack(sequences)).hidden_states.split([len(s) for s in sequences])
    is_mean = config.get("classifier_pooling") == "mean"
    logits = model.classify(torch.stack([rows.mean(0) if is_mean else rows[0] for rows in hidden]))
    assert logits.dtype == torch.float32
    assert_close(logits, logits_of(reference, sequences))
    with pytest.raises(UnsupportedTaskError):
        model.classify_tokens(hidden[0])
    folder, reference = save_model(f"{family}ForTokenClassification", **config)
    model = load(resolve(folder))
    logits = model.classify_tokens(model.forward(pack(sequences)).hidden_states)
    assert_close(logits, torch.cat([reference(**arguments(s)).logits[0] for s in sequences]))
    with pytest.raises(UnsupportedTaskError):
        model.classify(logits)


@on_executors(ENCODERS, not_on_cpu={"eurobert", "eurobert-mean"})
def test_attention_of_first_token_equals_transformers(
    executor, family, config, load, save_model, resolve, pack, sequences
):
    folder, reference = save_model(f"{family}Model", **config)
    output = load(resolve(folder)).forward(pack(sequences), need_attention=True)
    reference.set_attn_implementation("eager")
    expected = [reference(**arguments(s), output_attentions=True).attentions[-1][0, :, 0].t() for s in sequences]
    assert output.attention_weights.dtype == torch.float32
    assert_close(output.attention_weights, torch.cat(expected))


@on_executors(chosen("roberta", "mpnet"))
def test_padding_token_in_text_shifts_positions(executor, family, config, load, save_model, resolve, pack):
    folder, reference = save_model(f"{family}Model", **config)
    sequences = [[7, 1, 9], [1, 1, 8, 1, 5, 6], [4, 5]]
    assert_close(load(resolve(folder)).forward(pack(sequences)).hidden_states, rows_of(reference, sequences))


@pytest.mark.parametrize("executor", ["cpu"])
@pytest.mark.parametrize(("family", "config"), chosen("bert", "modernbert"))
def test_hidden_tokens_on_cpu_equal_torch(executor, family, config, load, load_on_torch, save_model, resolve):
    folder, _ = save_model(f"{family}Model", **config)
    numbers = np.random.default_rng(2)
    inputs = [
        TokenizedInput(numbers.integers(3, 200, length).astype(np.int32), num_masked=hidden)
        for length, hidden in ((9, 4), (12, 0), (9, 8), (30, 10))
    ]
    batch = PackedBatch.build(inputs, torch.device("cpu"))
    expected = load_on_torch(resolve(folder)).forward(batch).hidden_states
    assert_close(load(resolve(folder)).forward(batch).hidden_states, expected)


YARN = {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1e4}}}


@pytest.mark.parametrize(
    ("class_name", "config", "override", "message"),
    [("BertModel", SIZES, {"hidden_act": "swiglu"}, "'swiglu'"), ("ModernBertModel", MODERNBERT, YARN, "'yarn'")],
)
def test_unknown_option_is_named(class_name, config, override, message, load_on_torch, save_model, resolve):
    folder, _ = save_model(class_name, **config)
    with pytest.raises(UnsupportedModelError, match=message):
        load_on_torch(resolve(folder, hf_overrides=override))


@pytest.mark.parametrize("executor", ["torch", "cpu"])
@pytest.mark.parametrize(("family", "config", "older"), models("older_configs_of_encoders"))
def test_older_config_equals_transformers(executor, family, config, older, load, save_model, resolve, pack, sequences):
    folder, reference = save_model(f"{family}Model", **config)
    info = resolve(folder, hf_overrides={"rope_parameters": None, **older})
    hidden = load(info, trust_remote_code=True).forward(pack(sequences)).hidden_states
    assert_close(hidden, rows_of(reference, sequences))


@pytest.mark.parametrize(
    ("pooling", "expected"), [("bos", (PoolingType.CLS,)), ("mean", (PoolingType.MEAN,)), ("late", None)]
)
def test_eurobert_classifier_pools_as_configured(pooling, expected, save_model, resolve):
    folder, _ = save_model("EuroBertForSequenceClassification", **DECODER_SIZES, classifier_pooling=pooling)
    info = resolve(folder)
    assert info.packed == (expected is not None), "a classifier that pools logits runs on transformers"
    if expected is not None:
        assert (info.is_causal, info.sequence_pooling) == (False, expected)
