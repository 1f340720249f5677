"""Reads a model's JSON files into ModelInfo: every value that changes results, and its source.

Takes milliseconds, because it needs neither torch nor weights. Order of sources: the operator (`--pooler-config`,
`--max-model-len`, `--hf-overrides`), sentence-transformers' files, config.json, defaults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from ..families.registry import FAMILIES
from ..families.static import MODEL2VEC
from ..families.vision_language import VISION_LANGUAGE
from ..protocol.config import EngineConfig, PoolerConfig
from ..protocol.errors import ModelLoadError, UnsupportedModelError
from ..protocol.model_info import AdapterSpec, DenseSpec, ModelInfo, ModelKind, PairChat
from ..protocol.multi_vector import MultiVector, SparsePooling, TokenHeadFiles
from ..protocol.tasks import PoolingTask, PoolingType, listed
from ..protocol.templates import ScoreTemplate
from .adapters import base_config, resolve_adapters
from .architecture import DECODER_MODEL_TYPES, resolve_architecture, resolve_classes
from .draft import ModelDraft, merged
from .gguf import GgufModel
from .image_models import resolve_vision_language, tower_configs, with_image
from .image_processor import read_image_spec
from .length_limits import resolve_long_text, resolve_max_model_len
from .model_folder import as_load_error, is_gguf, locate_model, no_model_error, read_object
from .quantization import check_quantization
from .sentence_transformers_files import (
    MODULES_FILE,
    SETTINGS_FILE,
    SentenceTransformersFiles,
    read_model2vec_modules,
    read_modules,
    read_static_config,
)
from .vector_outputs import read_stanford_modules, resolve_matryoshka, resolve_multi_vector, resolve_sparse

_POOLER_FLAG: Final = "--pooler-config"
_INSTRUCTOR_MODELS: Final = ("hkunlp/instructor-base", "hkunlp/instructor-large", "hkunlp/instructor-xl")
# _EMBEDDING_FIELDS are not used by classifiers, _CLASS_FIELDS not by embedding models.
# fmt: off
_EMBEDDING_FIELDS: Final = frozenset((
    "embedding_size", "dense", "normalize", "dimensions", "is_matryoshka", "matryoshka_dimensions", "prompts",
    "default_prompt_name", "include_prompt", "enable_chunked_processing", "max_embed_len", "chunk_overlap",
    "chunked_processing_mode",
))
_LONG_TEXT_FIELDS: Final = frozenset(("max_embed_len", "chunk_overlap", "chunked_processing_mode"))
_CLASS_FIELDS: Final = frozenset((
    "use_activation", "activation", "logit_mean", "logit_sigma", "step_tag_id", "returned_token_ids",
    "labels", "problem_type", "classifier_tokens", "classifier_method", "score_template", "pair_chat",
))
# fmt: on


def resolve_model(config: EngineConfig) -> ModelInfo:
    """Locates a model and resolves its ModelInfo from its files and the operator's settings.

    `device` and `dtype` stay as requested, "auto" included; see `with_device`.

    Raises:
        UnsupportedModelError: The architecture or a module is unknown. The message names it.
        ModelLoadError: The model is not found, a file is invalid, or a setting does not fit the model.
    """
    with as_load_error(f"The folder {config.model} cannot be used"):
        root = locate_model(config.model, config.revision)
    with as_load_error(f"The JSON files of {root} cannot be used"):
        info = _resolve(root, config)
    if config.mm_processor_kwargs and not info.reads_images:
        raise ModelLoadError(f"--mm-processor-kwargs does not fit {info.name}, which reads texts only. Leave it out.")
    return info


def _resolve(root: Path, config: EngineConfig) -> ModelInfo:
    if is_gguf(root):
        gguf = GgufModel.read(root)
        return _resolve_part(root, root, gguf.config(), gguf.pooling_files(), config)
    files = read_modules(root) or read_stanford_modules(root) or read_model2vec_modules(root)
    info = _resolve_files(root, files, config)
    if files is None or files.query is None:
        return info
    # The operator's settings of the pooler and of config.json are those of the documents' model.
    query_config = dataclasses.replace(config, hf_overrides={}, pooler_config=PoolerConfig(), adapter=())
    return with_query(info, _resolve_files(root, files.query, query_config), files)


def _resolve_files(root: Path, files: SentenceTransformersFiles | None, config: EngineConfig) -> ModelInfo:
    path = root / (files.transformer_folder if files else "")
    if files is not None and files.static_kind is not None:
        return _resolve_part(root, path, read_static_config(path, files.static_kind), files, config)
    if not (path / "config.json").is_file():
        raise no_model_error(path, f"{path} has no config.json.")
    stored = read_object(path / "config.json")
    towers = tower_configs(merged(stored, config.hf_overrides))
    if towers is None:
        return _resolve_part(root, path, stored, files, config)
    config = dataclasses.replace(config, hf_overrides={})
    text = _resolve_part(root, path, towers.text, files, config)
    image = _resolve_part(root, path, towers.image, files, dataclasses.replace(config, max_model_len=None))
    return with_image(text, image, read_image_spec(path, image.config, config.mm_processor_kwargs))


def _resolve_part(
    root: Path, path: Path, stored: dict[str, Any], files: SentenceTransformersFiles | None, config: EngineConfig
) -> ModelInfo:
    """Resolves the model in `path`, a GGUF file or a folder in `root`, with the content `stored` of its config."""
    model_config = base_config(merged(stored, config.hf_overrides))
    config_file = path.name if is_gguf(path) else "config.json"
    draft = ModelDraft(config.model, model_config, config, files, config_file=config_file)
    draft.set("query_model", None, "default")
    draft.set("image", None, "default")
    draft.set("default_is_query", False, "default")
    draft.set("name", config.name or config.model, "--served-model-name" if config.name else config.model_source)
    draft.set("path", str(path), config.model_source if path == root else MODULES_FILE)
    draft.set("root", None if path == root else str(root), config.model_source)
    resolve_architecture(draft)
    check_quantization(draft, path)
    if files is not None and files.static_kind is not None:
        for name in ("model_type", "architecture", "hidden_size", "vocab_size"):
            draft.sources[name] = "tensors of model.safetensors"
    resolve_adapters(draft, root)
    resolve_classes(draft)
    _resolve_pooling(draft)
    _resolve_embedding(draft)
    resolve_matryoshka(draft)
    _resolve_operator_settings(draft)
    _resolve_text(draft)
    tokenizer_config = read_object(path / "tokenizer_config.json")
    draft.set("max_model_len", *resolve_max_model_len(model_config, tokenizer_config, files, config, config_file))
    resolve_sparse(draft, root)
    resolve_multi_vector(draft, root, tokenizer_config)
    resolve_long_text(draft)
    resolve_vision_language(draft, path)
    _resolve_task(draft)
    return ModelInfo(**draft.fields, sources=draft.sources, config=model_config)


def with_query(info: ModelInfo, query: ModelInfo, files: SentenceTransformersFiles) -> ModelInfo:
    """Returns the model of a Router of sentence-transformers: `info` for documents, `query` for queries.

    Raises:
        UnsupportedModelError: The outputs of both differ in kind or width.
    """
    kept = (PoolingTask.EMBED, PoolingTask.SPARSE_EMBED, PoolingTask.SCORE)
    tasks = tuple(task for task in info.tasks if task in kept and task in query.tasks)
    if info.embedding_size != query.embedding_size or tasks in ((), (PoolingTask.SCORE,)):
        raise UnsupportedModelError(
            f"The Router of {info.name} gives queries and documents different vectors: {listed(query.tasks)} of width "
            f"{query.embedding_size}, and {listed(info.tasks)} of width {info.embedding_size}."
        )
    if info.is_causal:
        raise UnsupportedModelError(
            f"The documents of {info.name} have a causal model; penstock supports a Router with encoders only."
        )
    if info.enable_chunked_processing:
        raise ModelLoadError(
            f"--pooler-config: enable_chunked_processing does not fit {info.name}, whose queries have their own model."
        )
    sources = {**info.sources, "query_model": MODULES_FILE, "tasks": f"{MODULES_FILE}: Router"}
    return dataclasses.replace(
        info,
        query_model=query,
        default_is_query=files.default_is_query,
        tasks=tasks,
        sources={**sources, "default_is_query": MODULES_FILE},
    )


def with_device(info: ModelInfo, device: str, dtype: str) -> ModelInfo:
    """Returns `info` with the resolved device and dtype."""
    sources = dict(info.sources)
    for name, value in (("device", device), ("dtype", dtype)):
        if getattr(info, name) != value:
            sources[name] = "chosen at start-up"
    return dataclasses.replace(info, device=device, dtype=dtype, sources=sources)


def resolved_table(info: ModelInfo) -> list[tuple[str, str, str]]:
    """Returns (field, value, source) rows of the fields that the model uses, for `penstock info` and /server_info."""
    unused = _CLASS_FIELDS if info.kind is ModelKind.EMBEDDING else _EMBEDDING_FIELDS
    if not info.enable_chunked_processing:
        unused |= _LONG_TEXT_FIELDS
    fields = [f.name for f in dataclasses.fields(info) if f.name not in unused | {"name", "root", "sources", "config"}]
    return [(name, _shown(getattr(info, name)), info.sources[name]) for name in fields]


def format_table(rows: Iterable[tuple[str, str, str]]) -> str:
    """Returns the (field, value, source) rows of a resolved model as aligned lines."""
    shown_rows = [("field", "value", "from"), *rows]
    name_width = max(len(name) for name, _, _ in shown_rows)
    value_width = max(len(value) for _, value, _ in shown_rows if len(value) <= 60)
    return "\n".join(
        f"  {name:{name_width}}  {value:{value_width}}  {source}".rstrip() for name, value, source in shown_rows
    )


def _resolve_task(draft: ModelDraft) -> None:
    """Restricts the tasks to the operator's task, and to scoring if it uses the task."""
    task = draft.engine.pooler_config.task
    tasks = draft.fields["tasks"]
    if task is None:
        return
    if task not in tasks:
        raise ModelLoadError(
            f"--pooler-config: task is {task.value!r}; {draft.name} is a {draft.fields['kind'].value} and has "
            f"{listed(tasks)}."
        )
    is_token_level = task in (PoolingTask.TOKEN_EMBED, PoolingTask.TOKEN_CLASSIFY)
    scores = PoolingTask.SCORE in tasks and not (is_token_level and draft.fields["multi_vector"] is None)
    draft.set("tasks", tuple(dict.fromkeys((task, PoolingTask.SCORE) if scores else (task,))), _POOLER_FLAG)


