"""Mamba, Falcon-Mamba, Mamba-2, Jamba, Bamba and Granite's hybrid give what transformers gives, whole and in chunks."""

import pytest
import torch

from penstock.engine.core.loading.weights_loader import load_model
from penstock.engine.model_files.resolve import with_device
from penstock.engine.protocol.config import PoolerConfig
from penstock.engine.protocol.errors import ModelLoadError, UnsupportedModelError, UnsupportedTaskError, WeightError
from penstock.engine.protocol.tasks import PoolingType

from ..parity import assert_close, rows_of, unit_error

MAMBA = {"vocab_size": 200, "hidden_size": 48, "num_hidden_layers": 2, "state_size": 8}
MAMBA2 = MAMBA | {"num_heads": 6, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 32}
BIASES = {"use_bias": True, "use_conv_bias": False}
RECURRENT = [
    pytest.param("Mamba", MAMBA, id="mamba"),
    pytest.param("Mamba", MAMBA | BIASES | {"conv_kernel": 3, "time_step_rank": 5}, id="mamba-biases"),
    pytest.param("Mamba", MAMBA | {"hidden_act": "gelu", "residual_in_fp32": False, "expand": 3}, id="mamba-gelu"),
    pytest.param("FalconMamba", MAMBA | {"expand": 4, "intermediate_size": 96}, id="falcon-mamba"),
    pytest.param("Mamba2", MAMBA2, id="mamba2"),
    pytest.param("Mamba2", MAMBA2 | BIASES | {"n_groups": 3, "time_step_limit": [0.1, 0.4]}, id="mamba2-biases"),
    pytest.param("Mamba2", MAMBA2 | {"n_groups": 6, "hidden_act": "relu", "conv_kernel": 2}, id="mamba2-relu"),
]
SIZES = {
    "vocab_size": 200,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_d_state": 8,
    "pad_token_id": 0,
}
JAMBA = SIZES | {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4, "num_hidden_layers": 4}
HEADS = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2}
BAMBA = SIZES | HEADS | {"attn_layer_indices": [1]}
GRANITE = (
    SIZES
    | HEADS
    | {"layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 64, "num_local_experts": 4}
    | {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2}
)
HYBRID_BIASES = {"mamba_proj_bias": True, "mamba_conv_bias": False}
HYBRID = [
    pytest.param("Jamba", JAMBA, id="jamba"),
    pytest.param("Jamba", JAMBA | HYBRID_BIASES | {"num_experts": 1, "attn_layer_offset": 0}, id="jamba-dense-biases"),
    pytest.param("Bamba", BAMBA, id="bamba"),
    pytest.param(
        "Bamba",
        BAMBA | HYBRID_BIASES | {"attention_bias": True, "mlp_bias": True, "mamba_d_head": "auto"},
        id="bamba-biases",
    ),
    pytest.param("GraniteMoeHybrid", GRANITE, id="granite"),
    pytest.param(
        "GraniteMoeHybrid", GRANITE | {"num_local_experts": 0, "position_embedding_type": "rope"}, id="granite-dense"
    ),
    pytest.param("GraniteMoeHybrid", GRANITE | {"layer_types": ["attention"] * 3}, id="granite-attention-only"),
]
FAMILIES = RECURRENT + HYBRID


@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_hidden_states_equal_transformers(family, config, save_recurrent, resolve, pack, sequences):
    folder, reference = save_recurrent(f"{family}ForCausalLM", **config)
    info = resolve(folder)
    assert info.packed
    assert info.sequence_pooling == (PoolingType.LAST,)
    rows = load_model(info).forward(pack(sequences)).hidden_states
    assert_close(rows, rows_of(reference, sequences, use_cache=False))


@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_text_alone_equals_text_in_batch(family, config, save_recurrent, resolve, pack, sequences):
    folder, _ = save_recurrent(f"{family}Model", **config)
    model = load_model(resolve(folder))
    together = model.forward(pack(sequences)).hidden_states
    assert_close(torch.cat([model.forward(pack([s])).hidden_states for s in sequences]), together)


@pytest.mark.parametrize("size", [1, 7, 64])
@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_slices_equal_the_whole(family, config, size, save_recurrent, resolve, pack, sequences, run_chunked):
    folder, _ = save_recurrent(f"{family}Model", **config)
    model = load_model(resolve(folder))
    sequences = sequences[: 4 if size == 1 else None]
    whole = model.forward(pack(sequences)).hidden_states
    assert_close(torch.cat(run_chunked(model, sequences, size)), whole)


@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_reduced_precision_stays_close(family, config, save_recurrent, resolve, pack, sequences, run_chunked):
    folder, reference = save_recurrent(f"{family}Model", **config)
    exact = rows_of(reference, sequences, use_cache=False)
    model = load_model(resolve(folder, "bfloat16"))
    rows = model.forward(pack(sequences)).hidden_states
    assert rows.dtype == torch.bfloat16
    theirs = unit_error(rows_of(reference.to(torch.bfloat16), sequences, use_cache=False), exact)
    assert unit_error(rows, exact) <= (1.2 if "num_attention_heads" in config else 1.1) * theirs
    chunked = torch.cat(run_chunked(model, sequences, 7, torch.bfloat16))
    assert unit_error(chunked, exact) <= 1.2 * theirs


def test_jamba_reward_model_equals_transformers(save_recurrent, resolve, pack, sequences):
    folder, reference = save_recurrent("JambaForSequenceClassification", **JAMBA, num_labels=3)
    model = load_model(resolve(folder))
    ends = torch.tensor([len(s) for s in sequences]).cumsum(0) - 1
    logits = model.classify(model.forward(pack(sequences)).hidden_states[ends])
    assert_close(logits, torch.cat([reference(torch.tensor(s)[None]).logits for s in sequences]))


@pytest.mark.parametrize(("family", "config"), HYBRID)
def test_attention_weights_are_those_of_the_last_attention_layer(
    family, config, save_recurrent, resolve, pack, sequences
):
    folder, reference = save_recurrent(f"{family}Model", **config)
    output = load_model(resolve(folder)).forward(pack(sequences), need_attention=True)
    reference.set_attn_implementation("eager")
    expected = []
    for s in sequences:
        attentions = reference(torch.tensor(s)[None], output_attentions=True, use_cache=False).attentions
        expected.append([a for a in attentions if a is not None][-1][0, :, -1].t())
    assert_close(output.attention_weights, torch.cat(expected))


def test_attention_pooling_needs_attention(save_recurrent, resolve, pack):
    mamba, _ = save_recurrent("Mamba2Model", **MAMBA2)
    with pytest.raises(ModelLoadError, match="ATTENTION pooling needs attention heads"):
        resolve(mamba, pooler_config=PoolerConfig(pooling_type=PoolingType.ATTENTION))
    bamba, _ = save_recurrent("BambaModel", **BAMBA | {"attn_layer_indices": None})
    for folder in (mamba, bamba):
        model = load_model(resolve(folder))
        assert model.forward(pack([[5, 6]])).hidden_states.shape == (2, 48)
        with pytest.raises(UnsupportedTaskError, match="no attention") as refusal:
            model.forward(pack([[5, 6]]), need_attention=True)
        assert refusal.value.param == "pooling_type"


def test_cache_spec_names_both_kinds_of_layers(save_recurrent, resolve):
    for class_name, config, kv_layers, ssm_layers in (
        ("MambaModel", MAMBA, [], 2 * [((96, 3), (96, 8))]),
        ("Mamba2Model", MAMBA2, [], 2 * [((160, 3), (6, 16, 16))]),
        ("JambaModel", JAMBA, [(2, 12)], 3 * [((96, 3), (96, 8))]),
    ):
        folder, _ = save_recurrent(class_name, **config)
        spec = load_model(resolve(folder)).cache_spec
        assert [(s.num_kv_heads, s.head_size) for s in spec.kv_layers] == kv_layers
        assert [(s.conv_shape, s.ssm_shape) for s in spec.ssm_layers] == ssm_layers


def test_float16_and_older_names_of_the_embedding_load(save_recurrent, resolve, pack, sequences):
    folder, reference = save_recurrent("MambaForCausalLM", **MAMBA)
    tensors = {name.replace("embeddings", "embedding"): t for name, t in reference.state_dict().items()}
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    rows = load_model(resolve(folder, "float16")).forward(pack(sequences)).hidden_states
    assert rows.dtype == torch.float16
    assert torch.cosine_similarity(rows.float(), rows_of(reference, sequences, use_cache=False), dim=1).min() > 0.999


@pytest.mark.parametrize(
    ("class_name", "config", "overrides", "error_type", "message"),
    [
        ("Mamba2Model", MAMBA2, {"time_step_limit": [0.5, 0.1]}, ModelLoadError, "the first must be below"),
        ("Mamba2Model", MAMBA2, {"time_step_limit": 3}, ModelLoadError, "two numbers"),
        ("Mamba2Model", MAMBA2, {"time_step_limit": [0.0, {"__float__": "lots"}]}, ModelLoadError, "two numbers"),
        ("Mamba2Model", MAMBA2, {"num_heads": 5}, ModelLoadError, "num_heads 5 \\* head_dim 16"),
        ("MambaModel", MAMBA, {"is_causal": False}, UnsupportedModelError, "only looks back"),
        ("MambaModel", MAMBA, {"state_size": 9}, WeightError, r"layers.0.mixer.x_proj.weight"),
        ("JambaModel", JAMBA, {"is_causal": False}, UnsupportedModelError, "only looks back"),
        ("JambaModel", JAMBA, {"num_experts_per_tok": 9}, ModelLoadError, "is 9, but there are 4 experts"),
        ("BambaModel", BAMBA, {"mamba_n_heads": 5}, ModelLoadError, "mamba_n_heads 5"),
        (
            "GraniteMoeHybridModel",
            GRANITE,
            {"layer_types": ["mamba", "magic", "mamba"]},
            UnsupportedModelError,
            "'magic'",
        ),
    ],
)
def test_broken_configs_are_named(class_name, config, overrides, error_type, message, save_recurrent, resolve):
    folder, _ = save_recurrent(class_name, **config)
    with pytest.raises(error_type, match=message):
        load_model(resolve(folder, hf_overrides=overrides))


def test_length_is_not_bounded_by_positions(save_recurrent, resolve):
    folder, _ = save_recurrent("MambaModel", **MAMBA)
    assert resolve(folder).max_model_len == 8192
    assert resolve(folder).sources["max_model_len"] == "default of models without positions"
    assert resolve(folder, max_model_len=100_000).max_model_len == 100_000
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 2048}')
    assert resolve(folder).max_model_len == 2048
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 1000000000000000019884624838656}')
    assert resolve(folder).max_model_len == 8192


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_cuda_agrees(family, config, dtype, save_recurrent, resolve, pack, sequences):
    folder, _ = save_recurrent(f"{family}Model", **config)
    expected = load_model(resolve(folder)).forward(pack(sequences)).hidden_states
    model = load_model(with_device(resolve(folder), "cuda", dtype))
    rows = model.forward(pack(sequences, device="cuda")).hidden_states.float().cpu()
    if dtype == "float32":
        assert_close(rows, expected, tolerance=1e-4)
    else:
        assert torch.cosine_similarity(rows, expected, dim=1).min() > 0.98
