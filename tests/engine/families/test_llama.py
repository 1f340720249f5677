"""Values of config.json of the Llama family."""

import pytest

from penstock.engine.families.decoder import FULL, LOCAL, DecoderConfig
from penstock.engine.families.llama import LlamaConfig, MistralConfig, Phi3Config, Qwen2Config


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_share_of_rotated_values_is_read_from_either_field(field: str) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4}
    config = Phi3Config.read({**sizes, field: {"rope_type": "default", "partial_rotary_factor": 0.5}})
    assert config.rotary_size == 8


@pytest.mark.parametrize(
    ("config", "values", "types"),
    [
        (LlamaConfig, {"sliding_window": 8}, [FULL, FULL]),
        (MistralConfig, {"sliding_window": 8}, [LOCAL, LOCAL]),
        (MistralConfig, {"sliding_window": None}, [FULL, FULL]),
        (Qwen2Config, {"sliding_window": 8, "max_window_layers": 1}, [FULL, FULL]),
        (Qwen2Config, {"sliding_window": 8, "max_window_layers": 1, "use_sliding_window": True}, [FULL, LOCAL]),
        (Qwen2Config, {"sliding_window": 8, "layer_types": [LOCAL, FULL]}, [LOCAL, FULL]),
    ],
)
def test_window_applies_to_the_layers_of_the_family(
    config: type[DecoderConfig], values: dict[str, object], types: list[str]
) -> None:
    found = config.read({"num_hidden_layers": 2, **values})
    assert found.types == types
    assert found.window(FULL, is_causal=True) is None
    if found.sliding_window is not None:
        assert found.window(LOCAL, is_causal=True) == (7, 0)
        assert found.window(LOCAL, is_causal=False) == (8, 8)
