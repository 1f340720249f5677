"""Options of adapters of the peft library."""

from pathlib import Path
from typing import Any

import pytest

from penstock.engine.model_files.peft_config import PeftConfig
from penstock.engine.protocol.errors import ModelLoadError

from .folders import write


def read(folder: Path, **values: Any) -> PeftConfig:
    return PeftConfig.read(write(folder, {"adapter_config.json": {"peft_type": "LORA", **values}}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; penstock supports 'LORA'"),
        ({"use_dora": True}, "use_dora is True, which is not supported: merge the adapter into its model"),
        ({"bias": "all"}, "bias is 'all'; penstock supports 'none'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' changes the base weights"),
        ({"r": 0}, "r is 0; it must be a positive integer"),
        ({"r": True}, "r is True; it must be a positive integer"),
        ({"lora_alpha": 0}, "lora_alpha is 0; it must be a positive number"),
        ({"lora_alpha": True}, "lora_alpha is True; it must be a positive number"),
        ({"use_rslora": 1}, "use_rslora is 1; it must be true or false"),
        ({"target_modules": ["q", 3]}, r"target_modules is \['q', 3\]; it must be a text or a list of texts"),
        ({"target_modules": "("}, "target_modules is '\\('; it must be a text or a list of texts"),
        ({"layers_to_transform": [0, "1"]}, "it must be an integer or a list of integers"),
        ({"rank_pattern": {"q": 0}}, "rank_pattern is {'q': 0}; it must be an object with a positive number"),
        ({"alpha_pattern": {"(": 1}}, "it must be an object with a positive number for each pattern"),
    ],
)
def test_unusable_option_is_rejected_with_its_value(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=rf"adapter_config\.json: .*{message}"):
        read(tmp_path, **values)


def test_scale_depends_on_rank_and_patterns(tmp_path: Path) -> None:
    patterns = {"rank_pattern": {"q": 16}, "alpha_pattern": {r"layer\.[01]\.q": 4.0}}
    config = read(tmp_path, r=4, lora_alpha=8, **patterns)
    assert [config.rank(name) for name in ("q", "layer.0.q", "layer.0.qq", "layer.0.k")] == [16, 16, 4, 4]
    assert [config.scale(name) for name in ("q", "layer.0.q", "layer.2.q", "layer.0.k")] == [0.5, 0.25, 0.5, 2.0]
    assert read(tmp_path, r=4, lora_alpha=8, use_rslora=True).scale("k") == 4.0
    assert read(tmp_path).scale("k") == 1.0


@pytest.mark.parametrize(
    ("values", "targeted"),
    [
        ({}, ""),
        ({"target_modules": ["q"]}, "q a.q"),
        ({"target_modules": r".*\.q"}, "a.q"),
        ({"target_modules": "all-linear"}, "q a.q a.qq a.k"),
        ({"target_modules": "all-linear", "exclude_modules": ["k"]}, "q a.q a.qq"),
        ({"target_modules": ["q", "k"], "layers_to_transform": 1}, "q a.q a.k"),
        ({"target_modules": ["q", "k"], "layers_to_transform": [0, 2]}, ""),
    ],
)
def test_modules_of_a_layer_are_chosen(values: dict[str, Any], targeted: str, tmp_path: Path) -> None:
    config = read(tmp_path, **values)
    assert [name for name in ("q", "a.q", "a.qq", "a.k") if config.targets(name, 1)] == targeted.split()
