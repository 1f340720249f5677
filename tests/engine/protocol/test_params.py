"""PoolingParams of requests and PoolerConfig: accepted and rejected values, and defaults."""

import dataclasses
import json
from typing import Any

import pytest

from penstock.engine.protocol.config import PoolerConfig
from penstock.engine.protocol.errors import InvalidRequestError, UnsupportedTaskError
from penstock.engine.protocol.model_info import ModelInfo, ModelKind
from penstock.engine.protocol.params import VALID_PARAMETERS, PoolingParams
from penstock.engine.protocol.setting import json_object
from penstock.engine.protocol.tasks import ChunkedProcessingMode, PoolingTask, PoolingType

from ...tables import cases, table
from ..model_infos import make_info

EMBED, TOKEN_EMBED, SCORE = PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.SCORE
CLASSIFY, TOKEN_CLASSIFY = PoolingTask.CLASSIFY, PoolingTask.TOKEN_CLASSIFY


def model(kind: ModelKind = ModelKind.EMBEDDING, **changes: Any) -> ModelInfo:
    return make_info(kind, **{"hidden_size": 64, "num_labels": 3, **changes})


EMBEDDING = model()
MATRYOSHKA = model(is_matryoshka=True)
CLASSIFIER = model(ModelKind.SEQUENCE_CLASSIFIER)
CROSS_ENCODER = model(ModelKind.CROSS_ENCODER)
TOKENS = model(ModelKind.TOKEN_CLASSIFIER)
MODELS = {
    "embedding": EMBEDDING,
    "matryoshka": MATRYOSHKA,
    "listed": model(is_matryoshka=True, matryoshka_dimensions=(16, 32)),
    "classifier": CLASSIFIER,
    "cross-encoder": CROSS_ENCODER,
    "token classifier": TOKENS,
    "long text": model(enable_chunked_processing=True, max_embed_len=1000),
    "long text without limit": model(enable_chunked_processing=True),
    "steps": model(ModelKind.TOKEN_CLASSIFIER, token_pooling=PoolingType.STEP),
}


@cases(__file__, "name", "task", "fields")
def test_params_of_the_task_are_accepted(name: str, task: str, fields: dict[str, Any]) -> None:
    PoolingParams(**fields).verify(task, MODELS[name])


@cases(__file__, "name", "task", "param", "value", "more", "message")
def test_wrong_params_are_rejected(
    name: str, task: str, param: str, value: Any, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        PoolingParams(**{param: value}, **more).verify(task, MODELS[name])
    assert caught.value.param == param
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("task", PoolingTask)
@pytest.mark.parametrize("info", [EMBEDDING, CLASSIFIER, CROSS_ENCODER, TOKENS], ids=lambda info: info.kind.value)
def test_task_that_the_model_lacks_is_rejected(info: ModelInfo, task: PoolingTask) -> None:
    assert set(VALID_PARAMETERS) == set(PoolingTask)
    if task in info.tasks:
        assert PoolingParams().resolved(task, info).task is task
        return
    with pytest.raises(UnsupportedTaskError, match=f"does not support the task '{task.value}'; it supports") as caught:
        PoolingParams().verify(task, info)
    assert all(supported.value in caught.value.message for supported in info.tasks)
    assert "/v1/multi-vector" not in caught.value.message  # only for `embed` on a multi-vector model


def test_missing_params_default_to_the_model() -> None:
    for default in (True, False):
        params = PoolingParams().resolved(EMBED, model(normalize=default))
        assert (params.normalize, params.use_activation) == (default, default)
    params = PoolingParams(use_activation=True).resolved(EMBED, model(normalize=False))
    assert params.normalize is True
    info = model(dimensions=32)
    assert PoolingParams().resolved(EMBED, info).dimensions == 32
    assert PoolingParams(dimensions=64).resolved(EMBED, info).dimensions == 64
    info = model(ModelKind.SEQUENCE_CLASSIFIER, use_activation=False)
    assert PoolingParams().resolved(CLASSIFY, info).use_activation is False
    assert PoolingParams(use_activation=True).resolved(CLASSIFY, info).use_activation is True
    info = model(ModelKind.TOKEN_CLASSIFIER, token_pooling=PoolingType.STEP, step_tag_id=9, returned_token_ids=(1, 2))
    params = PoolingParams().resolved(TOKEN_CLASSIFY, info)
    assert (params.step_tag_id, params.returned_token_ids) == (9, (1, 2))
    params = PoolingParams(step_tag_id=0, returned_token_ids=(0,)).resolved(TOKEN_CLASSIFY, info)
    assert (params.step_tag_id, params.returned_token_ids) == (0, (0,))


def test_task_may_be_a_string() -> None:
    params = PoolingParams(task="embed", dimensions=8)  # type: ignore[arg-type]
    assert params.resolved("embed", MATRYOSHKA) == PoolingParams(dimensions=8).resolved(EMBED, MATRYOSHKA)
    with pytest.raises(InvalidRequestError, match="task is 'embed', but this call runs 'classify'"):
        params.verify("classify", CLASSIFIER)
    with pytest.raises(UnsupportedTaskError, match="There is no task 'embedding'; known are embed, classify"):
        params.verify("embedding", EMBEDDING)


# --pooler-config -------------------------------------------------------------------------------------------------


def test_pooler_config_is_read_from_json() -> None:
    fields = table(__file__, "test_pooler_config_is_read_from_json")
    enums = {"pooling_type": PoolingType.MEAN, "chunked_processing_mode": ChunkedProcessingMode.WINDOWS}
    config = PoolerConfig.from_dict(json_object(json.dumps(fields)))
    assert config == PoolerConfig(**{**fields, **enums, "logit_mean": 1.0, "returned_token_ids": (1, 0)})
    assert PoolerConfig.from_dict(json_object("{}")) == PoolerConfig()
    older = PoolerConfig.from_dict(json_object('{"logit_bias": 4.5, "logit_scale": 0.2}'))
    assert older == PoolerConfig(logit_mean=4.5, logit_sigma=5.0)
    assert dataclasses.replace(older, dimensions=8) == PoolerConfig(logit_mean=4.5, logit_sigma=5.0, dimensions=8)
    assert PoolerConfig.from_dict(json_object('{"normalize": null}')) == PoolerConfig()


@cases(__file__, "text", "message")
def test_wrong_pooler_config_is_rejected(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoolerConfig.from_dict(json_object(text))


@pytest.mark.parametrize(
    ("name", "pooling_type"),
    [("first", PoolingType.CLS), ("last_token", PoolingType.LAST), ("Attention-Weighted", PoolingType.ATTENTION)],
)
def test_pooler_config_takes_names_of_pooling_types(name: str, pooling_type: PoolingType) -> None:
    given: Any = {"pooling_type": name}
    assert PoolerConfig(**given) == PoolerConfig.from_dict(given) == PoolerConfig(pooling_type=pooling_type)
    assert type(PoolerConfig(**given).pooling_type) is PoolingType
    given = {"seq_pooling_type": name, "tok_pooling_type": "step", "task": "Embed", "returned_token_ids": [1]}
    config = PoolerConfig(**given)
    assert (config.seq_pooling_type, config.tok_pooling_type) == (pooling_type, PoolingType.STEP)
    assert (config.task, config.returned_token_ids) == (PoolingTask.EMBED, (1,))
