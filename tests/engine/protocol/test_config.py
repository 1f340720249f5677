"""Settings of an engine: the bounds of each value."""

from typing import Any

import pytest

from penstock.engine.protocol import config

from ...tables import cases


@cases(__file__, "kind", "name", "accepted", "rejected")
def test_value_outside_its_bounds_is_rejected(
    kind: str, name: str, accepted: list[Any], rejected: dict[str, Any]
) -> None:
    build = getattr(config, kind)
    more = {"model": "m"} if kind == "EngineConfig" else {}
    for value in accepted:
        build(**more, **{name: value})
    for message, value in rejected.items():
        with pytest.raises(ValueError, match=f"^{name} is {value!r}; it must be {message}"):
            build(**more, **{name: value})
