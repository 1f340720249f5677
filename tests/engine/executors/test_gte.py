"""GTE with the config.json and the weight names of the hub gives the results of transformers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.executors.cpu.array_encoder import read_spec
from penstock.engine.protocol.errors import ModelLoadError

from .families import ENCODER_SIZES, assert_close, logits_of, relative_error, rows_of

CODE = "Alibaba-NLP/new-impl--modeling"
HUB = ENCODER_SIZES | {
    "architectures": ["NewModel"],
    "auto_map": {"AutoModel": f"{CODE}.NewModel"},
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "model_type": "new",
    "pack_qkv": True,
    "position_embedding_type": "rope",
    "rope_scaling": {"factor": 2.0, "type": "ntk"},
    "rope_theta": 500,
    "type_vocab_size": 1,
    "unpad_inputs": False,
    "use_memory_efficient_attention": False,
}
SIZE = ENCODER_SIZES["hidden_size"] // ENCODER_SIZES["num_attention_heads"]
EXECUTORS = pytest.mark.parametrize("executor", ["torch", "cpu"])


def with_prefix(name):
    """The name in a checkpoint of the hub with a head."""
    return name.replace("gte.", "new.", 1)


@pytest.fixture
def save_hub(save_model):
    """Saves a transformers model with the config.json of the hub, and returns (folder, model)."""

    def save(changes=None, class_name="GteModel", *, is_original=True, rename=with_prefix, **config):
        folder, reference = save_model(class_name, {"save_original_format": is_original}, **(ENCODER_SIZES | config))
        # Fixed NTK scaling by a factor of 2 (kexue.fm/archives/9706, equation 6).
        exponents = torch.arange(0, SIZE, 2) / SIZE
        reference.base_model.rotary_emb.inv_freq = 1 / ((500 * 2) ** exponents * 2 ** (2 / SIZE))
        (folder / "config.json").write_text(json.dumps(HUB | (changes or {})))
        tensors = {rename(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
        save_file(tensors, folder / "model.safetensors")
        return folder, reference

    return save


@EXECUTORS
@pytest.mark.parametrize("is_original", [True, False], ids=["hub-names", "transformers-names"])
@pytest.mark.parametrize("num_types", [0, 1, 2])
@pytest.mark.parametrize("trusts", [False, True])
def test_hub_config_equals_transformers(
    executor, is_original, num_types, trusts, load, save_hub, resolve, pack, sequences
):
    folder, reference = save_hub({"type_vocab_size": num_types}, is_original=is_original, type_vocab_size=num_types)
    info = resolve(folder, trust_remote_code=trusts)
    assert (info.packed, info.max_model_len) == (True, 160)
    model = load(info, trust_remote_code=trusts)
    hidden = model.forward(pack(sequences)).hidden_states
    assert_close(hidden, rows_of(reference, sequences))
    alone = torch.cat([model.forward(pack([sequence])).hidden_states for sequence in sequences])
    assert relative_error(hidden, alone) <= (0 if executor == "cpu" else 1e-6)


@EXECUTORS
def test_reranker_of_the_hub_equals_transformers(executor, load, save_hub, resolve, pack, sequences):
    folder, reference = save_hub(
        {"architectures": ["NewForSequenceClassification"]}, "GteForSequenceClassification", type_vocab_size=1
    )
    assert "new.pooler.dense.weight" in load_file(folder / "model.safetensors")
    model = load(resolve(folder))
    hidden = model.forward(pack(sequences)).hidden_states
    logits = model.classify(torch.stack([rows[0] for rows in hidden.split([len(s) for s in sequences])]))
    assert_close(logits, logits_of(reference, sequences))


@EXECUTORS
def test_unpacked_qkv_equals_transformers(executor, load, save_hub, resolve, pack, sequences):
    folder, reference = save_hub({"pack_qkv": False})
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "qkv_proj" in name]:
        for letter, part in zip("qkv", tensors.pop(name).chunk(3), strict=True):
            tensors[name.replace("qkv_proj", f"{letter}_proj")] = part.clone()
    save_file(tensors, folder / "model.safetensors")
    assert_close(load(resolve(folder)).forward(pack(sequences)).hidden_states, rows_of(reference, sequences))


@EXECUTORS
@pytest.mark.parametrize(
    "change",
    [
        {"logn_attention_scale": True},
        {"layer_norm_type": "rms_norm"},
        {"position_embedding_type": "absolute"},
        {"position_embedding_type": "alibi"},
        {"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}},
        {"rope_scaling": {"type": "ntk"}},
        {"rope_scaling": {"type": "unknown", "factor": 2.0}},
    ],
    ids=str,
)
def test_other_variant_is_rejected(executor, change, load, save_hub, resolve):
    folder, _ = save_hub(change)
    with pytest.raises(ModelLoadError, match="unknown" if "unknown" in str(change) else next(iter(change))):
        load(resolve(folder))


def test_default_theta_is_that_of_transformers(save_config, resolve):
    spec = read_spec(resolve(save_config("GteModel", **ENCODER_SIZES)))
    assert spec is not None
    (kind,) = spec.kinds.values()
    assert (kind.rope.theta, kind.rope.rope_type) == (160_000.0, "default")
