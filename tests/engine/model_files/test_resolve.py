"""Model files become a ModelInfo. Some folders are saved by sentence-transformers."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Dropout, Normalize, Pooling, Transformer

from penstock.engine.model_files.resolve import resolved_table, with_device
from penstock.engine.protocol.config import PoolerConfig
from penstock.engine.protocol.errors import ModelLoadError, UnsupportedModelError
from penstock.engine.protocol.model_info import Activation, AdapterSpec, DenseSpec, ModelInfo, ModelKind, PairChat
from penstock.engine.protocol.tasks import PoolingTask, PoolingType

from ...tables import cases, table
from .folders import BERT, MEAN, POOLING, TRANSFORMER, resolve, write

NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
CLASSIFIER = BERT | {"architectures": ["BertForSequenceClassification"]}
TOKEN_CLASSIFIER = BERT | {"architectures": ["BertForTokenClassification"], "id2label": {"0": "O", "1": "B-PER"}}


# Embedding models -----------------------------------------------------------------------------------------------------


def test_plain_encoder_takes_sentence_transformers_defaults(tmp_path: Path) -> None:
    info = resolve(write(tmp_path, {"config.json": BERT}))
    assert info.kind is ModelKind.EMBEDDING
    assert info.tasks == (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.SCORE)
    assert info.sequence_pooling == (PoolingType.MEAN,)
    assert info.sources["sequence_pooling"] == "default of encoders"
    assert (info.normalize, info.sources["normalize"]) == (True, "default")
    assert (info.packed, info.is_causal, info.embedding_size, info.max_model_len) == (True, False, 32, 40)
    assert (info.device, info.dtype) == ("auto", "auto")


@cases(__file__, "change", "is_causal")
def test_causal_models_pool_the_last_token(tmp_path: Path, change: dict[str, Any], is_causal: bool) -> None:
    info = resolve(write(tmp_path, {"config.json": BERT | change}))
    assert info.is_causal is is_causal
    assert info.sequence_pooling == ((PoolingType.LAST,) if is_causal else (PoolingType.MEAN,))


@cases(__file__, "change", "packed")
def test_known_families_are_packed(tmp_path: Path, change: dict[str, Any], packed: bool) -> None:
    assert resolve(write(tmp_path, {"config.json": BERT | change})).packed is packed


def test_transformer_and_dense_folders_are_read(tmp_path: Path) -> None:
    files = table(__file__, "test_transformer_and_dense_folders_are_read")
    folder = write(tmp_path, files | {"0_Transformer/config.json": BERT})
    info = resolve(folder)
    assert Path(info.path) == (folder / "0_Transformer").resolve()
    assert info.folder == str(folder.resolve())
    assert resolve(Path(info.folder)).dense == info.dense
    spec = info.dense[0]
    assert (Path(info.path) / spec.folder / "config.json").is_file()
    assert (spec.in_features, spec.out_features, spec.bias, spec.activation) == (32, 8, False, "GELU")
    assert (info.max_model_len, info.do_lower_case, info.embedding_size, info.normalize) == (24, True, 8, False)
    assert info.sources["max_model_len"] == "0_Transformer/sentence_bert_config.json: max_seq_length"
    assert info.sources["sequence_pooling"] == info.sources["include_prompt"] == "1_Pooling/config.json"
    assert info.sources["dense"] == "modules.json"


def test_legacy_pooling_keys_are_read_in_order(tmp_path: Path) -> None:
    keys = table(__file__, "test_legacy_pooling_keys_are_read_in_order")
    files = {
        "config.json": BERT,
        "modules.json": [TRANSFORMER, POOLING],
        "1_Pooling/config.json": keys,
        "config_sentence_transformers.json": {"prompts": {"query": "query: ", "passage": None}},
    }
    info = resolve(write(tmp_path, files))
    assert info.prompts == {"query": "query: "}
    assert info.sources["prompts"] == "config_sentence_transformers.json"
    assert [p.value for p in info.sequence_pooling] == ["CLS", "MAX", "MEAN", "MEAN_SQRT_LEN", "WEIGHTED_MEAN", "LAST"]
    assert (info.embedding_size, info.include_prompt) == (6 * 32, False)


def test_model_without_pooling_has_token_vectors_only(tmp_path: Path) -> None:
    files = {
        "config.json": BERT,
        "modules.json": [TRANSFORMER, {"type": "pylate.models.Dense.Dense", "path": "1_Dense"}],
        "1_Dense/config.json": {"in_features": 32, "out_features": 8, "bias": False},
    }
    info = resolve(write(tmp_path, files))
    assert info.tasks == (PoolingTask.TOKEN_EMBED, PoolingTask.SCORE)
    assert (info.sequence_pooling, info.embedding_size, info.normalize) == ((), 8, True)
    assert info.dense[0].activation == "Identity"


# Classes ---------------------------------------------------------------------------------------------------------


def classifier(tmp_path: Path, **change: Any) -> ModelInfo:
    return resolve(write(tmp_path, {"config.json": CLASSIFIER | change}))


@cases(__file__, "change", "labels")
def test_labels_are_in_column_order(tmp_path: Path, change: dict[str, Any], labels: list[str]) -> None:
    info = classifier(tmp_path, **change)
    assert list(info.labels) == labels
    is_pair_model = len(labels) == 1
    assert info.kind is (ModelKind.CROSS_ENCODER if is_pair_model else ModelKind.SEQUENCE_CLASSIFIER)
    assert info.tasks == (PoolingTask.CLASSIFY, PoolingTask.SCORE)[: 1 + is_pair_model]
    assert (info.sequence_pooling, info.embedding_size) == ((PoolingType.CLS,), 0)


@cases(__file__, "change", "activation", "source")
def test_activation_of_a_classifier_is_read(
    tmp_path: Path, change: dict[str, Any], activation: str, source: str
) -> None:
    info = classifier(tmp_path, **change)
    assert (info.activation, info.sources["activation"]) == (Activation(activation), source)


def test_token_classifier_takes_step_pooling(tmp_path: Path) -> None:
    step = PoolerConfig(pooling_type=PoolingType.STEP)
    info = resolve(write(tmp_path, {"config.json": TOKEN_CLASSIFIER}), pooler_config=step)
    assert (info.kind, info.tasks) == (ModelKind.TOKEN_CLASSIFIER, (PoolingTask.TOKEN_CLASSIFY,))
    assert (info.token_pooling, info.sequence_pooling, info.activation) == (PoolingType.STEP, (), Activation.SOFTMAX)


def test_decoder_classifier_scores_tokens_too(tmp_path: Path) -> None:
    config = BERT | {"model_type": "qwen2", "architectures": ["Qwen2ForSequenceClassification"]}
    folder = write(tmp_path, {"config.json": config})
    assert resolve(folder).tasks == (PoolingTask.CLASSIFY, PoolingTask.TOKEN_CLASSIFY)
    info = resolve(folder, pooler_config=PoolerConfig(tok_pooling_type=PoolingType.STEP, step_tag_id=3))
    assert (info.token_pooling, info.sequence_pooling) == (PoolingType.STEP, (PoolingType.LAST,))


def test_pooler_config_task_leaves_one_task(tmp_path: Path) -> None:
    folder = write(tmp_path, {"config.json": BERT})
    assert resolve(folder, pooler_config=PoolerConfig(task=PoolingTask.EMBED)).tasks == (
        PoolingTask.EMBED,
        PoolingTask.SCORE,
    )
    info = resolve(folder, pooler_config=PoolerConfig(task=PoolingTask.TOKEN_EMBED))
    assert info.tasks == (PoolingTask.TOKEN_EMBED,)
    with pytest.raises(ModelLoadError, match=r"task is 'classify'; .* has embed, token_embed, score"):
        resolve(folder, pooler_config=PoolerConfig(task=PoolingTask.CLASSIFY))


@cases(__file__, "change", "expected")
def test_classifier_pools_the_row_of_its_family(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    assert classifier(tmp_path, **change).sequence_pooling == (PoolingType(expected),)


# Limits ----------------------------------------------------------------------------------------------------------


@cases(__file__, "config", "tokenizer", "sentence_bert", "expected")
def test_max_model_len_is_the_smallest_limit(
    tmp_path: Path,
    config: dict[str, Any],
    tokenizer: dict[str, Any] | None,
    sentence_bert: dict[str, Any] | None,
    expected: int,
) -> None:
    files: dict[str, Any] = {"config.json": BERT | config}
    if tokenizer is not None:
        files["tokenizer_config.json"] = tokenizer
    if sentence_bert is not None:
        files |= {"modules.json": [TRANSFORMER, POOLING], "1_Pooling/config.json": MEAN}
        files["sentence_bert_config.json"] = sentence_bert
    assert resolve(write(tmp_path, files)).max_model_len == expected


def test_max_model_len_flag_is_bounded_by_the_positions(tmp_path: Path) -> None:
    files = {
        "config.json": BERT,
        "modules.json": [TRANSFORMER, POOLING],
        "1_Pooling/config.json": MEAN,
        "sentence_bert_config.json": {"max_seq_length": 30},
    }
    write(tmp_path, files)
    assert resolve(tmp_path).max_model_len == 30
    for limit in (10, 40):
        info = resolve(tmp_path, max_model_len=limit)
        assert (info.max_model_len, info.sources["max_model_len"]) == (limit, "--max-model-len")
    with pytest.raises(ModelLoadError, match=r"--max-model-len is 41.* 40 tokens"):
        resolve(tmp_path, max_model_len=41)
    # hf_overrides stand above config.json, here for a table of positions that was extended by hand.
    assert resolve(tmp_path, max_model_len=41, hf_overrides={"max_position_embeddings": 64}).max_model_len == 41


@cases(__file__, "change", "reach")
def test_scaled_rotary_positions_raise_the_bound(tmp_path: Path, change: dict[str, Any], reach: int) -> None:
    folder = write(tmp_path, {"config.json": BERT | {"model_type": "llama"} | change})
    assert resolve(folder).max_model_len == 40
    assert resolve(folder, max_model_len=reach).max_model_len == reach
    with pytest.raises(ModelLoadError, match=f"positions for {reach} tokens"):
        resolve(folder, max_model_len=reach + 1)


# The operator ----------------------------------------------------------------------------------------------------


@cases(__file__, "names", "change", "allows")
def test_known_names_and_the_operator_allow_shorter_vectors(
    tmp_path: Path, names: dict[str, str], change: dict[str, Any], allows: bool
) -> None:
    info = resolve(write(tmp_path, {"config.json": BERT | change}), **names)
    assert (info.is_matryoshka, info.matryoshka_dimensions) == (allows, ())


@pytest.mark.parametrize(("name", "include_prompt"), [("hkunlp/instructor-large", False), ("hkunlp/other", True)])
def test_instructor_models_do_not_pool_the_prompt(
    tmp_path: Path, name: str, include_prompt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / name, {"config.json": BERT})
    monkeypatch.chdir(tmp_path)
    assert resolve(Path(name)).include_prompt is include_prompt


def test_default_prompt_of_the_operator_precedes_that_of_the_files(tmp_path: Path) -> None:
    settings = {"prompts": {"query": "q: "}, "default_prompt_name": "query"}
    files = {"modules.json": [TRANSFORMER, POOLING], "1_Pooling/config.json": MEAN, "config.json": BERT}
    write(tmp_path, files | {"config_sentence_transformers.json": settings})
    info = resolve(tmp_path, default_prompt="text: ")
    assert (info.prompts["query"], info.prompts[info.default_prompt_name or ""]) == ("q: ", "text: ")
    assert info.sources["default_prompt_name"] == "--default-prompt"


def test_hf_overrides_change_config_json(tmp_path: Path) -> None:
    write(tmp_path, {"config.json": BERT | {"rope_parameters": {"rope_theta": 1.0, "rope_type": "default"}}})
    overrides = {"matryoshka_dimensions": [8, 16], "rope_parameters": {"rope_theta": 2.0}}
    info = resolve(tmp_path, hf_overrides=overrides)
    assert (info.matryoshka_dimensions, info.is_matryoshka) == ((8, 16), True)
    assert info.sources["matryoshka_dimensions"] == "--hf-overrides: matryoshka_dimensions"
    assert info.config["rope_parameters"] == {"rope_theta": 2.0, "rope_type": "default"}
    assert resolve(tmp_path, hf_overrides={"is_matryoshka": True}).is_matryoshka
    write(tmp_path, {"modules.json": [TRANSFORMER, POOLING], "1_Pooling/config.json": MEAN})
    assert resolve(tmp_path).kind is ModelKind.EMBEDDING
    info = resolve(tmp_path, hf_overrides={"architectures": ["BertForSequenceClassification"], "num_labels": 1})
    assert (info.kind, info.sources["kind"]) == (ModelKind.CROSS_ENCODER, "--hf-overrides: architectures")


def test_pooler_config_overrides_the_files(tmp_path: Path) -> None:
    write(tmp_path, {"config.json": BERT, "modules.json": [TRANSFORMER, POOLING], "1_Pooling/config.json": MEAN})
    config = PoolerConfig(
        pooling_type=PoolingType.ATTENTION,
        attention_head=3,
        normalize=True,
        dimensions=16,
        logit_bias=0.5,
        logit_scale=2.0,
    )
    info = resolve(tmp_path, pooler_config=config)
    assert (info.sequence_pooling, info.attention_head) == ((PoolingType.ATTENTION,), 3)
    assert (info.normalize, info.dimensions, info.logit_mean, info.logit_sigma) == (True, 16, 0.5, 0.5)
    for name in ("sequence_pooling", "attention_head", "normalize", "dimensions", "logit_mean", "logit_sigma"):
        assert info.sources[name] == "--pooler-config"
    assert info.sources["use_activation"] == "default"
    assert not resolve(tmp_path, pooler_config=PoolerConfig(use_activation=False)).normalize


def test_source_of_a_chosen_device_is_the_start(tmp_path: Path) -> None:
    write(tmp_path, {"config.json": BERT})
    info = with_device(resolve(tmp_path, dtype="float32"), "cpu", "float32")
    assert (info.device, info.sources["device"]) == ("cpu", "chosen at start-up")
    assert (info.dtype, info.sources["dtype"]) == ("float32", "--dtype")


def test_table_shows_values_in_short_lines(tmp_path: Path) -> None:
    info = resolve(write(tmp_path, {"config.json": BERT}))
    query = dataclasses.replace(info, architecture="StaticEmbedding", path="/q")
    dense = DenseSpec(folder="2", in_features=32, out_features=8, bias=True, activation="GELU")
    changed = dataclasses.replace(
        info, query_model=query, dense=(dense,), prompts={"query": "q: "}, matryoshka_dimensions=tuple(range(1, 15))
    )
    adapters = (AdapterSpec(name="law", index=0), AdapterSpec(name="code"), AdapterSpec(name="own", folder="/own"))
    changed = dataclasses.replace(changed, adapters=adapters, input_chat=PairChat())
    rows = {name: value for name, value, _ in resolved_table(changed)}
    expected = table(__file__, "test_table_shows_values_in_short_lines")
    assert {name: rows[name] for name in expected} == expected
    assert not {"labels", "max_embed_len", "sources", "config"} & rows.keys()


# Rejections --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "message"),
    [
        *table(__file__, "test_unusable_files_are_rejected_with_their_value"),
        *(
            ({"config.json": BERT | change}, message)
            for change, message in table(__file__, "unusable_values_of_config_json")
        ),
    ],
)
def test_unusable_files_are_rejected_with_their_value(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    files = {"config.json": BERT} | files
    write(tmp_path, {name: content for name, content in files.items() if content is not None})
    with pytest.raises(ModelLoadError, match=message):
        resolve(tmp_path)


@cases(__file__, "change", "max_model_len")
def test_limits_of_values_are_accepted(tmp_path: Path, change: dict[str, Any], max_model_len: int) -> None:
    assert resolve(write(tmp_path, {"config.json": BERT | change})).max_model_len == max_model_len


@pytest.mark.parametrize("foreign", ["custom_st.Normalize", "sentence_transformers_extra.models.Normalize"])
def test_modules_of_other_packages_are_rejected(tmp_path: Path, foreign: str) -> None:
    modules = [TRANSFORMER, POOLING, NORMALIZE | {"type": foreign}]
    folder = write(tmp_path, {"config.json": BERT, "modules.json": modules, "1_Pooling/config.json": MEAN})
    with pytest.raises(UnsupportedModelError, match=r"modules\.json lists the module " + re.escape(foreign) + ","):
        resolve(folder, trust_remote_code=True)


MAMBA = BERT | {"model_type": "mamba", "num_attention_heads": None}
CONFIGS = {"bert": BERT, "mamba": MAMBA, "classifier": CLASSIFIER, "token classifier": TOKEN_CLASSIFIER}


@cases(__file__, "config", "pooler", "message")
def test_pooler_config_that_does_not_fit_is_rejected(
    tmp_path: Path, config: str, pooler: dict[str, Any], message: str
) -> None:
    folder = write(tmp_path, {"config.json": CONFIGS[config]})
    with pytest.raises(ModelLoadError, match=message):
        resolve(folder, pooler_config=PoolerConfig.from_dict(pooler))


TEXT_TOWER = {"hidden_size": 32, "vocab_size": 100, "num_attention_heads": 4}


@cases(__file__, "config", "inputs")
def test_model_that_reads_no_text_is_rejected(config: dict[str, Any], inputs: str, tmp_path: Path) -> None:
    write(tmp_path, {"config.json": config})
    message = f"model_type '{config['model_type']}'\\) reads {inputs}; penstock reads images only with"
    with pytest.raises(UnsupportedModelError, match=message):
        resolve(tmp_path)


@pytest.mark.parametrize(
    "more", [{"architectures": ["LlavaForConditionalGeneration"]}, {"image_token_id": 9}, {"image_token_index": 9}]
)
def test_language_model_that_may_read_images_is_served(more: dict[str, Any], tmp_path: Path) -> None:
    config = {"model_type": "llava", "text_config": TEXT_TOWER, "vision_config": {"image_size": 16}, **more}
    assert resolve(write(tmp_path, {"config.json": config})).hidden_size == 32


# Against sentence-transformers -----------------------------------------------------------------------------------


MODES = table(__file__, "modes")


@pytest.mark.parametrize(("modes", "normalize"), [(tuple(MODES), True), (("mean_sqrt_len_tokens",), False)])
def test_saved_sentence_transformer_is_read(
    save_bert: Callable[..., Path], tmp_path: Path, modes: tuple[str, ...], normalize: bool
) -> None:
    modules = [
        Transformer(str(save_bert()), max_seq_length=20),
        Pooling(32, modes, include_prompt=normalize),
        Dropout(0.1),
        Dense(32 * len(modes), 24, activation_function=torch.nn.GELU()),
        Dense(24, 12, bias=False, activation_function=torch.nn.Identity()),
        *([Normalize()] if normalize else []),
    ]
    model = SentenceTransformer(modules=modules, prompts={"query": "q: "}, default_prompt_name="query", truncate_dim=6)
    model.save(str(tmp_path))
    info = resolve(tmp_path)
    again = SentenceTransformer(str(tmp_path), device="cpu")
    assert tuple(p.value for p in info.sequence_pooling) == tuple(MODES[m] for m in modes)
    assert info.normalize is normalize
    assert info.include_prompt is normalize
    assert info.max_model_len == again.max_seq_length == 20
    assert info.embedding_size == 12
    assert info.dimensions == again.get_embedding_dimension() == 6
    assert [(d.in_features, d.out_features, d.bias, d.activation) for d in info.dense] == [
        (32 * len(modes), 24, True, "GELU"),
        (24, 12, False, "Identity"),
    ]
    assert info.prompts["query"] == again.prompts["query"]
    assert info.default_prompt_name == again.default_prompt_name


@pytest.mark.parametrize("module", ["models.CLIPModel", "base.modules.transformer.Transformer"])
def test_sentence_transformers_clip_has_vectors_without_normalisation(module: str, tmp_path: Path) -> None:
    files = {
        "modules.json": [{"idx": 0, "name": "0", "path": "0_CLIPModel", "type": f"sentence_transformers.{module}"}],
        "0_CLIPModel/config.json": {"model_type": "clip", "text_config": TEXT_TOWER, "projection_dim": 24},
        "0_CLIPModel/preprocessor_config.json": {"image_processor_type": "CLIPImageProcessor"},
    }
    (tmp_path / "0_CLIPModel").mkdir()
    write(tmp_path, files)
    info = resolve(tmp_path)
    assert info.image is not None
    assert (info.model_type, info.image.model_type) == ("clip_text_model", "clip_vision_model")
    assert (info.sequence_pooling, info.image.sequence_pooling) == ((PoolingType.LAST,), (PoolingType.CLS,))
    assert [part.dense[0].name for part in (info, info.image)] == ["text_projection", "visual_projection"]
    assert (info.embedding_size, info.image.embedding_size, info.normalize, info.image.normalize) == (
        24,
        24,
        False,
        False,
    )
    assert (info.max_model_len, info.image.max_model_len, info.longest_sequence) == (77, 50, 77)
    assert info.tasks == (PoolingTask.EMBED, PoolingTask.SCORE)


def test_images_and_texts_of_different_widths_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{}")
    write(tmp_path, {"config.json": {"model_type": "siglip", "text_config": TEXT_TOWER}})
    with pytest.raises(UnsupportedModelError, match="gives texts vectors of width 32, and images of width 768"):
        resolve(tmp_path)


# Language models that read images -------------------------------------------------------------------------------------

QWEN3_VL = table(__file__, "qwen3_vl")
AREA = {"patch_size": 16, "min_pixels": 4_096, "max_pixels": 100_000}


def test_language_model_with_image_processor_reads_chats_of_texts_and_images(tmp_path: Path) -> None:
    info = resolve(write(tmp_path, {"config.json": QWEN3_VL, "preprocessor_config.json": AREA}))
    assert (info.reads_images, info.mixes_images, info.is_causal) == (True, True, True)
    assert info.sequence_pooling == (PoolingType.LAST,)
    assert info.prompts[info.default_prompt_name or ""] == "Represent the user's input."
    assert info.input_chat is not None
    assert info.input_chat.arguments == {"add_generation_prompt": True}
    (tmp_path / "preprocessor_config.json").unlink()
    text = resolve(tmp_path)
    assert (text.reads_images, text.input_chat, text.prompts) == (False, None, {})


def test_model_of_pages_has_vectors_of_tokens_only(tmp_path: Path) -> None:
    config = {"model_type": "colqwen2", "architectures": ["ColQwen2ForRetrieval"], "vlm_config": QWEN3_VL}
    files = {"config.json": config | {"embedding_dim": 24}, "preprocessor_config.json": AREA | {"patch_size": 16}}
    info = resolve(write(tmp_path, files))
    assert (info.tasks, info.embedding_size) == ((PoolingTask.TOKEN_EMBED, PoolingTask.SCORE), 24)
    assert (info.reads_images, info.mixes_images, info.vocab_size, info.max_model_len) == (True, False, 64, 512)
    assert info.multi_vector is not None


@pytest.mark.parametrize(
    ("files", "settings", "message"),
    [
        ({"config.json": BERT}, {"mm_processor_kwargs": {"max_pixels": 9}}, "which reads texts only"),
        (
            {"config.json": QWEN3_VL, "preprocessor_config.json": AREA},
            {"pooler_config": PoolerConfig(enable_chunked_processing=True)},
            "enable_chunked_processing does not fit",
        ),
        ({"config.json": QWEN3_VL | {"model_type": "colpali", "embedding_dim": 0}}, {}, "embedding_dim of .* is 0"),
    ],
)
def test_setting_that_does_not_fit_images_is_rejected(
    tmp_path: Path, files: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises((ModelLoadError, UnsupportedModelError), match=message):
        resolve(write(tmp_path, files), **settings)


def test_chat_of_sentence_transformers_files_has_precedence(tmp_path: Path) -> None:
    files = {"config.json": QWEN3_VL, "preprocessor_config.json": AREA}
    files |= table(__file__, "test_chat_of_sentence_transformers_files_has_precedence")
    info = resolve(write(tmp_path, files))
    assert info.input_chat is not None
    assert (info.input_chat.is_structured, info.input_chat.arguments) == (False, {"add_generation_prompt": False})
    assert (info.prompts, info.default_prompt_name) == ({"query": "Find it."}, None)
    assert info.sequence_pooling == (PoolingType.LAST,)
