"""EuroBERT gives what transformers gives, on both executors."""

import pytest
import torch

from penstock.engine.protocol.tasks import PoolingType

from ..array_model import ArrayModel, load_model
from ..parity import DECODER_SIZES as SIZES, assert_close, rows_of

HUB = {
    "architectures": ["EuroBertModel"],
    "auto_map": {"AutoModel": "modeling_eurobert.EuroBertModel"},
    "rope_parameters": None,
    "rope_theta": 250_000,
}


@pytest.mark.parametrize("executor", ["cpu", "torch"])
@pytest.mark.parametrize("change", [{}, HUB, {"rope_parameters": None}], ids=["saved", "hub", "default-theta"])
def test_hidden_states_equal_transformers(change, executor, widest, save_model, resolve, pack, sequences):
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 250_000.0}}
    folder, reference = save_model("EuroBertModel", **SIZES, **theta)
    info = resolve(folder, hf_overrides=change)
    assert (info.packed, info.is_causal, info.sequence_pooling) == (True, False, (PoolingType.MEAN,))
    model = load_model(info, machine=widest if executor == "cpu" else None, trust_remote_code=True)
    assert isinstance(model, ArrayModel) is (executor == "cpu")
    hidden = model.forward(pack(sequences)).hidden_states
    assert_close(hidden, rows_of(reference, sequences))
    alone = torch.cat([model.forward(pack([s])).hidden_states for s in sequences])
    assert_close(hidden, alone, tolerance=0 if executor == "cpu" else 1e-6)


@pytest.mark.parametrize("executor", ["cpu", "torch"])
@pytest.mark.parametrize("pooling", ["bos", "mean"])
def test_sequence_head_equals_transformers(pooling, executor, widest, save_model, resolve, pack, sequences):
    folder, reference = save_model("EuroBertForSequenceClassification", **SIZES, classifier_pooling=pooling)
    info = resolve(folder)
    assert info.sequence_pooling == (PoolingType.CLS if pooling == "bos" else PoolingType.MEAN,)
    model = load_model(info, machine=widest if executor == "cpu" else None)
    hidden = model.forward(pack(sequences)).hidden_states.split([len(s) for s in sequences])
    pooled = torch.stack([rows.mean(0) if pooling == "mean" else rows[0] for rows in hidden])
    expected = [reference(torch.tensor([s]), torch.ones(1, len(s), dtype=torch.long)).logits for s in sequences]
    assert_close(model.classify(pooled), torch.cat(expected))


def test_token_head_equals_transformers(widest, save_model, resolve, pack, sequences):
    folder, reference = save_model("EuroBertForTokenClassification", **SIZES)
    model = load_model(resolve(folder), machine=widest)
    logits = model.classify_tokens(model.forward(pack(sequences)).hidden_states)
    assert_close(logits, torch.cat([reference(torch.tensor([s])).logits[0] for s in sequences]))


def test_classifier_that_pools_logits_runs_on_transformers(save_model, resolve):
    folder, _ = save_model("EuroBertForSequenceClassification", **SIZES)
    assert not resolve(folder).packed
