"""Checkpoints in every form that users have them, and clear errors for those that are broken."""

import json
import logging
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.core.loading.weights_loader import load_dense, load_model
from penstock.engine.families.registry import find_family
from penstock.engine.protocol.errors import UnsupportedModelError, WeightError
from penstock.engine.protocol.model_info import DenseSpec
from penstock.engine.protocol.multi_vector import SparseKind, SparsePooling

from ..parity import assert_close, rows_of

SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "num_labels": 3,
}
SEQUENCES = [[5, 6, 7], [8, 9, 10, 11, 12]]


@pytest.fixture
def tensors(save_model):
    """A saved BERT classifier: its folder, its tensors, and the function that writes them back."""
    folder, model = save_model("BertForSequenceClassification", **SIZES)
    path = folder / "model.safetensors"

    def write(changed):
        save_file(changed, path, metadata={"format": "pt"})

    return folder, load_file(path), write, model


def hidden_states(model, pack):
    return model.forward(pack(SEQUENCES)).hidden_states


def as_shards(folder, tensors, suffix):
    """Writes the tensors as three shards with an index."""
    names = sorted(tensors)
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    weight_map = {}
    for shard in range(3):
        file = f"{stem}-{shard + 1:05}-of-00003.{suffix}"
        part = {n: tensors[n].clone() for n in names[shard::3]}
        if suffix == "safetensors":
            save_file(part, folder / file)
        else:
            torch.save(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("form", ["safetensors", "safetensors-shards", "bin", "bin-shards", "old-bin"])
def test_every_form_of_checkpoint_loads(form, tensors, resolve, pack):
    folder, values, _, reference = tensors
    if form != "safetensors":
        (folder / "model.safetensors").unlink()
    if form == "safetensors-shards":
        as_shards(folder, values, "safetensors")
    elif form == "bin-shards":
        as_shards(folder, values, "bin")
    elif form == "bin":
        torch.save(values, folder / "pytorch_model.bin")
    elif form == "old-bin":
        torch.save(values, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert_close(hidden_states(load_model(resolve(folder)), pack), rows_of(reference, SEQUENCES))


def test_weights_do_not_depend_on_the_file(tensors, resolve, pack):
    folder, _, _, reference = tensors
    model = load_model(resolve(folder))
    shutil.rmtree(folder)
    assert_close(hidden_states(model, pack), rows_of(reference, SEQUENCES))


@pytest.mark.parametrize("class_name", ["BertForMaskedLM", "BertForPreTraining", "BertForQuestionAnswering"])
def test_checkpoint_of_another_head_loads_its_base(class_name, save_model, resolve, pack):
    folder, reference = save_model(class_name, **SIZES)
    assert_close(hidden_states(load_model(resolve(folder)), pack), rows_of(reference, SEQUENCES))


@pytest.mark.parametrize("architectures", [["BertModel"], None])
def test_base_without_prefix_and_without_pooler_loads(architectures, tensors, resolve, pack):
    folder, values, write, reference = tensors
    write({n.removeprefix("bert."): t for n, t in values.items() if "pooler" not in n and "classifier" not in n})
    info = resolve(folder, hf_overrides={"architectures": architectures})
    assert_close(hidden_states(load_model(info), pack), rows_of(reference, SEQUENCES))


def test_old_names_of_layer_norm_load(tensors, resolve, pack):
    folder, values, write, reference = tensors
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {}
    for name, tensor in values.items():
        for new, former in old.items():
            name = name.replace(new, former)
        renamed[name] = tensor
    assert len(renamed.keys() - values.keys()) == 10
    write(renamed)
    assert_close(hidden_states(load_model(resolve(folder)), pack), rows_of(reference, SEQUENCES))


def test_reduced_precision_checkpoint_is_cast(tensors, resolve, pack):
    folder, values, write, _ = tensors
    write({n: t.to(torch.float16) for n, t in values.items()})
    assert hidden_states(load_model(resolve(folder)), pack).dtype == torch.float32
    assert hidden_states(load_model(resolve(folder, "bfloat16")), pack).dtype == torch.bfloat16


def test_unused_tensors_are_told_at_debug_level(tensors, resolve, caplog):
    folder, values, write, _ = tensors
    write({**values, "bert.embeddings.position_ids": torch.arange(40)[None]})
    with caplog.at_level(logging.DEBUG, "penstock.engine"):
        load_model(resolve(folder))
    assert "1 tensors of the checkpoint are not used: bert.embeddings.position_ids" in caplog.text


@pytest.mark.parametrize(
    "name",
    [
        "bert.embeddings.word_embeddings.weight",
        "bert.encoder.layer.1.attention.self.key.weight",
        "bert.encoder.layer.0.output.LayerNorm.bias",
        "bert.pooler.dense.weight",
        "classifier.bias",
    ],
)
def test_missing_weight_is_named(name, tensors, resolve):
    folder, values, write, _ = tensors
    del values[name]
    write(values)
    with pytest.raises(WeightError, match=name):
        load_model(resolve(folder))


def test_wrong_shape_is_named(tensors, resolve):
    folder, values, write, _ = tensors
    write({**values, "bert.encoder.layer.1.output.dense.weight": torch.zeros(32, 47)})
    with pytest.raises(WeightError, match=r"'bert.encoder.layer.1.output.dense.weight' .*\[32, 47\].*\[32, 48\]"):
        load_model(resolve(folder))


def test_wrong_number_of_labels_is_named(tensors, resolve):
    folder = tensors[0]
    labels = {"id2label": {str(i): f"L{i}" for i in range(5)}}
    with pytest.raises(WeightError, match=r"'classifier.weight' .*\[3, 32\].*\[5, 32\]"):
        load_model(resolve(folder, hf_overrides=labels))


def test_unknown_class_name_loads_as_its_model_type(tensors, resolve, pack, caplog):
    folder, _, _, reference = tensors
    model = load_model(resolve(folder, hf_overrides={"architectures": ["BertForMysteries"]}))
    assert_close(hidden_states(model, pack), rows_of(reference, SEQUENCES))
    assert "'BertForMysteries' is not known; it is loaded as BertModel" in caplog.text


def test_class_with_code_of_its_own_is_refused(tensors, resolve):
    own = {"architectures": ["OwnBert"], "auto_map": {"AutoModel": "modeling_own.OwnBert"}}
    with pytest.raises(UnsupportedModelError, match=r"'OwnBert'.*--trust-remote-code"):
        load_model(resolve(tensors[0], hf_overrides=own))


def test_unknown_family_is_named():
    with pytest.raises(UnsupportedModelError, match="'FooModel'"):
        find_family("FooModel", "foo", {})


def test_folder_without_weights_is_named(tensors, resolve):
    folder = tensors[0]
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightError, match="holds no weights"):
        load_model(resolve(folder))


def test_missing_shard_is_named(tensors, resolve):
    folder, values, _, _ = tensors
    (folder / "model.safetensors").unlink()
    as_shards(folder, values, "safetensors")
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(WeightError, match=r"not there: model-00002-of-00003\.safetensors"):
        load_model(resolve(folder))


def test_shard_with_a_name_that_no_file_can_have_is_named(tensors, resolve):
    folder, values, _, _ = tensors
    (folder / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(values, "a" * 5000)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightError, match=r"not there: aaaa"):
        load_model(resolve(folder))


def test_index_that_lists_a_tensor_of_no_shard_is_named(tensors, resolve):
    folder, values, _, _ = tensors
    (folder / "model.safetensors").unlink()
    as_shards(folder, values, "safetensors")
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"]["bert.encoder.layer.0.output.dense.bias"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(listed))
    files = {n for n in values if listed["weight_map"][n].startswith("model-00001")}
    if "bert.encoder.layer.0.output.dense.bias" in load_file(folder / "model-00001-of-00003.safetensors"):
        pytest.skip("the tensor happens to lie in the first shard")
    assert files
    with pytest.raises(WeightError, match=r"model-00001-of-00003.safetensors.*bert.encoder.layer.0.output.dense.bias"):
        load_model(resolve(folder))


@pytest.mark.parametrize("file", ["../elsewhere/part", "/etc/part", "a/../../part", "", 7, None, ["part"]])
def test_index_that_leads_out_of_the_folder_is_refused(file, tensors, resolve):
    folder, values, _, _ = tensors
    (folder / "model.safetensors").unlink()
    outside = folder.parent / "elsewhere"
    outside.mkdir()
    save_file(values, outside / "part")
    index = {"weight_map": dict.fromkeys(values, file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightError, match=r"index\.json puts the tensor .* not inside the model's folder"):
        load_model(resolve(folder))


def test_index_that_leads_out_of_the_folder_does_not_reach_transformers(save_model, resolve):
    folder, model = save_model("AlbertModel", **SIZES, embedding_size=16)
    (folder / "model.safetensors").rename(folder.parent / "part")
    index = {"weight_map": dict.fromkeys(model.state_dict(), "../part"), "metadata": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightError, match=r"'../part', which is not inside the model's folder"):
        load_model(resolve(folder))


@pytest.mark.parametrize("class_name", ["BertModel", "AlbertModel"])
def test_snapshot_of_a_hub_loads_through_its_links(class_name, save_model, resolve, pack):
    folder, reference = save_model(class_name, **SIZES, **({"embedding_size": 32} if "Albert" in class_name else {}))
    as_shards(folder, load_file(folder / "model.safetensors"), "safetensors")
    (folder / "model.safetensors").unlink()
    snapshot, blobs = folder.parent / "snapshots" / "main", folder.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(folder.iterdir()):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert_close(hidden_states(load_model(resolve(snapshot)), pack), rows_of(reference, SEQUENCES))


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000])
def test_damaged_index_is_named(content, tensors, resolve):
    folder = tensors[0]
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(WeightError, match=r"index\.json"):
        load_model(resolve(folder))


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"])
def test_damaged_file_is_named(name, tensors, resolve):
    folder = tensors[0]
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"\x00garbage that is no checkpoint")
    with pytest.raises(WeightError, match=name):
        load_model(resolve(folder))


