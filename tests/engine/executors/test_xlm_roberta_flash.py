"""XLM-RoBERTa with the config.json and the weight names of the flash implementation equals transformers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.executors.cpu.array_encoder import read_spec
from penstock.engine.protocol.errors import ModelLoadError
from penstock.engine.protocol.tasks import PoolingType

from ...tables import table
from .families import ENCODER_SIZES, EXECUTORS, assert_close, assert_rows_equal, first_row_logits, logits_of, rows_of

TASKS = ["retrieval.query", "retrieval.passage", "separation", "classification", "text-matching"]
SIZES = ENCODER_SIZES | {"type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}
HUB = SIZES | table(__file__, "config_json_of_xlm_roberta_flash_on_the_hub")
FLASH_NAMES = table(__file__, "names_of_the_flash_implementation")
RERANKER = table(__file__, "xlm_roberta_flash_reranker")
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
ADAPTED = ("Wqkv", "out_proj", "fc1", "fc2", "word_embeddings", "token_type_embeddings", "dense")


def with_adapters(tensors):
    """The tensors under the names of torch's parametrizations, with adapters for five tasks."""
    renamed = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if module == name or not module.endswith(ADAPTED):
            renamed[name] = tensor
            continue
        base = f"roberta.{module}.parametrizations.weight"
        rows, columns = tensor.shape
        renamed |= {f"{base}.original": tensor, f"{base}.0.lora_A": torch.randn(5, 4, columns) / columns**0.5}
        renamed[f"{base}.0.lora_B"] = torch.randn(5, rows, 4)
        if module.endswith("embeddings"):
            renamed |= {f"{base}.0.lora_A": torch.randn(5, rows, 4), f"{base}.0.lora_B": torch.randn(5, 4, columns) / 9}
    return {name if name.startswith("roberta.") else f"roberta.{name}": tensor for name, tensor in renamed.items()}


def with_flash_names(tensors):
    """The tensors of an XLM-RoBERTa of transformers under the names of the flash implementation."""
    renamed = {}
    for name, tensor in tensors.items():
        new = name
        for old, flash in FLASH_NAMES.items():
            new = new.replace(old, flash)
        if "attention.self.key" in name or "attention.self.value" in name:
            continue
        if "attention.self.query" in name:
            parts = [tensors[name.replace("query", part)] for part in ("query", "key", "value")]
            new, tensor = new.replace("attention.self.query", "mixer.Wqkv"), torch.cat(parts)
        renamed[new] = tensor
    return renamed


@pytest.fixture
def save_hub(save_model):
    """Saves a model with the layout of jina-embeddings-v3 on the hub, and returns (folder, model)."""

    def save(changes=None, **config):
        folder, reference = save_model(
            "JinaEmbeddingsV3Model", {"save_original_format": True}, **(SIZES | ROPE | config)
        )
        (folder / "config.json").write_text(json.dumps(HUB | (changes or {})))
        tensors = load_file(folder / "model.safetensors")
        assert "encoder.layers.0.mixer.Wqkv.weight" in tensors
        save_file(with_adapters(tensors), folder / "model.safetensors")
        return folder, reference

    return save


@EXECUTORS
@pytest.mark.parametrize("trusts", [False, True])
def test_hub_layout_equals_transformers_without_adapters(executor, trusts, load, save_hub, resolve, pack, sequences):
    folder, reference = save_hub()
    info = resolve(folder, trust_remote_code=trusts)
    assert (info.packed, info.max_model_len) == (True, 158)
    assert [adapter.name for adapter in info.task_adapters] == TASKS
    model = load(info, trust_remote_code=trusts)
    assert_rows_equal(model, reference, pack, sequences, 0 if executor == "cpu" else 1e-6)


@EXECUTORS
def test_task_adapters_of_the_hub_equal_merged_weights(executor, load, save_hub, resolve, pack, sequences):
    folder, reference = save_hub()
    tensors = load_file(folder / "model.safetensors")
    model = load(resolve(folder))
    hidden = model.forward(pack(sequences, adapters=range(5))).hidden_states
    plain = {key: value.clone() for key, value in reference.state_dict().items()}
    expected = []
    for number, sequence in enumerate(sequences):
        reference.load_state_dict(plain)
        for name in [name for name in tensors if name.endswith("lora_A")]:
            module = name.removeprefix("roberta.").removesuffix(".parametrizations.weight.0.lora_A")
            down, up = tensors[name][number], tensors[name[:-1] + "B"][number]
            added = (down @ up if module.endswith("embeddings") else up @ down) / 4  # lora_alpha / lora_rank
            merge(reference, module, added)
        expected.append(rows_of(reference, [sequence]))
    assert_close(hidden, torch.cat(expected))


def merge(model, module, added):
    """Adds to the weight of a module that has the name of the hub."""
    names = {"mixer.out_proj": "self_attn.o_proj", "encoder.layers": "layers"}
    for old, new in names.items():
        module = module.replace(old, new)
    if not module.endswith("mixer.Wqkv"):
        model.get_submodule(module).weight.data += added
        return
    attention = model.get_submodule(module.replace("mixer.Wqkv", "self_attn"))
    for part, rows in zip((attention.q_proj, attention.k_proj, attention.v_proj), added.chunk(3), strict=True):
        part.weight.data += rows


@EXECUTORS
def test_padding_token_in_text_keeps_rotary_positions(executor, load, save_hub, resolve, pack):
    folder, reference = save_hub()
    sequences = [[7, 1, 9], [1, 1, 8, 1, 5, 6]]
    assert_close(load(resolve(folder)).forward(pack(sequences)).hidden_states, rows_of(reference, sequences))


@EXECUTORS
@pytest.mark.parametrize("is_original", [True, False], ids=["hub-names", "transformers-names"])
def test_classifier_reads_both_layouts(executor, is_original, load, save_model, resolve, pack, sequences):
    folder, reference = save_model(
        "JinaEmbeddingsV3ForSequenceClassification", {"save_original_format": is_original}, **SIZES
    )
    assert_close(first_row_logits(load(resolve(folder)), sequences, pack), logits_of(reference, sequences))


@EXECUTORS
def test_reranker_with_learned_positions_equals_transformers(executor, load, save_model, resolve, pack):
    folder, reference = save_model("XLMRobertaForSequenceClassification", **(SIZES | {"num_labels": 1}))
    tensors = with_flash_names(load_file(folder / "model.safetensors"))
    assert "roberta.encoder.layers.2.mlp.fc2.weight" in tensors
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(HUB | RERANKER | {"num_labels": 1}))
    sequences = [[7, 1, 9], list(range(2, 130)), [5]]
    assert_close(first_row_logits(load(resolve(folder)), sequences, pack), logits_of(reference, sequences))


@EXECUTORS
def test_modules_of_the_hub_are_read(executor, load, save_hub, resolve):
    folder, _ = save_hub()
    modules = table(__file__, "test_modules_of_the_hub_are_read")
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 48, "pooling_mode_mean_tokens": True})
    )
    info = resolve(folder)
    load(info)
    assert info.sequence_pooling == (PoolingType.MEAN,)
    (folder / "config.json").write_text(json.dumps(HUB | RERANKER))
    with pytest.raises(ModelLoadError, match="code of another package"):
        resolve(folder)


def test_other_positions_are_rejected(resolve, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HUB | {"position_embedding_type": "alibi"}))
    with pytest.raises(ModelLoadError, match="position_embedding_type"):
        read_spec(resolve(tmp_path))
