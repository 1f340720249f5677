"""Defaults of the config.json of every family equal those of transformers."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
import transformers

from penstock.engine import families

RENAMED = {
    "ClipTextConfig": "CLIPTextConfig",
    "ClipVisionConfig": "CLIPVisionConfig",
    "Gemma3Config": "Gemma3TextConfig",
}
# transformers computes or disables these. Files of the Roberta families always name their vocabulary.
DIFFERENT = {
    ("BambaConfig", "mamba_d_head"),
    ("FalconMambaConfig", "time_step_rank"),
    ("Gemma3Config", "attn_logit_softcapping"),
    ("JambaConfig", "mamba_dt_rank"),
    ("MambaConfig", "time_step_rank"),
    ("Qwen2Config", "sliding_window"),
    ("Qwen3Config", "sliding_window"),
    ("RobertaConfig", "vocab_size"),
}


def configs() -> Iterator[type]:
    for module in pkgutil.iter_modules(families.__path__):
        names = vars(importlib.import_module(f"{families.__name__}.{module.name}"))
        for name, value in names.items():
            is_known = hasattr(transformers, RENAMED.get(name, name))
            if name.endswith("Config") and is_known and dataclasses.is_dataclass(value):
                assert isinstance(value, type)
                yield value


def default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("config", sorted(set(configs()), key=lambda config: config.__name__))
def test_defaults_equal_those_of_transformers(config: Any) -> None:
    name = config.__name__
    theirs = getattr(transformers, RENAMED.get(name, name))()
    ours = {
        field.name: as_json(default_of(field))
        for field in dataclasses.fields(config)
        if default_of(field) is not None and hasattr(theirs, field.name) and (name, field.name) not in DIFFERENT
    }
    assert len(ours) > 4
    assert ours == {field: as_json(getattr(theirs, field)) for field in ours}
