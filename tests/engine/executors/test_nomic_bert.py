"""NomicBERT with the config.json and the weight names of the hub gives the results of transformers."""

import json

import pytest
import torch

from penstock.engine.executors.cpu.array_encoder import read_spec
from penstock.engine.protocol.errors import ModelLoadError

from .array_model import ArrayModel, load_model
from .families import ENCODER_SIZES, assert_close, logits_of, relative_error, rows_of

CODE = "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert"
HUB = {
    "architectures": ["NomicBertModel"],
    "auto_map": {"AutoModel": f"{CODE}.NomicBertModel", "AutoModelForMaskedLM": f"{CODE}.NomicBertForPreTraining"},
    "activation_function": "swiglu",
    "causal": False,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 64,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "model_type": "nomic_bert",
    "n_embd": ENCODER_SIZES["hidden_size"],
    "n_head": ENCODER_SIZES["num_attention_heads"],
    "n_inner": ENCODER_SIZES["intermediate_size"],
    "n_layer": ENCODER_SIZES["num_hidden_layers"],
    "n_positions": 160,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_weights": True,
    "type_vocab_size": 2,
    "use_rms_norm": False,
    "vocab_size": ENCODER_SIZES["vocab_size"],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0}
BOTH_LAYOUTS = pytest.mark.parametrize("is_original", [True, False], ids=["hub-names", "transformers-names"])
EXECUTORS = pytest.mark.parametrize("executor", ["torch", "cpu"])


@pytest.fixture
def save_hub(save_model):
    """Saves a transformers model with the config.json of the hub, and returns (folder, model)."""

    def save(changes=None, *, is_original=True, **config):
        folder, reference = save_model(
            "NomicBertModel", {"save_original_format": is_original}, **(ENCODER_SIZES | config)
        )
        (folder / "config.json").write_text(json.dumps(HUB | (changes or {})))
        return folder, reference

    return save


@EXECUTORS
@BOTH_LAYOUTS
@pytest.mark.parametrize(
    ("changes", "config"),
    [
        ({}, {}),
        (
            {"activation_function": "geglu", "rotary_emb_base": 50},
            {"hidden_act": "gelu", "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        ),
        ({"type_vocab_size": 1}, {"type_vocab_size": 1}),
    ],
    ids=["swiglu", "geglu", "one-token-type"],
)
def test_hub_config_equals_transformers(
    executor, is_original, changes, config, load, save_hub, resolve, pack, sequences
):
    folder, reference = save_hub(changes, is_original=is_original, **config)
    info = resolve(folder)
    assert (info.packed, info.hidden_size, info.max_model_len) == (True, 48, 160)
    model = load(info)
    hidden = model.forward(pack(sequences)).hidden_states
    assert_close(hidden, rows_of(reference, sequences))
    alone = torch.cat([model.forward(pack([sequence])).hidden_states for sequence in sequences])
    assert relative_error(hidden, alone) <= (0 if executor == "cpu" else 1e-6)


@EXECUTORS
def test_trust_remote_code_does_not_run_the_hub_code(executor, load, save_hub, resolve, pack, sequences):
    folder, reference = save_hub()
    model = load(resolve(folder, trust_remote_code=True), trust_remote_code=True)
    assert_close(model.forward(pack(sequences)).hidden_states, rows_of(reference, sequences))


@EXECUTORS
@BOTH_LAYOUTS
def test_classifier_reads_both_layouts(executor, is_original, load, save_model, resolve, pack, sequences):
    folder, reference = save_model(
        "NomicBertForSequenceClassification", {"save_original_format": is_original}, **ENCODER_SIZES
    )
    model = load(resolve(folder))
    hidden = model.forward(pack(sequences)).hidden_states
    logits = model.classify(torch.stack([rows[0] for rows in hidden.split([len(s) for s in sequences])]))
    assert_close(logits, logits_of(reference, sequences))


@EXECUTORS
@BOTH_LAYOUTS
def test_biases_of_the_checkpoint_are_added(executor, is_original, load, save_hub, resolve, pack, sequences):
    folder, reference = save_hub(is_original=is_original)
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
    is_original, load_on_torch, save_model, save_hub, resolve, pack, sequences
):
    config = {"max_position_embeddings": 64, "rope_parameters": DYNAMIC}
    from_hub, reference = save_hub({"rotary_scaling_factor": 4}, is_original=is_original, **config)
    expected = rows_of(reference, sequences)
    for folder in (from_hub, save_model("NomicBertModel", **(ENCODER_SIZES | config))[0]):
        info = resolve(folder, max_model_len=160)
        assert read_spec(info) is None, "frequencies that depend on the length need torch"
        assert_close(load_on_torch(info).forward(pack(sequences)).hidden_states, expected)


def test_dynamic_scaling_below_trained_length_runs_on_cpu(save_hub, resolve, pack, three_lane_machine):
    folder, reference = save_hub({"rotary_scaling_factor": 4}, max_position_embeddings=64, rope_parameters=DYNAMIC)
    sequences = [[5, 6, 7], list(range(3, 66)), list(range(100, 164))]
    model = load_model(resolve(folder, max_model_len=64), machine=three_lane_machine)
    assert isinstance(model, ArrayModel)
    assert_close(model.forward(pack(sequences)).hidden_states, rows_of(reference, sequences))


@pytest.mark.parametrize(
    "change",
    [
        {"prenorm": True},
        {"parallel_block": True},
        {"use_rms_norm": True},
        {"causal": True},
        {"alibi": True},
        {"num_experts": 8, "moe_every_n_layers": 2, "moe_top_k": 2},
        {"rotary_emb_fraction": 0.0},
        {"rotary_emb_fraction": 0.5},
        {"rotary_emb_fraction": None},
        {"rotary_emb_interleaved": True},
        {"rotary_emb_scale_base": 512.0},
        {"activation_function": "gelu"},
        {"activation_function": "glu"},
        {"activation_function": None},
        {"position_embedding_type": "alibi"},
    ],
    ids=str,
)
@EXECUTORS
def test_other_variant_is_rejected(executor, change, load, save_hub, resolve):
    folder, _ = save_hub(change)
    with pytest.raises(ModelLoadError, match=next(iter(change))):
        load(resolve(folder))


def test_wrong_size_is_named_as_in_the_config(save_hub, resolve):
    with pytest.raises(ModelLoadError, match=r"n_inner is 0; it must be an integer"):
        read_spec(resolve(save_hub({"n_inner": 0})[0]))
