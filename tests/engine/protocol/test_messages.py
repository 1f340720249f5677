"""Messages survive encoding and decoding."""

from __future__ import annotations

import pytest

from penstock.engine.protocol import messages as m
from penstock.engine.protocol.config import EngineConfig, PoolerConfig, SchedulerConfig
from penstock.engine.protocol.model_info import DenseSpec, ModelInfo, ModelKind, TokenizerSpec
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.tasks import PoolingTask, PoolingType

INFO = ModelInfo(
    name="n",
    path="p",
    architecture="BertModel",
    model_type="bert",
    packed=True,
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
        m.ClientMessage(
            client_number=3,
            params=[PoolingParams(dimensions=3, task=PoolingTask.EMBED)],
            clients=[("", ""), ("me", "mine")],
            requests=[m.RequestHeader(1, 0, 1, -2, 0.5, 1)],
            inputs=m.InputColumns([4], [1], [2], [3], [-1]),
            query_shapes=[(2, 3)],
            cancels=[4],
            clears=[5],
        ),
        m.Stop(),
    ],
)
def test_messages_to_the_core_survive_the_wire(message: m.ToCore) -> None:
    assert m.decode_to_core(m.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        m.ModelReady(INFO, TokenizerSpec(json="{}", truncation_side="left", uses_token_types=True)),
        m.LoadFailed("WeightError", "no such tensor"),
        m.StepResults([m.BlockHeader("embedding", 3, [4], [0], [True], widths=[2])], 12, 0.5, finished=[(4, 0.5, 1.0)]),
        m.RequestFailed(1, "ModelExecutionError", "boom"),
    ],
)
def test_messages_from_the_core_survive_the_wire(message: m.FromCore) -> None:
    assert m.decode_from_core(m.encode(message)) == message