def _resolve_pooling(draft: ModelDraft) -> None:
    pooler = draft.engine.pooler_config
    files = draft.files
    draft.set("sequence_pooling", *_model_pooling(draft))
    draft.set("token_pooling", PoolingType.ALL, "default")
    if pooler.tok_pooling_type is not None:
        draft.set("token_pooling", pooler.tok_pooling_type, _POOLER_FLAG)
    if pooler.seq_pooling_type is not None:
        draft.set("sequence_pooling", (pooler.seq_pooling_type,), _POOLER_FLAG)
    if draft.fields["kind"] is ModelKind.EMBEDDING and not draft.fields["sequence_pooling"]:
        # A model without a Pooling module (ColBERT) returns one vector per token.
        draft.set("tasks", (PoolingTask.TOKEN_EMBED, PoolingTask.SCORE), draft.sources["sequence_pooling"])

    draft.set("include_prompt", True, "default")
    if draft.name in _INSTRUCTOR_MODELS:
        draft.set("include_prompt", False, "default of INSTRUCTOR models")
    elif files is not None and files.pooling is not None:
        draft.set("include_prompt", files.include_prompt, files.pooling_source)

    heads = draft.fields["num_attention_heads"]
    if PoolingType.ATTENTION in draft.fields["sequence_pooling"] and not heads:
        raise ModelLoadError(f"ATTENTION pooling needs attention heads; the config.json of {draft.name} names none.")
    if pooler.attention_head is not None and pooler.attention_head >= heads:
        raise ModelLoadError(
            f"--pooler-config: attention_head is {pooler.attention_head}; "
            f"{draft.name} has {heads} heads, numbered from 0 ({draft.sources['num_attention_heads']})."
        )
    columns = pooler.returned_token_ids or ()
    num_labels = len(draft.fields["labels"])
    if PoolingTask.TOKEN_CLASSIFY in draft.fields["tasks"] and any(column >= num_labels for column in columns):
        raise ModelLoadError(
            f"--pooler-config: returned_token_ids is {list(columns)}; {draft.name} gives columns 0 to {num_labels - 1}."
        )


