"""Defaults of the config.json of every family equal those of transformers."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
import transformers

from penstock.engine import families

from ...tables import table

RENAMED = table(__file__, "names_in_transformers")
# transformers computes or disables these. Files of the Roberta families always name their vocabulary.
DIFFERENT = table(__file__, "fields_of_another_meaning_in_transformers")


def configs() -> Iterator[type]:
    for module in pkgutil.iter_modules(families.__path__):
        names = vars(importlib.import_module(f"{families.__name__}.{module.name}"))
        for name, value in names.items():
            if name.endswith("Config") and dataclasses.is_dataclass(value):
                assert isinstance(value, type)
                yield value


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Returns the default as JSON; None for a required field, too."""
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return None if default is dataclasses.MISSING else as_json(default)


def as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("config", sorted(set(configs()), key=lambda config: config.__name__))
def test_defaults_equal_those_of_transformers(config: Any) -> None:
    name = config.__name__
    ours = {field.name: default_of(field) for field in dataclasses.fields(config)}
    theirs = getattr(transformers, RENAMED.get(name, name), object)()
    common = {
        field
        for field, default in ours.items()
        if default is not None and hasattr(theirs, field) and field != DIFFERENT.get(name)
    }
    assert {field: ours[field] for field in common} == {field: as_json(getattr(theirs, field)) for field in common}
    others = {field: default for field, default in ours.items() if field not in common and default is not None}
    assert others == table(__file__, "test_defaults_equal_those_of_transformers").get(name, {})
