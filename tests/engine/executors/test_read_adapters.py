"""Rows of several LoRA adapters in one batch equal transformers with merged weights; wrong adapters are rejected."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.protocol.errors import ModelLoadError

from .adapters import save_adapter
from .families import ENCODER_SIZES, EXECUTORS, assert_close, models, relative_error, rows_of

EVERYTHING = r"(?!.*(pooler|position_|token_type)).*"
NUMBERS = [0, -1, 1, 0, 1]


@EXECUTORS
@pytest.mark.parametrize(("name", "config", "first", "second"), models("adapted_models"))
def test_batch_of_adapters_equals_merged_weights(
    executor, name, config, first, second, load, save_model, resolve, pack, sequences, tmp_path
):
    folder, base = save_model(name, **config)
    references = [
        save_adapter(tmp_path / "first", base, first, 1),
        save_adapter(tmp_path / "second", base, second, 2, r=3, use_rslora=True, rank_pattern={r"layers?\.1\..*": 5}),
        base,
    ]
    info = resolve(folder, adapter=(f"first={tmp_path / 'first'}", f"second={tmp_path / 'second'}"))
    model = load(info)
    hidden = model.forward(pack(sequences, adapters=NUMBERS)).hidden_states
    expected = [rows_of(references[number], [sequence]) for number, sequence in zip(NUMBERS, sequences, strict=True)]
    assert_close(hidden, torch.cat(expected))
    assert relative_error(expected[0], rows_of(base, sequences[:1])) > 0.01, "the adapter changes the rows"
    alone = [model.forward(pack([s], adapters=[n])).hidden_states for n, s in zip(NUMBERS, sequences, strict=True)]
    assert relative_error(hidden, torch.cat(alone)) <= (0 if executor == "cpu" else 1e-6)
    assert_close(model.forward(pack(sequences)).hidden_states, rows_of(base, sequences))


@pytest.mark.parametrize("executor", ["cpu"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_adapter_of_rounded_weights_stays_close(
    executor, dtype, load, needs_formats, save_model, resolve, pack, sequences, tmp_path
):
    needs_formats(dtype, None)
    folder, base = save_model("BertModel", **ENCODER_SIZES)
    merged = save_adapter(tmp_path / "one", base, EVERYTHING)
    info = resolve(folder, dtype=dtype, adapter=(f"one={tmp_path / 'one'}",))
    hidden = load(info).forward(pack(sequences, adapters=[0] * len(sequences))).hidden_states
    assert torch.cosine_similarity(hidden, rows_of(merged, sequences), dim=1).min() > 0.99


def changed_config(**changes):
    def change(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def without(text, **added):
    def change(folder):
        path = folder / "adapter_model.safetensors"
        tensors = {name: tensor for name, tensor in load_file(path).items() if text not in name}
        save_file(tensors | {name: torch.zeros(shape) for name, shape in added.items()}, path)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed_config(peft_type="IA3"), "peft_type is 'IA3'; penstock supports 'LORA'"),
        (changed_config(modules_to_save=["classifier"]), r"modules_to_save is \['classifier'\]"),
        (changed_config(r=5), r"has the shape \[4, 48\]; the configuration needs \[5, 48\]"),
        (without("layer.1.attention.self.query.lora_B"), "has no weight .*layer.1.attention.self.query.lora_B"),
        (without("layer.1.attention.self.query"), "no weights of 'encoder.layer.1.attention.self.query'"),
        (without("base_model"), "no weights of"),
        (without("zzz", **{"base_model.model.classifier.lora_A.weight": (4, 48)}), "has weights of 'classifier'"),
        (without("zzz", **{"base_model.model.classifier.bias": (3,)}), "classifier.bias', which are no LoRA weights"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"damaged"), "cannot be read"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "the folder has no adapter_config.json"),
    ],
)
@pytest.mark.parametrize("executor", ["cpu"])
def test_wrong_adapter_is_rejected_with_its_name(executor, change, message, load, save_model, resolve, tmp_path):
    folder, base = save_model("BertModel", **ENCODER_SIZES)
    save_adapter(tmp_path / "legal", base, r".*\.(query|value)")
    change(tmp_path / "legal")
    with pytest.raises(ModelLoadError, match=message) as caught:
        load(resolve(folder, adapter=(f"legal={tmp_path / 'legal'}",)))
    assert re.search("legal", caught.value.message)


def test_adapter_of_a_transformers_model_is_rejected(load_on_torch, save_model, resolve, tmp_path):
    folder, base = save_model("AlbertModel", **ENCODER_SIZES)
    save_adapter(tmp_path / "legal", base, r".*query")
    with pytest.raises(ModelLoadError, match="LoRA adapters need a model that penstock runs itself"):
        load_on_torch(resolve(folder, adapter=(f"legal={tmp_path / 'legal'}",)))
