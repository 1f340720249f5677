import pytest

from penstock.engine.families.modernbert import GLOBAL, LOCAL, ModernBertConfig
from penstock.engine.protocol.errors import UnsupportedModelError


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"num_hidden_layers": 5, "global_attn_every_n_layers": 2}, [GLOBAL, LOCAL, GLOBAL, LOCAL, GLOBAL]),
        ({"num_hidden_layers": 4}, [GLOBAL, LOCAL, LOCAL, GLOBAL]),
        ({"num_hidden_layers": 2, "layer_types": [LOCAL, GLOBAL]}, [LOCAL, GLOBAL]),
    ],
)
def test_global_layers_follow_the_list_or_an_interval(values: dict[str, object], expected: list[str]) -> None:
    assert ModernBertConfig.read(values).types == expected
    with pytest.raises(UnsupportedModelError, match="layer_types is"):
        ModernBertConfig.read(values | {"layer_types": ["other"] * len(expected)})
