"""Values of config.json of the Llama family."""

import pytest

from penstock.engine.families.llama import Phi3Config


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_share_of_rotated_values_is_read_from_either_field(field: str) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4}
    config = Phi3Config.read({**sizes, field: {"rope_type": "default", "partial_rotary_factor": 0.5}})
    assert config.rotary_size == 8
