"""JinaBERT v2 in both layouts of the hub equals a reference."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from penstock.engine.executors.cpu.array_encoder import read_spec
from penstock.engine.protocol.errors import ModelLoadError

from ...tables import table
from .families import EXECUTORS, assert_close, first_row_logits, relative_error
from .jina_bert import HUB, D, Reference, make_weights

BOTH_LAYOUTS = pytest.mark.parametrize("has_norms", [False, True], ids=["plain", "qk-post-norm"])


@pytest.fixture
def save(tmp_path):
    """Saves random weights with a config.json of the hub, and returns (folder, weights without prefix)."""

    def save_hub(has_norms, changes=None, prefix="", **tensors):
        weights = make_weights(has_norms) | tensors
        (tmp_path / "config.json").write_text(json.dumps(HUB | (changes or {})))
        names = {name: name if name.startswith("classifier") else prefix + name for name in weights}
        save_file({names[name]: tensor for name, tensor in weights.items()}, tmp_path / "model.safetensors")
        return tmp_path, weights

    return save_hub


@EXECUTORS
@BOTH_LAYOUTS
@pytest.mark.parametrize("prefix", ["", "bert."])
@pytest.mark.parametrize("feed_forward", ["geglu", "reglu"])
def test_hidden_states_equal_reference(executor, has_norms, prefix, feed_forward, load, save, resolve, pack, sequences):
    folder, weights = save(has_norms, {"feed_forward_type": feed_forward}, prefix)
    reference = Reference(weights, F.relu if feed_forward == "reglu" else F.gelu)
    info = resolve(folder, trust_remote_code=bool(prefix))  # the code of the hub does not run
    assert (info.packed, info.max_model_len, info.is_causal) == (True, 160, False)
    boundaries = [len(sequence) // 2 for sequence in sequences]
    model = load(info, trust_remote_code=bool(prefix))
    hidden = model.forward(pack(sequences, boundaries)).hidden_states
    expected = [reference(s, b) for s, b in zip(sequences, boundaries, strict=True)]
    assert_close(hidden.double(), torch.cat(expected))
    alone = [model.forward(pack([s], [b])).hidden_states for s, b in zip(sequences, boundaries, strict=True)]
    assert relative_error(hidden, torch.cat(alone)) <= (0 if executor == "cpu" else 1e-6)


@EXECUTORS
@BOTH_LAYOUTS
def test_attention_of_first_token_equals_reference(executor, has_norms, load, save, resolve, pack, sequences):
    folder, weights = save(has_norms)
    reference = Reference(weights)
    actual = load(resolve(folder)).forward(pack(sequences), need_attention=True).attention_weights
    expected = [reference(sequence) is not None and reference.last_probabilities[:, 0].t() for sequence in sequences]
    assert_close(actual.double(), torch.cat(expected))


@EXECUTORS
def test_reranker_equals_reference(executor, load, save, resolve, pack, sequences):
    classifier = {"classifier.weight": torch.randn(1, D), "classifier.bias": torch.randn(1)}
    changes = {"architectures": ["JinaBertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    folder, weights = save(False, changes, "bert.", **classifier)
    reference = Reference(weights)
    logits = first_row_logits(load(resolve(folder)), sequences, pack)
    firsts = torch.stack([reference(sequence)[0] for sequence in sequences])
    expected = reference.linear("classifier", reference.linear("pooler.dense", firsts).tanh())
    assert_close(logits.double(), expected)


@EXECUTORS
def test_class_in_auto_map_is_recognised(executor, load, save, resolve):
    folder, _ = save(False, {"architectures": ["BertModel"]})
    assert resolve(folder).packed
    load(resolve(folder))


@pytest.mark.parametrize(("changes", "message"), table(__file__, "jina_bert_other_variant_is_rejected"))
def test_other_variant_is_rejected(changes, message, save, resolve):
    folder, _ = save(False, changes)
    with pytest.raises(ModelLoadError, match=message):
        read_spec(resolve(folder))
