import pytest

from penstock.engine.families.modernbert import ModernBertConfig
from penstock.engine.protocol.errors import UnsupportedModelError

from ...tables import cases


@cases(__file__, "values", "expected")
def test_global_layers_follow_the_list_or_an_interval(values: dict[str, object], expected: list[str]) -> None:
    assert ModernBertConfig.read(values).types == expected
    with pytest.raises(UnsupportedModelError, match="layer_types is"):
        ModernBertConfig.read(values | {"layer_types": ["other"] * len(expected)})
