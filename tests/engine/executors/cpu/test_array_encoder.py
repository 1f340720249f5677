"""Models that the CPU executor does not run are left to torch."""

from dataclasses import replace

import pytest

from penstock.engine.executors.cpu.array_encoder import read_spec
from penstock.engine.protocol.model_info import ModelKind
from penstock.engine.protocol.multi_vector import MultiVector
from penstock.engine.protocol.tasks import PoolingType

from ..families import DECODER_SIZES, ENCODER_SIZES, NOT_ON_CPU, chosen, models

OTHERS = [
    *models("left_to_torch"),
    *((f"{case.values[0]}Model", case.values[1]) for case in chosen(*sorted(NOT_ON_CPU))),
]


@pytest.mark.parametrize(("class_name", "config"), OTHERS)
def test_unsupported_model_is_left_to_torch(class_name, config, save_config, resolve):
    assert read_spec(resolve(save_config(class_name, **config))) is None


@pytest.mark.parametrize("change", [{"device": "cuda"}, {"dtype": "float16"}, {"packed": False}])
def test_unsupported_device_and_dtype_are_left_to_torch(change, save_config, resolve):
    info = resolve(save_config("BertModel", **ENCODER_SIZES))
    assert read_spec(info) is not None
    assert read_spec(replace(info, **change)) is None
    assert read_spec(resolve(save_config("BertModel", **ENCODER_SIZES | {"hidden_size": 4096}))) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"config": {"final_logit_softcapping": 3.0}},
        {"sequence_pooling": (PoolingType.ATTENTION,)},
        {"multi_vector": MultiVector()},
    ],
)
def test_unsupported_reranker_is_left_to_torch(change, save_config, resolve):
    info = resolve(save_config("Qwen3ForCausalLM", **DECODER_SIZES))
    info = replace(info, kind=ModelKind.CROSS_ENCODER, classifier_tokens=(7, 4))
    assert read_spec(info) is not None
    change = {name: info.config | value if name == "config" else value for name, value in change.items()}
    assert read_spec(replace(info, **change)) is None