def _model_pooling(draft: ModelDraft) -> tuple[tuple[PoolingType, ...], str]:
    """Returns the sequence pooling types in the model's files, and the source."""
    kind = draft.fields["kind"]
    is_causal = draft.fields["is_causal"]
    files = draft.files
    if kind is ModelKind.TOKEN_CLASSIFIER:
        return (), "kind"
    if kind is not ModelKind.EMBEDDING:
        named = draft.config.get("classifier_pooling")
        if named in ("cls", "mean"):
            return (PoolingType(named.upper()),), draft.source_of("classifier_pooling")
        return (_classifier_pooling(draft),), draft.sources["model_type"]
    if files is not None and files.pooling is not None:
        return files.pooling, files.pooling_source
    family = FAMILIES.get(draft.fields["model_type"])
    if family is not None and family.pooling is not None:
        return (family.pooling,), draft.sources["model_type"]
    pictured = VISION_LANGUAGE.get(draft.fields["model_type"])
    if pictured is not None and pictured.pages is not None:
        return (), draft.sources["model_type"]
    if files is not None:
        return (), f"{files.source}: no Pooling module"
    # sentence-transformers' defaults for a model without its files.
    if is_causal:
        return (PoolingType.LAST,), "default of causal models"
    return (PoolingType.MEAN,), "default of encoders"


