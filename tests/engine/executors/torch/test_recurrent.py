"""Mamba, Mamba-2 and their hybrids give the results of transformers, whole and in chunks."""

import pytest
import torch

from penstock.engine.core.loading.weights_loader import load_model
from penstock.engine.protocol import errors
from penstock.engine.protocol.config import PoolerConfig
from penstock.engine.protocol.errors import ModelLoadError, UnsupportedTaskError
from penstock.engine.protocol.tasks import PoolingType

from ..families import BAMBA, HYBRID, MAMBA, MAMBA2, RECURRENT, assert_close, models, rows_of, unit_error


@pytest.mark.parametrize(("family", "config"), RECURRENT + HYBRID)
def test_hidden_states_equal_transformers(family, config, save_recurrent, resolve, pack, sequences, run_chunked):
    folder, reference = save_recurrent(f"{family}ForCausalLM", **config)
    info = resolve(folder)
    assert info.packed
    assert info.sequence_pooling == (PoolingType.LAST,)
    model = load_model(info)
    rows = model.forward(pack(sequences)).hidden_states
    assert_close(rows, rows_of(reference, sequences, use_cache=False))
    assert_close(torch.cat([model.forward(pack([s])).hidden_states for s in sequences]), rows)
    for size in (7, 64):
        assert_close(torch.cat(run_chunked(model, sequences, size)), rows)
    one_token_at_a_time = torch.cat(run_chunked(model, sequences[:3], 1))
    assert_close(one_token_at_a_time, rows[: len(one_token_at_a_time)])


@pytest.mark.parametrize(("family", "config"), RECURRENT + HYBRID)
def test_reduced_precision_is_as_exact_as_transformers(
    family, config, save_recurrent, resolve, pack, sequences, run_chunked
):
    folder, reference = save_recurrent(f"{family}Model", **config)
    exact = rows_of(reference, sequences, use_cache=False)
    model = load_model(resolve(folder, "bfloat16"))
    rows = model.forward(pack(sequences)).hidden_states
    assert rows.dtype == torch.bfloat16
    theirs = unit_error(rows_of(reference.to(torch.bfloat16), sequences, use_cache=False), exact)
    assert unit_error(rows, exact) <= (1.2 if "num_attention_heads" in config else 1.1) * theirs
    chunked = torch.cat(run_chunked(model, sequences, 7, torch.bfloat16))
    assert unit_error(chunked, exact) <= 1.2 * theirs


@pytest.mark.parametrize(("family", "config"), HYBRID)
def test_attention_weights_are_of_last_attention_layer(family, config, save_recurrent, resolve, pack, sequences):
    folder, reference = save_recurrent(f"{family}Model", **config)
    output = load_model(resolve(folder)).forward(pack(sequences), need_attention=True)
    reference.set_attn_implementation("eager")
    expected = []
    for s in sequences:
        attentions = reference(torch.tensor(s)[None], output_attentions=True, use_cache=False).attentions
        expected.append([a for a in attentions if a is not None][-1][0, :, -1].t())
    assert_close(output.attention_weights, torch.cat(expected))


def test_attention_pooling_without_attention_is_rejected(save_recurrent, resolve, pack):
    mamba, _ = save_recurrent("Mamba2Model", **MAMBA2)
    with pytest.raises(ModelLoadError, match="ATTENTION pooling needs attention heads"):
        resolve(mamba, pooler_config=PoolerConfig(pooling_type=PoolingType.ATTENTION))
    bamba, _ = save_recurrent("BambaModel", **BAMBA | {"attn_layer_indices": None})
    for folder in (mamba, bamba):
        model = load_model(resolve(folder))
        assert model.forward(pack([[5, 6]])).hidden_states.shape == (2, 48)
        with pytest.raises(UnsupportedTaskError, match="no attention") as rejection:
            model.forward(pack([[5, 6]]), need_attention=True)
        assert rejection.value.param == "pooling_type"


def test_older_name_of_the_embedding_loads(save_recurrent, resolve, pack, sequences):
    folder, reference = save_recurrent("MambaForCausalLM", **MAMBA)
    tensors = {name.replace("embeddings", "embedding"): t for name, t in reference.state_dict().items()}
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    rows = load_model(resolve(folder, "float16")).forward(pack(sequences)).hidden_states
    assert rows.dtype == torch.float16
    expected = rows_of(reference, sequences, use_cache=False)
    assert torch.cosine_similarity(rows.float(), expected, dim=1).min() > 0.999


@pytest.mark.parametrize(
    ("class_name", "config", "overrides", "error", "message"), models("invalid_config_value_is_named")
)
def test_invalid_config_value_is_named(class_name, config, overrides, error, message, save_recurrent, resolve):
    folder, _ = save_recurrent(class_name, **config)
    with pytest.raises(getattr(errors, error), match=message):
        load_model(resolve(folder, hf_overrides=overrides))
