"""Checkpoints load in every format; errors of damaged checkpoints name file and tensor."""

import json
import pickle
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.activations import ACT2FN

from penstock.engine.core.loading.weights_loader import load_dense, load_model
from penstock.engine.executors.torch.layers.linear import _ACTIVATIONS, Linear
from penstock.engine.executors.torch.layers.weights import are_finite
from penstock.engine.executors.torch.model_heads import AnswerHead
from penstock.engine.families.spec import AnswerHeadSpec
from penstock.engine.protocol.errors import UnsupportedModelError, WeightError
from penstock.engine.protocol.model_info import DenseSpec

from ....tables import table
from ..families import assert_close, rows_of

SIZES = table(__file__, "sizes_of_loaded_models")
SEQUENCES = [[5, 6, 7], [8, 9, 10, 11, 12]]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def saved(save_model):
    """A saved BERT classifier: folder, tensors and transformers model."""
    folder, model = save_model("BertForSequenceClassification", **SIZES)
    return folder, load_file(folder / "model.safetensors"), model


@pytest.fixture
def equals_reference(pack):
    """Asserts that a model gives the hidden states of the transformers model."""
    return lambda model, reference: assert_close(
        model.forward(pack(SEQUENCES)).hidden_states, rows_of(reference, SEQUENCES)
    )


