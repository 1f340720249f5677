import re
from typing import Any

import pytest

from penstock.engine.families.llama import LlamaConfig
from penstock.engine.protocol.errors import ModelLoadError


@pytest.mark.parametrize(
    ("key", "wanted", "values"),
    [
        ("hidden_size", "an integer from 1 to", ["64", 64.0, True, 0, 10**400]),
        ("rms_norm_eps", "a number from", ["1", float("nan"), float("inf"), -(10**400)]),
        ("hidden_act", "a text", [5]),
        ("mlp_bias", "true or false", ["no", 1]),
    ],
)
def test_wrong_value_of_config_json_is_named(key: str, wanted: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ModelLoadError, match=re.escape(f"config.json: {key} is {value!r}; it must be {wanted}")):
            LlamaConfig.read({key: value})


def test_null_gives_the_default() -> None:
    assert LlamaConfig.read({"hidden_size": None, "num_key_value_heads": None}) == LlamaConfig()