def _classifier_pooling(draft: ModelDraft) -> PoolingType:
    """Returns the pooling of a classifier: the last row for decoders, including bidirectional ones, otherwise CLS."""
    model_type = draft.fields["model_type"]
    if model_type == "llama_bidirec":
        # NVIDIA's rerankers have a key for it.
        named = {"cls": PoolingType.CLS, "last": PoolingType.LAST}
        return named.get(str(draft.config.get("pooling")), PoolingType.MEAN)
    is_decoder = draft.fields["is_causal"] or model_type in DECODER_MODEL_TYPES
    return PoolingType.LAST if is_decoder else PoolingType.CLS


def _resolve_embedding(draft: ModelDraft) -> None:
    pooler = draft.engine.pooler_config
    files = draft.files
    is_embedding = draft.fields["kind"] is ModelKind.EMBEDDING
    family = FAMILIES.get(draft.fields["model_type"])
    family_dense = family.dense(draft.config) if family is not None and is_embedding else ()
    dense = family_dense + (files.dense if files is not None and is_embedding else ())
    source = MODULES_FILE if len(dense) > len(family_dense) else draft.sources["model_type"]
    draft.set("dense", dense, source if dense else "default")
    width = draft.fields["hidden_size"] * (len(draft.fields["sequence_pooling"]) or 1)
    for spec in dense:
        if spec.in_features != width:
            raise ModelLoadError(
                f"{spec.folder} of {draft.name} takes rows of {spec.in_features}, but its input rows have "
                f"{width} (pooling {_shown(draft.fields['sequence_pooling'])}, {draft.sources['sequence_pooling']})."
            )
        width = spec.out_features
    source = source if dense else draft.sources["hidden_size"]
    draft.set("embedding_size", width if is_embedding else 0, source if is_embedding else "kind")

    if pooler.normalize is not None:
        draft.set("normalize", pooler.normalize, _POOLER_FLAG)
    elif pooler.use_activation is not None and is_embedding:
        draft.set("normalize", pooler.use_activation, f"{_POOLER_FLAG}: use_activation")
    elif draft.fields["model_type"] == MODEL2VEC:
        draft.set("normalize", draft.config.get("normalize") is True, draft.source_of("normalize"))
    elif files is not None and is_embedding:
        draft.set("normalize", files.has_normalize, files.source)
    else:
        draft.set("normalize", True, "default")


def _resolve_operator_settings(draft: ModelDraft) -> None:
    engine = draft.engine
    defaults = {"use_activation": True, "logit_mean": 0.0, "logit_sigma": 1.0}
    for name in (*defaults, "step_tag_id", "returned_token_ids", "attention_head"):
        value = getattr(engine.pooler_config, name)
        draft.set(name, defaults.get(name) if value is None else value, "default" if value is None else _POOLER_FLAG)
    draft.set("auto_truncate", engine.auto_truncate, "--auto-truncate" if engine.auto_truncate else "default")
    # Loading the model replaces these defaults.
    draft.set("kernels", "torch", "default")
    draft.set("num_lanes", 0, "default")
    draft.set("arithmetic", None, "default")
    for name in ("dtype", "device"):
        value = getattr(engine, name)
        draft.set(name, value, "default" if value == "auto" else f"--{name}")


def _resolve_text(draft: ModelDraft) -> None:
    files = draft.files or SentenceTransformersFiles()
    prompts = dict(files.prompts)
    name = files.default_prompt_name
    source = SETTINGS_FILE
    if draft.engine.default_prompt is not None:
        name = source = "--default-prompt"
        prompts[name] = draft.engine.default_prompt
    draft.set("prompts", prompts, SETTINGS_FILE if files.prompts else "default")
    draft.set("default_prompt_name", name, "default" if name is None else source)
    draft.set("do_lower_case", files.do_lower_case, files.transformer_source or "default")


def _shown(value: Any) -> str:
    if value is None or value in ((), {}):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {text!r}" for name, text in value.items())
    if isinstance(value, ScoreTemplate):
        return " + ".join(map(repr, value.parts))
    if isinstance(value, MultiVector | SparsePooling | TokenHeadFiles):
        return ", ".join(f"{name} {_shown(part)}" for name, part in dataclasses.asdict(value).items() if part)
    if isinstance(value, ModelInfo):
        return f"{value.architecture} in {value.path}"
    if isinstance(value, PairChat):
        return "chat template"
    if isinstance(value, AdapterSpec):
        return value.name if value.is_served else f"{value.name} (no weights)"
    if isinstance(value, DenseSpec):
        return f"{value.in_features} -> {value.out_features} {value.activation}"
    if isinstance(value, tuple):
        shown = ", ".join(_shown(item) for item in value[:12])
        return f"{shown}, ... ({len(value)})" if len(value) > 12 else shown
    return str(value)