def write(folder, tensors):
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_shards(folder, tensors, suffix="safetensors"):
    """Replaces the checkpoint with three shards and an index."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    names = sorted(tensors)
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    weight_map = {}
    for shard in range(3):
        file = f"{stem}-{shard + 1:05}-of-00003.{suffix}"
        part = {n: tensors[n].clone() for n in names[shard::3]}
        save = save_file if suffix == "safetensors" else torch.save
        save(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def replace_checkpoint(folder, file, content):
    (folder / "model.safetensors").unlink()
    (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.mark.parametrize("form", ["safetensors-shards", "bin", "bin-shards", "old-bin"])
def test_every_checkpoint_format_loads(form, saved, resolve, equals_reference):
    folder, tensors, reference = saved
    if form.endswith("shards"):
        write_shards(folder, tensors, form.removesuffix("-shards"))
    else:
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=form == "bin")
    model = load_model(resolve(folder))
    shutil.rmtree(folder)  # the weights must not depend on the files
    equals_reference(model, reference)


def test_base_without_prefix_and_pooler_loads(saved, resolve, equals_reference):
    folder, tensors, reference = saved
    base = {n.removeprefix("bert."): t for n, t in tensors.items() if "pooler" not in n and "classifier" not in n}
    write(folder, base)
    equals_reference(load_model(resolve(folder, hf_overrides={"architectures": ["BertModel"]})), reference)


def test_old_names_of_layer_norm_load(saved, resolve, equals_reference):
    folder, tensors, reference = saved
    old = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
        for n, t in tensors.items()
    }
    assert len(old.keys() - tensors.keys()) == 10
    write(folder, old)
    equals_reference(load_model(resolve(folder)), reference)


@pytest.mark.parametrize("name", ["bert.encoder.layer.1.attention.self.key.weight", "classifier.bias"])
def test_missing_weight_is_named(name, saved, resolve):
    folder, tensors, _ = saved
    del tensors[name]
    write(folder, tensors)
    with pytest.raises(WeightError, match=name):
        load_model(resolve(folder))


def test_wrong_shape_is_named(saved, resolve):
    folder, tensors, _ = saved
    labels = {"id2label": {str(i): f"L{i}" for i in range(5)}}
    with pytest.raises(WeightError, match=r"'classifier.weight' .*\[3, 32\].*\[5, 32\]"):
        load_model(resolve(folder, hf_overrides=labels))
    write(folder, {**tensors, "bert.encoder.layer.1.output.dense.weight": torch.zeros(32, 47)})
    with pytest.raises(WeightError, match=r"'bert.encoder.layer.1.output.dense.weight' .*\[32, 47\].*\[32, 48\]"):
        load_model(resolve(folder))


def test_unknown_class_loads_as_its_model_type(saved, resolve, equals_reference, caplog):
    folder, _, reference = saved
    model = load_model(resolve(folder, hf_overrides={"architectures": ["BertForMysteries"]}))
    equals_reference(model, reference)
    assert "'BertForMysteries' is not known; it is loaded as BertModel" in caplog.text


def test_class_with_its_own_code_is_rejected(saved, resolve):
    own = {"architectures": ["OwnBert"], "auto_map": {"AutoModel": "modeling_own.OwnBert"}}
    with pytest.raises(UnsupportedModelError, match=r"'OwnBert'.*--trust-remote-code"):
        load_model(resolve(saved[0], hf_overrides=own))


def test_missing_shard_is_named(saved, resolve):
    folder, tensors, _ = saved
    write_shards(folder, tensors)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(WeightError, match="do not exist: model-00002"):
        load_model(resolve(folder))


@pytest.mark.parametrize("file", ["../elsewhere/part", "/etc/part", "a/../../part", "", 7])
def test_index_with_a_path_outside_is_rejected(file, saved, resolve):
    folder, tensors, _ = saved
    outside = folder.parent / "elsewhere"
    outside.mkdir()
    save_file(tensors, outside / "part")
    replace_checkpoint(folder, INDEX, json.dumps({"weight_map": dict.fromkeys(tensors, file)}))
    with pytest.raises(WeightError, match=r"index\.json lists the file .* not inside the folder of the model"):
        load_model(resolve(folder))


def test_path_outside_does_not_reach_transformers(save_model, resolve):
    folder, model = save_model("AlbertModel", **SIZES, embedding_size=16)
    (folder / "model.safetensors").rename(folder.parent / "part")
    index = {"weight_map": dict.fromkeys(model.state_dict(), "../part"), "metadata": {}}
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(WeightError, match=r"'../part' for the tensor .* not inside the folder"):
        load_model(resolve(folder))


@pytest.mark.parametrize(("class_name", "options"), [("BertModel", {}), ("AlbertModel", {"embedding_size": 32})])
def test_hub_snapshot_loads_through_its_links(class_name, options, save_model, resolve, equals_reference):
    folder, reference = save_model(class_name, **SIZES, **options)
    write_shards(folder, load_file(folder / "model.safetensors"))
    snapshot, blobs = folder.parent / "snapshots" / "main", folder.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(folder.iterdir()):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    equals_reference(load_model(resolve(snapshot)), reference)


@pytest.mark.parametrize("content", ["[]", '{"weight_map": []}', '{"weight_map": {}}'])
def test_damaged_index_is_named(content, saved, resolve):
    replace_checkpoint(saved[0], INDEX, content)
    with pytest.raises(WeightError, match=INDEX):
        load_model(resolve(saved[0]))


class PrintPickle:
    """Pickles a call of `print` in place of this class."""

    HIGHEST_PROTOCOL = pickle.HIGHEST_PROTOCOL

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj):
            return (print, ("run",)) if obj is PrintPickle else NotImplemented


def test_pickle_that_calls_a_function_is_rejected(saved, resolve):
    folder = saved[0]
    (folder / "model.safetensors").unlink()
    torch.save({"bert": PrintPickle}, folder / "pytorch_model.bin", pickle_module=PrintPickle)
    with pytest.raises(WeightError, match=r"pytorch_model\.bin"):
        load_model(resolve(folder))


@pytest.mark.parametrize(("activation", "form"), [("Tanh", "safetensors"), ("GELU", "bin")])
def test_dense_modules_equal_torch(activation, form, saved, resolve):
    folder = saved[0]
    torch.manual_seed(0)
    wide, narrow = torch.nn.Linear(32, 64), torch.nn.Linear(64, 8, bias=False)
    for name, layer in (("2_Dense", wide), ("3_Dense", narrow)):
        (folder / name).mkdir()
        state = {f"linear.{key}": value for key, value in layer.state_dict().items()}
        if form == "safetensors":
            save_file(state, folder / name / "model.safetensors")
        else:
            torch.save(state, folder / name / "pytorch_model.bin")
    specs = (
        DenseSpec(folder="2_Dense", in_features=32, out_features=64, bias=True, activation=activation),
        DenseSpec(folder="3_Dense", in_features=64, out_features=8, bias=False, activation="Identity"),
    )
    first, second = load_dense(replace(resolve(folder), dense=specs))
    rows = torch.randn(5, 32)
    assert first(rows.bfloat16()).dtype == torch.float32
    expected = narrow(getattr(torch.nn, activation)()(wide(rows)))
    torch.testing.assert_close(second(first(rows)), expected, rtol=0, atol=1e-5)


def test_weight_of_an_answer_head_is_not_reordered() -> None:
    weight = torch.ones(1, 8)
    spec = AnswerHeadSpec(tokens=(0,), vocab_size=4, size=8, is_difference=False, is_tied=None, scale=1.0, softcap=None)
    head = AnswerHead(weight, None, spec)
    is_reordered = [linear._weight_OI.is_mkldnn for linear in (Linear(weight, None), head._out)]
    assert is_reordered == [torch.backends.mkldnn.is_available(), False]


def test_activations_equal_those_of_transformers() -> None:
    x = torch.linspace(-4.0, 4.0, 33)
    for name, activation in _ACTIVATIONS.items():
        torch.testing.assert_close(activation.apply(x), ACT2FN[name](x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_values_that_are_not_finite_are_found(dtype: torch.dtype) -> None:
    for value, is_finite in ((448.0, True), (float("nan"), False)):
        assert are_finite(torch.tensor([value] * 3).to(dtype)) is is_finite
    assert are_finite(torch.full((2,), 3e38))  # the sum is infinite
