"""Models without a family run through transformers, packed if that gives the right rows, otherwise padded."""

import json
import logging

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.core.loading.weights_loader import load_model
from penstock.engine.executors.torch.transformers.model import TransformersModel
from penstock.engine.executors.torch.transformers.network import Network, Sharing
from penstock.engine.protocol.errors import UnsupportedModelError, UnsupportedTaskError, WeightError

from ..families import BASES, assert_close, assert_rows_equal, logits_of, models, relative_error

SIZES, ALBERT, HELIUM, CONVBERT = (BASES[name] for name in ("unpacked", "albert", "helium", "convbert"))
GPT2, T5, DEBERTA = (BASES[name] for name in ("gpt2", "t5", "unpacked deberta"))
EMBEDDERS = models("models_without_a_family")


@pytest.mark.parametrize(("class_name", "config", "is_packed"), EMBEDDERS)
def test_hidden_states_equal_transformers(class_name, config, is_packed, save_model, resolve, pack, sequences, caplog):
    folder, reference = save_model(class_name, **config)
    with caplog.at_level(logging.INFO, "penstock.engine"):
        model = load_model(resolve(folder))
    assert isinstance(model, TransformersModel)
    lines = [r.getMessage() for r in caplog.records if r.name == "penstock.engine"]
    assert len(lines) == 1
    assert ("runs packed" if is_packed else "runs padded") in lines[0]
    assert_rows_equal(model, reference, pack, sequences, 1e-6)
    with pytest.raises(UnsupportedTaskError):
        model.forward(pack(sequences), need_attention=True)


EQUAL, ALONE = "only sequences of equal length share a forward", "each sequence runs alone"


@pytest.mark.parametrize(("class_name", "config", "note"), models("rows_do_not_depend_on_the_batch"))
def test_rows_do_not_depend_on_the_batch(class_name, config, note, save_model, resolve, pack, caplog):
    folder, _ = save_model(class_name, **config)
    model = load_model(resolve(folder))
    assert (EQUAL in caplog.text, ALONE in caplog.text) == (EQUAL in note, ALONE in note)
    numbers = np.random.default_rng(1)
    sequences = [numbers.integers(3, 200, n).tolist() for n in (4, 5, 5, 9, 10, 10, 11, 70, 72, 72, 80, 90, 125, 130)]

    def results(batch):
        output = model.forward(pack(batch))
        return output.hidden_states if output.logits is None else output.logits

    alone = torch.cat([results([s]) for s in sequences])
    assert relative_error(results(sequences), alone) <= 1e-5


def test_similar_lengths_share_a_padded_forward() -> None:
    lengths = [4, 5, 5, 6, 8, 10, 10]
    found = [[last - first for first, last in sharing.groups(lengths)] for sharing in Sharing]
    assert found == [[3, 1, 3], [1, 2, 1, 1, 2], [1] * 7]
    assert list(Sharing.LIKE.groups([])) == []


def test_network_that_mixes_its_batch_runs_one_sequence(save_model, resolve, pack, monkeypatch, caplog):
    folder, _ = save_model("T5EncoderModel", **T5)
    call = Network._call
    monkeypatch.setattr(Network, "_call", lambda self, a, added: call(self, a, added) + 0.01 * len(a["input_ids"]))
    model = load_model(resolve(folder))
    assert ALONE in caplog.text
    rows = model.forward(pack([[5, 6], [5, 6]])).hidden_states
    torch.testing.assert_close(rows[:2], model.forward(pack([[5, 6]])).hidden_states, rtol=0, atol=1e-6)


def test_token_types_reach_the_model(save_model, resolve, pack, sequences):
    folder, reference = save_model("AlbertModel", **ALBERT)
    boundaries = [len(s) // 2 for s in sequences]
    hidden = load_model(resolve(folder)).forward(pack(sequences, boundaries)).hidden_states
    expected = [
        reference(torch.tensor(s)[None], token_type_ids=(torch.arange(len(s)) >= (b or len(s))).long()[None])
        for s, b in zip(sequences, boundaries, strict=True)
    ]
    assert_close(hidden, torch.cat([e.last_hidden_state[0] for e in expected]))


@pytest.mark.parametrize(
    ("class_name", "config"), [("HeliumForSequenceClassification", HELIUM), ("GPT2ForSequenceClassification", GPT2)]
)
def test_score_head_runs_after_pooling(class_name, config, save_model, resolve, pack, sequences):
    folder, reference = save_model(class_name, **config)
    model = load_model(resolve(folder))
    output = model.forward(pack(sequences))
    assert output.logits is None
    last = torch.stack([rows[-1] for rows in output.hidden_states.split([len(s) for s in sequences])])
    assert_close(model.classify(last), torch.cat([reference(torch.tensor(s)[None]).logits for s in sequences]))


@pytest.mark.parametrize(("family", "config"), [("Albert", ALBERT), ("Deberta", DEBERTA)], ids=["packed", "padded"])
def test_logits_equal_transformers(family, config, save_model, resolve, pack, sequences):
    folder, reference = save_model(f"{family}ForSequenceClassification", **config)
    model = load_model(resolve(folder))
    logits = model.forward(pack(sequences)).logits
    assert logits.dtype == torch.float32
    assert_close(logits, logits_of(reference, sequences))
    with pytest.raises(UnsupportedTaskError):
        model.classify(torch.zeros(1, 48))
    folder, reference = save_model(f"{family}ForTokenClassification", **config)
    model = load_model(resolve(folder))
    logits = model.classify_tokens(model.forward(pack(sequences)).hidden_states)
    assert_close(logits, torch.cat([reference(torch.tensor(s)[None]).logits[0] for s in sequences]))


def test_missing_weight_is_named(save_model, resolve):
    folder, _ = save_model("HeliumModel", **HELIUM)
    tensors = load_file(folder / "model.safetensors")
    del tensors["layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightError, match=r"'layers\.1\.mlp\.up_proj\.weight'"):
        load_model(resolve(folder))


@pytest.mark.parametrize(("class_name", "config", "change", "message"), models("unsupported_model_is_rejected"))
def test_unsupported_model_is_rejected(class_name, config, change, message, save_model, resolve):
    folder, _ = save_model(class_name, **config)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | change))
    (folder / "modeling_own.py").write_text("raise SystemExit('this code must not run')")
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(resolve(folder))
