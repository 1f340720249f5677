"""GTE and NomicBERT with the config.json and the weight names of the hub give the results of transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.executors.cpu.array_encoder import read_spec
from penstock.engine.protocol.errors import ModelLoadError

from ...tables import table
from .array_model import ArrayModel, load_model
from .families import ENCODER_SIZES, EXECUTORS, assert_close, assert_rows_equal, first_row_logits, logits_of, rows_of

HUB = json.loads((Path(__file__).parent / "hub_configs.json").read_text())
SIZE = ENCODER_SIZES["hidden_size"] // ENCODER_SIZES["num_attention_heads"]
HUB_CONFIGS = table(__file__, "hub_config_equals_transformers")
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0}
BOTH_LAYOUTS = pytest.mark.parametrize("is_original", [True, False], ids=["hub-names", "transformers-names"])


@pytest.fixture
def save_gte(save_model):
    """Saves a GTE model with the config.json of the hub, and returns (folder, model)."""

    def save(changes=None, class_name="GteModel", *, is_original=True, **config):
        folder, reference = save_model(class_name, {"save_original_format": is_original}, **(ENCODER_SIZES | config))
        # Fixed NTK scaling by a factor of 2 (kexue.fm/archives/9706, equation 6).
        exponents = torch.arange(0, SIZE, 2) / SIZE
        reference.base_model.rotary_emb.inv_freq = 1 / ((500 * 2) ** exponents * 2 ** (2 / SIZE))
        (folder / "config.json").write_text(json.dumps(HUB["gte"] | (changes or {})))
        tensors = load_file(folder / "model.safetensors")
        tensors = {name.replace("gte.", "new.", 1): tensor for name, tensor in tensors.items()}
        save_file(tensors, folder / "model.safetensors")
        return folder, reference

    return save


@pytest.fixture
def save_nomic(save_model):
    """Saves a NomicBERT model with the config.json of the hub, and returns (folder, model)."""

    def save(changes=None, *, is_original=True, **config):
        folder, reference = save_model(
            "NomicBertModel", {"save_original_format": is_original}, **(ENCODER_SIZES | config)
        )
        (folder / "config.json").write_text(json.dumps(HUB["nomic"] | (changes or {})))
        return folder, reference

    return save


@EXECUTORS
@BOTH_LAYOUTS
@pytest.mark.parametrize(("family", "changes", "config"), HUB_CONFIGS.values(), ids=HUB_CONFIGS)
def test_hub_config_equals_transformers(
    executor, is_original, family, changes, config, load, resolve, pack, sequences, request
):
    folder, reference = request.getfixturevalue(f"save_{family}")(changes, is_original=is_original, **config)
    info = resolve(folder, trust_remote_code=is_original)  # the code of the hub does not run
    assert (info.packed, info.hidden_size, info.max_model_len) == (True, 48, 160)
    model = load(info, trust_remote_code=is_original)
    assert_rows_equal(model, reference, pack, sequences, 0 if executor == "cpu" else 1e-6)


@EXECUTORS
def test_reranker_of_the_hub_equals_transformers(executor, load, save_gte, resolve, pack, sequences):
    folder, reference = save_gte(
        {"architectures": ["NewForSequenceClassification"]}, "GteForSequenceClassification", type_vocab_size=1
    )
    assert "new.pooler.dense.weight" in load_file(folder / "model.safetensors")
    assert_close(first_row_logits(load(resolve(folder)), sequences, pack), logits_of(reference, sequences))


@EXECUTORS
@BOTH_LAYOUTS
def test_classifier_reads_both_layouts(executor, is_original, load, save_model, resolve, pack, sequences):
    folder, reference = save_model(
        "NomicBertForSequenceClassification", {"save_original_format": is_original}, **ENCODER_SIZES
    )
    assert_close(first_row_logits(load(resolve(folder)), sequences, pack), logits_of(reference, sequences))


@EXECUTORS
def test_unpacked_qkv_equals_transformers(executor, load, save_gte, resolve, pack, sequences):
    folder, reference = save_gte({"pack_qkv": False})
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "qkv_proj" in name]:
        for letter, part in zip("qkv", tensors.pop(name).chunk(3), strict=True):
            tensors[name.replace("qkv_proj", f"{letter}_proj")] = part.clone()
    save_file(tensors, folder / "model.safetensors")
    assert_close(load(resolve(folder)).forward(pack(sequences)).hidden_states, rows_of(reference, sequences))


@EXECUTORS
@BOTH_LAYOUTS
def test_biases_of_the_checkpoint_are_added(executor, is_original, load, save_nomic, resolve, pack, sequences):
    folder, reference = save_nomic(is_original=is_original)
    for module in reference.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.bias = torch.nn.Parameter(torch.randn(module.out_features) / 3)
    config = (folder / "config.json").read_text()
    reference.save_pretrained(folder, save_original_format=is_original)
    (folder / "config.json").write_text(config)
    hidden = load(resolve(folder)).forward(pack(sequences)).hidden_states
    assert_close(hidden, rows_of(reference, sequences))


@BOTH_LAYOUTS
def test_dynamic_scaling_equals_transformers(
    is_original, load_on_torch, save_nomic, resolve, pack, sequences, three_lane_library
):
    config = {"max_position_embeddings": 64, "rope_parameters": DYNAMIC}
    folder, reference = save_nomic({"rotary_scaling_factor": 4}, is_original=is_original, **config)
    info = resolve(folder, max_model_len=160)
    assert read_spec(info) is None, "frequencies that depend on the length need torch"
    expected = rows_of(reference, sequences)
    assert_close(load_on_torch(info).forward(pack(sequences)).hidden_states, expected)
    short = [[5, 6, 7], list(range(3, 66)), list(range(100, 164))]  # below the trained length
    model = load_model(resolve(folder, max_model_len=64), library=three_lane_library)
    assert isinstance(model, ArrayModel)
    assert_close(model.forward(pack(short)).hidden_states, rows_of(reference, short))


@pytest.mark.parametrize(("family", "change"), table(__file__, "other_variant_is_rejected"), ids=str)
def test_other_variant_is_rejected(family, change, resolve, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HUB[family] | change))
    with pytest.raises(ModelLoadError, match="unknown" if "unknown" in str(change) else next(iter(change))):
        read_spec(resolve(tmp_path))
