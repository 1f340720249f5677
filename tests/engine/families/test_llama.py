"""Values of config.json of the Llama family."""

import pytest

from penstock.engine.families import llama
from penstock.engine.families.decoder import FULL, LOCAL

from ...tables import cases


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_share_of_rotated_values_is_read_from_either_field(field: str) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4}
    config = llama.Phi3Config.read({**sizes, field: {"rope_type": "default", "partial_rotary_factor": 0.5}})
    assert config.rotary_size == 8


@cases(__file__, "name", "values", "types")
def test_window_applies_to_the_layers_of_the_family(name: str, values: dict[str, object], types: list[str]) -> None:
    found = getattr(llama, name).read({"num_hidden_layers": 2, **values})
    assert found.types == types
    assert found.window(FULL, is_causal=True) is None
    if found.sliding_window is not None:
        assert found.window(LOCAL, is_causal=True) == (7, 0)
        assert found.window(LOCAL, is_causal=False) == (8, 8)
