"""GGUF files give the results of transformers with the dequantised weights."""

import pytest
import torch

from penstock.engine.protocol.errors import UnsupportedModelError
from penstock.engine.protocol.tasks import PoolingType

from ...gguf_files import write_gguf
from ...tables import cases, table
from .families import ENCODER_SIZES, EXECUTORS, WIDE, assert_close, rows_of
from .jina_bert import HUB, Reference, make_weights

# Architecture: names outside of the layers, prefix of the layers, names in a layer.
NAMES = table(__file__, "names_of_gguf")
SIZES = ENCODER_SIZES | {"hidden_size": 64, "intermediate_size": 96}
DECODER = WIDE | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
# Several types in one file; the other weights are F32.
TYPES = {"attn_output.weight": "F16", "ffn_up.weight": "BF16", "position_embd.weight": "F32"}


def metadata_of(architecture, config, **changes):
    """The metadata that llama.cpp's converter writes."""
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.layer_norm_epsilon": 1e-12,
        "pooling_type": 2,
    }
    if architecture == "nomic-bert":
        values["rope.freq_base"] = 1000.0
    if architecture == "qwen3":
        values |= {"attention.head_count_kv": 2, "attention.key_length": 32, "attention.value_length": 32}
        values |= {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 10_000.0}
    values = {f"{architecture}.{key}": value for key, value in (values | changes).items() if value is not None}
    return {"general.architecture": architecture, "general.type": "model"} | values


def tensors_of(architecture, weights, q8_0="Q8_0"):
    """Maps GGUF's names to (type, values) and to the names of the checkpoint."""
    outside, layers, inside = NAMES[architecture]
    modules = dict(outside)
    for layer in {name.removeprefix(f"{layers}.").split(".")[0] for name in weights if name.startswith(f"{layers}.")}:
        modules |= {f"blk.{layer}.{own}": f"{layers}.{layer}.{module}" for own, module in inside.items()}
    tensors, names = {}, {}
    for own, module in modules.items():
        for kind in ("weight", "bias"):
            if f"{module}.{kind}" in weights:
                values, name = weights[f"{module}.{kind}"], f"{own}.{kind}"
                type_name = next((t for end, t in TYPES.items() if name.endswith(end)), q8_0)
                tensors[name] = (type_name if values.dim() > 1 else "F32", values.numpy())
                names[name] = f"{module}.{kind}"
    if architecture == "nomic-bert":  # one weight for q, k and v
        for layer in range(3):
            name = f"{layers}.{layer}.self_attn."
            names[f"blk.{layer}.attn_qkv.weight"] = [f"{name}{part}_proj.weight" for part in "qkv"]
            joined = torch.cat([weights[part] for part in names[f"blk.{layer}.attn_qkv.weight"]])
            tensors[f"blk.{layer}.attn_qkv.weight"] = ("Q8_0", joined.numpy())
    return tensors, names


@pytest.fixture
def save_gguf(save_model, tmp_path):
    """Saves a model as GGUF, and returns (file, transformers' model with the values of the file)."""

    def save(architecture, class_name, config, **changes):
        _, reference = save_model(class_name, **config)
        parameters = dict(reference.named_parameters())
        tensors, names = tensors_of(architecture, parameters)
        path = tmp_path / "model.gguf"
        found = write_gguf(path, metadata_of(architecture, config, **changes), tensors)
        for name, values in found.items():
            targets = names[name] if isinstance(names[name], list) else [names[name]]
            for target, part in zip(targets, torch.from_numpy(values).chunk(len(targets)), strict=True):
                parameters[target].copy_(part)
        assert not {name for name in parameters if "pooler" not in name} - {
            target for value in names.values() for target in ([value] if isinstance(value, str) else value)
        }
        return path, reference

    return save


@EXECUTORS
@pytest.mark.parametrize(
    ("architecture", "class_name", "config"),
    [
        ("bert", "BertModel", SIZES),
        ("bert", "BertModel", SIZES | {"type_vocab_size": 1}),
        ("nomic-bert", "NomicBertModel", SIZES),
        ("qwen3", "Qwen3Model", DECODER),
    ],
)
def test_gguf_equals_its_floats(architecture, class_name, config, save_gguf, load, resolve, pack, sequences):
    path, reference = save_gguf(architecture, class_name, config)
    info = resolve(path)
    assert info.sequence_pooling == (PoolingType.CLS,)
    assert info.sources["sequence_pooling"] == f"model.gguf: {architecture}.pooling_type"
    assert_close(load(info).forward(pack(sequences)).hidden_states, rows_of(reference, sequences))


@EXECUTORS
def test_gguf_of_jina_bert_equals_its_reference(executor, load, resolve, pack, sequences, tmp_path):
    weights = make_weights(has_norms=False)
    tensors, names = tensors_of("jina-bert-v2", weights, q8_0="F16")  # its rows have no multiple of 32 columns
    found = write_gguf(tmp_path / "model.gguf", metadata_of("jina-bert-v2", HUB), tensors)
    reference = Reference(weights | {names[name]: torch.from_numpy(values) for name, values in found.items()})
    model = load(resolve(tmp_path))
    expected = torch.cat([reference(sequence) for sequence in sequences]).float()
    assert_close(model.forward(pack(sequences)).hidden_states, expected, 1e-4)


@cases(__file__, "architecture", "class_name", "values", "rope")
def test_rope_of_gguf_is_read(
    architecture, class_name, values, rope, save_gguf, load_on_torch, resolve, pack, sequences
):
    config = DECODER if architecture == "qwen3" else SIZES
    path, reference = save_gguf(architecture, class_name, config | {"rope_parameters": rope}, **values)
    rows = load_on_torch(resolve(path)).forward(pack(sequences)).hidden_states
    assert_close(rows, rows_of(reference, sequences))


@cases(__file__, "changes", "message")
def test_unsupported_gguf_metadata_is_named(changes, message, save_gguf, resolve):
    path, _ = save_gguf("qwen3", "Qwen3Model", DECODER, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        resolve(path)


def test_unknown_tensor_of_gguf_is_rejected(save_model, resolve, load_on_torch, tmp_path):
    _, reference = save_model("BertModel", **SIZES)
    tensors, _ = tensors_of("bert", dict(reference.named_parameters()))
    tensors["cls.weight"] = tensors["blk.0.attn_q.weight"]
    write_gguf(tmp_path / "model.gguf", metadata_of("bert", SIZES), tensors)
    with pytest.raises(UnsupportedModelError, match=r"tensor 'cls.weight', which penstock does not read in bert"):
        load_on_torch(resolve(tmp_path / "model.gguf"))
