"""What is sent is what arrives."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.engine.protocol import messages as m
from penstock.engine.protocol.config import EngineConfig, SchedulerConfig
from penstock.engine.protocol.messages import pack_inputs, pack_rows, unpack_inputs, unpack_rows
from penstock.engine.protocol.model_info import DenseSpec, ModelInfo, ModelKind
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.pooler_config import PoolerConfig
from penstock.engine.protocol.request import TokenizedInput
from penstock.engine.protocol.tasks import PoolingTask, PoolingType

INFO = ModelInfo(
    name="n",
    path="p",
    architecture="BertModel",
    model_type="bert",
    native=True,
    kind=ModelKind.EMBEDDING,
    tasks=(PoolingTask.EMBED, PoolingTask.SCORE),
    hidden_size=8,
    vocab_size=10,
    max_model_len=16,
    embedding_size=4,
    sequence_pooling=(PoolingType.CLS, PoolingType.MEAN),
    dense=(DenseSpec(folder="2_Dense", in_features=16, out_features=4, bias=True, activation="Tanh"),),
    prompts={"query": "q: "},
    config={"nested": {"list": [1, 2.5, None, "x"]}},
)
CONFIG = EngineConfig(
    model="m",
    pooler_config=PoolerConfig(pooling_type=PoolingType.STEP, returned_token_ids=(1, 2)),
    hf_overrides={"a": [1]},
    scheduler=SchedulerConfig(max_num_seqs=3),
)


@pytest.mark.parametrize(
    "message",
    [
        m.Start(CONFIG, "DEBUG"),
        m.Turn(
            [m.Submit(7, 0, 2, -1, 2.5), m.Cancel(3), m.ClearPrefixes(4)],
            [PoolingParams(dimensions=3, task=PoolingTask.EMBED)],
        ),
        m.Stop(),
    ],
)
def test_messages_to_the_core_survive_the_wire(message: m.ToCore) -> None:
    assert m.decode_to_core(m.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        m.Ready(INFO, m.TokenizerSpec(json="{}", truncation_side="left", uses_token_types=True)),
        m.LoadFailed("WeightError", "no such tensor"),
        m.Rows([m.RowHeader(1, 0, "embedding", (4,))], 12, 0.5),
        m.Failed(1, "ModelExecutionError", "boom"),
    ],
)
def test_messages_from_the_core_survive_the_wire(message: m.FromCore) -> None:
    assert m.decode_from_core(m.encode(message)) == message


@pytest.mark.parametrize("lengths", [[1], [3, 1, 7], [2] * 100])
def test_inputs_survive_their_frames(lengths: list[int]) -> None:
    rng = np.random.default_rng(0)
    inputs = [TokenizedInput(rng.integers(0, 99, n).astype(np.int32), n // 2, n // 3) for n in lengths]
    received = unpack_inputs(bytes(pack_inputs(inputs)))
    for sent, got in zip(inputs, received, strict=True):
        assert got.token_ids.tolist() == sent.token_ids.tolist()
        assert (got.type_boundary, got.num_prompt_tokens) == (sent.type_boundary, sent.num_prompt_tokens)


def test_queries_of_inputs_survive_and_are_sent_once() -> None:
    queries = [np.random.default_rng(n).normal(size=(n, 4)).astype(np.float32) for n in (3, 7)]
    order = [queries[0], None, queries[1], queries[0]]
    inputs = [TokenizedInput(np.arange(2, dtype=np.int32), num_hidden=i, query=q) for i, q in enumerate(order)]
    frame = bytes(pack_inputs(inputs))
    received = unpack_inputs(frame)
    assert [got.num_hidden for got in received] == [0, 1, 2, 3]
    for got, query in zip(received, order, strict=True):
        assert got.query is None if query is None else np.array_equal(got.query, query)
    assert received[0].query is received[3].query
    assert len(frame) == 4 * (2 + 5 * 4 + 2 * 2 + 2 * 4 + (3 + 7) * 4)


def test_rows_of_any_shape_survive_their_frame() -> None:
    arrays = [np.arange(4.0), np.ones((2, 3)), np.zeros((0, 5)), np.array([7.0])]
    headers = [m.RowHeader(i, 0, "x", a.shape) for i, a in enumerate(arrays)]
    for sent, got in zip(arrays, unpack_rows(headers, bytes(pack_rows(arrays))), strict=True):
        assert got.dtype == np.float32
        assert got.shape == sent.shape
        assert np.array_equal(got, sent)
