"""DeBERTa with the config.json of the hub equals transformers."""

import json

import numpy as np
import pytest
import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

from penstock.engine.executors.cpu.array_encoder import read_spec
from penstock.engine.executors.torch.packed_batch import PackedBatch
from penstock.engine.families.deberta import distance_buckets
from penstock.engine.protocol.errors import ModelLoadError
from penstock.engine.protocol.messages import TokenizedInput
from penstock.engine.protocol.model_info import ModelKind

from ...tables import table
from .families import BASES, EXECUTORS, assert_close, assert_rows_equal, first_row_logits, logits_of, rows_of

# Values of mixedbread-ai/mxbai-rerank-base-v1, in small.
HUB = BASES["deberta on the hub"]


@EXECUTORS
def test_reranker_with_long_texts_equals_transformers(executor, load, save_model, resolve, pack):
    folder, reference = save_model("DebertaV2ForSequenceClassification", **HUB)
    numbers = np.random.default_rng(0)
    sequences = [numbers.integers(3, 300, length).tolist() for length in (1, 33, 34, 65, 301, 512)]
    info = resolve(folder)
    assert (info.packed, info.kind, info.max_model_len) == (True, ModelKind.CROSS_ENCODER, 512)
    model = load(info)
    assert_rows_equal(model, reference, pack, sequences, 0 if executor == "cpu" else 1e-6)
    assert_close(first_row_logits(model, sequences, pack), logits_of(reference, sequences))


@EXECUTORS
def test_sequences_of_one_length_equal_each_alone(executor, load, save_model, resolve, pack):
    folder, reference = save_model("DebertaV2Model", **HUB)
    numbers = np.random.default_rng(1)
    sequences = [numbers.integers(3, 300, length).tolist() for length in (7, 7, 200, 200, 200, 7)]
    hidden = load(resolve(folder)).forward(pack(sequences)).hidden_states
    assert_close(hidden, rows_of(reference, sequences))


@EXECUTORS
def test_hidden_tokens_do_not_change_others(executor, load, save_model, resolve, pack):
    folder, reference = save_model("DebertaV2Model", **HUB)
    tokens = np.arange(3, 33, dtype=np.int32)
    batch = PackedBatch.build([TokenizedInput(tokens, num_masked=10)], torch.device("cpu"))
    hidden = load(resolve(folder)).forward(batch).hidden_states
    assert_close(hidden[:20], rows_of(reference, [tokens[:20].tolist()]))


@pytest.mark.parametrize(("num_buckets", "reach"), [(256, 512), (64, 512), (16, 160), (32, 20)])
def test_buckets_are_those_of_transformers(num_buckets, reach):
    expected = build_relative_position(torch.empty(600, 1), torch.empty(600, 1), num_buckets, reach)[0]
    distances = np.arange(600)[:, None] - np.arange(600)
    assert np.array_equal(distance_buckets(distances, num_buckets, reach), expected.numpy())


@pytest.mark.parametrize("change", table(__file__, "test_other_variant_runs_on_transformers"), ids=str)
def test_other_variant_runs_on_transformers(change, resolve, tmp_path):
    config = HUB | {"model_type": "deberta-v2", "architectures": ["DebertaV2Model"]} | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not resolve(tmp_path).packed


def test_unknown_term_is_rejected(save_config, resolve):
    folder = save_config("DebertaV2Model", **(HUB | {"pos_att_type": ["c2p", "p2p"]}))
    with pytest.raises(ModelLoadError, match="pos_att_type"):
        read_spec(resolve(folder))
