"""Quantised checkpoints give the results of transformers with the dequantised weights."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import UnsupportedModelError, WeightError

from ...tables import cases
from .families import ENCODER_SIZES, WIDE, assert_close, rows_of

WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
ODD = {"num_hidden_layers": 2, "intermediate_size": 78}


def config_of(layout, **changes):
    """A quantization_config of compressed-tensors."""
    group = {"weights": WEIGHTS | changes, "input_activations": None, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


def set_key(folder, key, value):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


@pytest.fixture
def save_quantized(save_model):
    """Saves a model with quantised matrices, and returns (folder, transformers' model with the dequantised ones)."""

    def save(class_name, layout, num_groups, **config):
        folder, reference = save_model(class_name, **config)
        stored, parameters = load_file(folder / "model.safetensors"), dict(reference.named_parameters())
        for name in [name for name in stored if name.endswith("weight") and "embed" not in name and "norm" not in name]:
            weight = stored[name]
            if weight.dim() < 2:
                continue
            groups = weight.unflatten(1, (num_groups, -1))
            scale = (groups.abs().amax(2) / 127).half()
            values = (groups / scale.float()[:, :, None]).round().clamp(-128, 127)
            parameters[name].copy_((values * scale.float()[:, :, None]).flatten(1))
            values, stored[f"{name}_scale"] = values.flatten(1).to(torch.int8), scale
            if layout == "int-quantized":
                stored[name] = values
                continue
            del stored[name]
            padded = torch.nn.functional.pad(values.int() + 128, (0, -values.shape[1] % 4)).numpy().astype(np.uint8)
            stored[f"{name}_packed"] = torch.from_numpy(padded.view("<i4"))
            stored[f"{name}_shape"] = torch.tensor(values.shape)
        save_file(stored, folder / "model.safetensors")
        set_key(folder, "quantization_config", config_of(layout))
        return folder, reference

    return save


@pytest.mark.parametrize("executor", ["torch", "cpu"])
@pytest.mark.parametrize(("layout", "num_groups"), [("int-quantized", 1), ("pack-quantized", 1), ("pack-quantized", 2)])
@pytest.mark.parametrize(("class_name", "config"), [("BertModel", ENCODER_SIZES | ODD), ("Qwen3Model", WIDE)])
def test_compressed_tensors_equal_their_floats(
    class_name, config, layout, num_groups, save_quantized, load, resolve, pack, sequences
):
    folder, reference = save_quantized(class_name, layout, num_groups, **config)
    model = load(resolve(folder))
    assert_close(model.forward(pack(sequences)).hidden_states, rows_of(reference, sequences))


@pytest.mark.parametrize("executor", ["torch", "cpu"])
@pytest.mark.parametrize(
    ("suffix", "value", "message"),
    [
        ("_scale", torch.ones(5, 1), r"its scales \[5, 1\] do not fit"),
        ("_scale", None, "without its scale"),
        ("_packed", torch.zeros(48, 11, dtype=torch.int32), "11 words of 4 values for 48 columns"),
        ("_packed", torch.zeros(48, 48), "it is float32"),
    ],
)
def test_damaged_quantised_weight_is_rejected(suffix, value, message, save_quantized, load, resolve):
    folder, _ = save_quantized("BertModel", "pack-quantized", 1, **ENCODER_SIZES)
    stored, name = load_file(folder / "model.safetensors"), "encoder.layer.0.attention.output.dense.weight"
    del stored[name + suffix]
    save_file(stored if value is None else stored | {name + suffix: value}, folder / "model.safetensors")
    with pytest.raises(WeightError, match=rf"{name}'.*{message}"):
        load(resolve(folder))


@cases(__file__, "found", "message")
def test_other_quantisation_is_rejected_by_name(found, message, save_config):
    folder = save_config("BertModel", **ENCODER_SIZES)
    set_key(folder, "quantization_config", found)
    with pytest.raises(UnsupportedModelError, match=rf"quantised with .*{message}.*GGUF files with Q8_0"):
        resolve_model(EngineConfig(model=str(folder)))


def test_quantize_config_of_autogptq_is_rejected(save_config):
    folder = save_config("BertModel", **ENCODER_SIZES)
    (folder / "quantize_config.json").write_text('{"bits": 4}')
    with pytest.raises(UnsupportedModelError, match=r"gptq \(4 bits\)"):
        resolve_model(EngineConfig(model=str(folder)))


def test_quantised_model_without_a_family_is_rejected(save_config):
    folder = save_config("AlbertModel", **ENCODER_SIZES)
    set_key(folder, "quantization_config", config_of("int-quantized"))
    with pytest.raises(UnsupportedModelError, match="does not support for AlbertModel"):
        resolve_model(EngineConfig(model=str(folder)))