def test_bin_that_would_run_code_is_refused(tensors, resolve):
    folder = tensors[0]
    (folder / "model.safetensors").unlink()
    torch.save({"bert": pytest}, folder / "pytorch_model.bin", pickle_module=FunctionPickle)
    with pytest.raises(WeightError, match=r"pytorch_model\.bin"):
        load_model(resolve(folder))


class FunctionPickle:
    """Pickles a call of `print` in place of every object."""

    import pickle as _pickle

    HIGHEST_PROTOCOL = _pickle.HIGHEST_PROTOCOL

    class Pickler(_pickle.Pickler):
        def reducer_override(self, obj):
            return (print, ("run",)) if obj is pytest else NotImplemented


@pytest.mark.parametrize("activation", ["Tanh", "Identity", "GELU"])
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_dense_modules_equal_torch(activation, form, tensors, resolve):
    folder = tensors[0]
    torch.manual_seed(0)
    wide, narrow = torch.nn.Linear(32, 64), torch.nn.Linear(64, 8, bias=False)
    for name, layer in (("2_Dense", wide), ("3_Dense", narrow)):
        (folder / name).mkdir()
        state = {f"linear.{key}": value for key, value in layer.state_dict().items()}
        if form == "safetensors":
            save_file(state, folder / name / "model.safetensors")
        else:
            torch.save(state, folder / name / "pytorch_model.bin")
    info = resolve(folder)
    info.dense.__class__  # noqa: B018
    specs = (
        DenseSpec(folder="2_Dense", in_features=32, out_features=64, bias=True, activation=activation),
        DenseSpec(folder="3_Dense", in_features=64, out_features=8, bias=False, activation="Identity"),
    )
    first, second = load_dense(with_dense(info, specs))
    rows = torch.randn(5, 32)
    expected = narrow(getattr(torch.nn, activation)()(wide(rows)))
    actual = second(first(rows.bfloat16().float()))
    assert actual.dtype == torch.float32
    assert first(rows.bfloat16()).dtype == torch.float32
    torch.testing.assert_close(second(first(rows)), expected, rtol=0, atol=1e-5)


def test_unknown_dense_activation_is_named(tensors, resolve):
    folder = tensors[0]
    (folder / "2_Dense").mkdir()
    save_file({"linear.weight": torch.zeros(4, 32)}, folder / "2_Dense" / "model.safetensors")
    spec = DenseSpec(folder="2_Dense", in_features=32, out_features=4, bias=False, activation="Bilinear")
    with pytest.raises(UnsupportedModelError, match="'Bilinear'"):
        load_dense(with_dense(resolve(folder), (spec,)))


def with_dense(info, specs):
    from dataclasses import replace

    return replace(info, dense=specs)


def test_vocabulary_head_is_float32_on_a_cpu(save_model, resolve):
    folder, _ = save_model("BertForMaskedLM", **(SIZES | {"vocab_size": 301}))
    info = resolve(folder)
    recipe = SparsePooling(kind=SparseKind.VOCABULARY_LOGITS)
    head = load_model(replace(info, dtype="bfloat16", sparse=recipe)).vocabulary_head
    assert head is not None
    assert head(torch.ones(1, SIZES["hidden_size"])).dtype == torch.float32
