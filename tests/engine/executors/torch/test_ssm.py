"""Mamba, Falcon-Mamba and Mamba-2 give what transformers gives, whole and in chunks."""

from functools import partial

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
FAMILIES = [
    pytest.param("Mamba", MAMBA, id="mamba"),
    pytest.param("Mamba", MAMBA | BIASES | {"conv_kernel": 3, "time_step_rank": 5}, id="mamba-biases"),
    pytest.param("Mamba", MAMBA | {"hidden_act": "gelu", "residual_in_fp32": False, "expand": 3}, id="mamba-gelu"),
    pytest.param("FalconMamba", MAMBA | {"expand": 4, "intermediate_size": 96}, id="falcon-mamba"),
    pytest.param("Mamba2", MAMBA2, id="mamba2"),
    pytest.param("Mamba2", MAMBA2 | BIASES | {"n_groups": 3, "time_step_limit": [0.1, 0.4]}, id="mamba2-biases"),
    pytest.param("Mamba2", MAMBA2 | {"n_groups": 6, "hidden_act": "relu", "conv_kernel": 2}, id="mamba2-relu"),
]


@pytest.fixture
def save(save_recurrent):
    return partial(save_recurrent, matrix_scale=1 / 3)


@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_hidden_states_equal_transformers(family, config, save, resolve, pack, sequences):
    folder, reference = save(f"{family}ForCausalLM", **config)
    info = resolve(folder)
    assert info.packed
    assert info.sequence_pooling == (PoolingType.LAST,)
    rows = load_model(info).forward(pack(sequences)).hidden_states
    assert_close(rows, rows_of(reference, sequences, use_cache=False))


@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_text_alone_equals_text_in_batch(family, config, save, resolve, pack, sequences):
    folder, _ = save(f"{family}Model", **config)
    model = load_model(resolve(folder))
    together = model.forward(pack(sequences)).hidden_states
    alone = torch.cat([model.forward(pack([s])).hidden_states for s in sequences])
    assert_close(together, alone)


@pytest.mark.parametrize("size", [1, 7, 64])
@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_slices_equal_the_whole(family, config, size, save, resolve, pack, sequences, run_chunked):
    folder, _ = save(f"{family}Model", **config)
    model = load_model(resolve(folder))
    sequences = sequences[: 4 if size == 1 else None]
    whole = model.forward(pack(sequences)).hidden_states
    assert_close(torch.cat(run_chunked(model, sequences, size)), whole)


@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_reduced_precision_is_no_worse_than_transformers(family, config, save, resolve, pack, sequences, run_chunked):
    folder, reference = save(f"{family}Model", **config)
    exact = rows_of(reference, sequences, use_cache=False)
    model = load_model(resolve(folder, "bfloat16"))
    rows = model.forward(pack(sequences)).hidden_states
    assert rows.dtype == torch.bfloat16
    theirs = rows_of(reference.to(torch.bfloat16), sequences, use_cache=False)
    assert unit_error(rows, exact) <= 1.1 * unit_error(theirs, exact)
    chunked = torch.cat(run_chunked(model, sequences, 7, torch.bfloat16))
    assert unit_error(chunked, exact) <= 1.2 * unit_error(theirs, exact)


def test_float16_and_older_names_of_the_embedding_load(save, resolve, pack, sequences):
    folder, reference = save("MambaForCausalLM", **MAMBA)
    tensors = {name.replace("embeddings", "embedding"): t for name, t in reference.state_dict().items()}
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    rows = load_model(resolve(folder, "float16")).forward(pack(sequences)).hidden_states
    assert rows.dtype == torch.float16
    assert torch.cosine_similarity(rows.float(), rows_of(reference, sequences, use_cache=False), dim=1).min() > 0.999


def test_states_are_what_the_cache_spec_says(save, resolve):
    folder, _ = save("MambaModel", **MAMBA)
    spec = load_model(resolve(folder)).cache_spec
    assert spec.kv_layers == ()
    assert [(s.conv_shape, s.ssm_shape) for s in spec.ssm_layers] == 2 * [((96, 3), (96, 8))]
    folder, _ = save("Mamba2Model", **MAMBA2)
    spec = load_model(resolve(folder)).cache_spec
    assert [(s.conv_shape, s.ssm_shape) for s in spec.ssm_layers] == 2 * [((160, 3), (6, 16, 16))]


def test_attention_pooling_is_refused(save, resolve, pack):
    folder, _ = save("Mamba2Model", **MAMBA2)
    with pytest.raises(ModelLoadError, match="ATTENTION pooling needs attention heads"):
        resolve(folder, pooler_config=PoolerConfig(pooling_type=PoolingType.ATTENTION))
    with pytest.raises(UnsupportedTaskError, match="no attention") as refusal:
        load_model(resolve(folder)).forward(pack([[5, 6]]), need_attention=True)
    assert refusal.value.param == "pooling_type"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"time_step_limit": [0.5, 0.1]}, "the first must be below"),
        ({"time_step_limit": 3}, "two numbers"),
        ({"time_step_limit": [0.0, {"__float__": "lots"}]}, "two numbers"),
        ({"num_heads": 5}, "num_heads 5 \\* head_dim 16"),
    ],
)
def test_broken_configs_are_named(overrides, message, save, resolve):
    folder, _ = save("Mamba2Model", **MAMBA2)
    with pytest.raises(ModelLoadError, match=message):
        load_model(resolve(folder, hf_overrides=overrides))


def test_a_model_that_looks_both_ways_is_refused(save, resolve):
    folder, _ = save("MambaModel", **MAMBA)
    with pytest.raises(UnsupportedModelError, match="only looks back"):
        load_model(resolve(folder, hf_overrides={"is_causal": False}))


def test_a_shape_that_does_not_fit_is_named(save, resolve):
    folder, _ = save("MambaModel", **MAMBA)
    with pytest.raises(WeightError, match=r"layers.0.mixer.x_proj.weight"):
        load_model(resolve(folder, hf_overrides={"state_size": 9}))


def test_length_is_not_bounded_by_positions(save, resolve):
    folder, _ = save("MambaModel", **MAMBA)
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
def test_cuda_agrees(family, config, dtype, save, resolve, pack, sequences):
    folder, _ = save(f"{family}Model", **config)
    expected = load_model(resolve(folder)).forward(pack(sequences)).hidden_states
    model = load_model(with_device(resolve(folder), "cuda", dtype))
    rows = model.forward(pack(sequences, device="cuda")).hidden_states.float().cpu()
    if dtype == "float32":
        assert_close(rows, expected, tolerance=1e-4)
    else:
        assert torch.cosine_similarity(rows, expected, dim=1).min() > 0.98
