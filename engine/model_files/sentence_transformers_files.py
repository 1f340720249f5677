"""Reads the files of sentence-transformers in a model's folder: modules.json, module configs and settings.

Reads JSON and the headers of weights. A module is identified by its package and class name, because the module path in
between differs between versions of sentence-transformers. A Router has other modules for queries than for documents.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

from ..families.static import MODEL2VEC, SPARSE_STATIC, STATIC
from ..protocol.errors import ModelLoadError, UnsupportedModelError
from ..protocol.model_info import DenseSpec, PairChat
from ..protocol.tasks import PoolingType
from .model_folder import read_json, read_object, safetensors_header

MODULES_FILE: Final = "modules.json"
SETTINGS_FILE: Final = "config_sentence_transformers.json"
_FIRST_MODULES: Final = "Transformer, CLIPModel, StaticEmbedding, SparseStaticEmbedding and Router"
_KNOWN_MODULES: Final = (
    f"{_FIRST_MODULES} first, then Pooling, Dense, Normalize, Dropout, LogitScore, MultiVectorMask and SpladePooling"
)
_STATIC_KINDS: Final = {"StaticEmbedding": STATIC, "SparseStaticEmbedding": SPARSE_STATIC}

_PACKAGES: Final = ("sentence_transformers.", "pylate.")
"""Packages with supported modules. Modules of other packages with the same names may differ."""
_TASK_TRANSFORMER: Final = "custom_st.Transformer"
_JINA_V5: Final = "JinaEmbeddingsV5Model"
_TASK_CLASSES: Final = ("XLMRobertaLoRA", _JINA_V5)
"""Classes of jina-embeddings-v3 and v5, whose Transformer chooses a LoRA adapter."""
_TRANSFORMER_FILES: Final = tuple(
    f"sentence_{model}_config.json"
    for model in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# In sentence-transformers' order of concatenation.
_LEGACY_POOLING_KEYS: Final = {
    "pooling_mode_cls_token": PoolingType.CLS,
    "pooling_mode_max_tokens": PoolingType.MAX,
    "pooling_mode_mean_tokens": PoolingType.MEAN,
    "pooling_mode_mean_sqrt_len_tokens": PoolingType.MEAN_SQRT_LEN,
    "pooling_mode_weightedmean_tokens": PoolingType.WEIGHTED_MEAN,
    "pooling_mode_lasttoken": PoolingType.LAST,
}
_POOLING_MODES: Final = {
    "cls": PoolingType.CLS,
    "max": PoolingType.MAX,
    "mean": PoolingType.MEAN,
    "mean_sqrt_len_tokens": PoolingType.MEAN_SQRT_LEN,
    "weightedmean": PoolingType.WEIGHTED_MEAN,
    "lasttoken": PoolingType.LAST,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitScoreFile:
    """The config of a LogitScore module: the answer tokens of a generative cross-encoder.

    Attributes:
        true_token_id: Vocabulary id. Its next-token logit is the score.
        false_token_id: Vocabulary id. Its logit is subtracted; None subtracts nothing.
        source: The file.
    """

    true_token_id: int
    false_token_id: int | None
    source: str


@dataclass(slots=True, kw_only=True)
class SentenceTransformersFiles:
    """Contents of the files; None for missing values. `read_modules` builds it, or GgufModel from a GGUF file.

    Attributes:
        source: The file that lists the modules.
        transformer_folder: Folder of the Transformer module inside the model; "" is the model itself.
        pooling: Pooling types of the Pooling module, in the order of concatenation.
        pooling_source: The file of `pooling`.
        include_prompt: Whether the rows of the prompt are pooled.
        dense: Dense modules in order; their folders are relative to the Transformer folder.
        has_normalize: A Normalize module ends the chain.
        max_seq_length: Tokens. Limit of the Transformer module.
        tokenizer_max_length: Tokens. model_max_length among the module's tokenizer arguments.
        transformer_source: The file of max_seq_length and tokenizer_max_length.
        transformer_config: The content of that file.
        do_lower_case: Lower-case text before tokenizing.
        prompts: Named prompts.
        default_prompt_name: Prompt applied when a request names none.
        truncate_dim: Default width of embeddings.
        activation_fn: Class path of a cross-encoder's activation.
        logit_score: The LogitScore module.
        pair_chat: Pairs go through the tokenizer's chat template.
        mask_folder: Folder of the MultiVectorMask module.
        settings: Content of config_sentence_transformers.json.
        splade_folder: Folder of the SpladePooling module.
        static_kind: STATIC or SPARSE_STATIC if a module without layers is first; None for a Transformer.
        query: The modules of queries, if a Router has other modules for them.
        default_is_query: A text without a purpose is a query.
    """

    source: str = MODULES_FILE
    transformer_folder: str = ""
    pooling: tuple[PoolingType, ...] | None = None
    pooling_source: str = MODULES_FILE
    include_prompt: bool = True
    dense: tuple[DenseSpec, ...] = ()
    has_normalize: bool = False
    max_seq_length: int | None = None
    tokenizer_max_length: int | None = None
    transformer_source: str = ""
    transformer_config: dict[str, Any] = field(default_factory=dict)
    do_lower_case: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    truncate_dim: int | None = None
    activation_fn: str | None = None
    logit_score: LogitScoreFile | None = None
    pair_chat: PairChat | None = None
    mask_folder: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    splade_folder: str | None = None
    static_kind: str | None = None
    query: SentenceTransformersFiles | None = None
    default_is_query: bool = False


def read_modules(root: Path) -> SentenceTransformersFiles | None:
    """Reads the sentence-transformers files of the model in `root`; None without modules.json.

    Raises:
        UnsupportedModelError: penstock does not support a module or a setting. The message names it.
        ModelLoadError: A file is invalid.
    """
    entries = read_json(root / MODULES_FILE)
    if entries is None:
        return None
    if not isinstance(entries, list) or not all(map(_is_entry, entries)):
        raise ModelLoadError(f"{root / MODULES_FILE} must contain a list of modules, each with a type and a path.")
    is_router = bool(entries) and entries[0]["type"].startswith(_PACKAGES) and _kind(entries[0]) in ("Router", "Asym")
    if not is_router:
        return _read_chain(root, entries)
    routes = read_routes(root, _checked_folder(root, entries[0].get("path", "")))
    files = _read_chain(root, [*routes.document, *entries[1:]])
    if routes.query != routes.document:
        files.query = _read_chain(root, [*routes.query, *entries[1:]])
        files.default_is_query = routes.default_is_query
        if files.query.static_kind is None:
            raise _unsupported(
                root,
                "has a Router with a Transformer for queries and other modules for documents; penstock supports a "
                "Router whose queries use a StaticEmbedding or a SparseStaticEmbedding. Save the modules of each "
                "route as a model of its own, and serve both",
            )
    return files


def _read_chain(root: Path, entries: list[dict[str, Any]]) -> SentenceTransformersFiles:
    """Reads modules that run one after the other."""
    files = SentenceTransformersFiles()
    folders: list[tuple[str, dict[str, Any]]] = []
    own_class = _own_class(root)
    for position, entry in enumerate(entries):
        is_task_transformer = position == 0 and entry["type"] == _TASK_TRANSFORMER and own_class in _TASK_CLASSES
        if not is_task_transformer and not entry["type"].startswith(_PACKAGES):
            raise _unsupported(
                root,
                f"lists the module {entry['type']}, which is code of another package; penstock supports only modules "
                "of sentence_transformers and pylate. Serve a version of the model without its own code; or, if "
                f"the class computes the same as a class of sentence_transformers ({_KNOWN_MODULES}), write the path "
                "of that class into modules.json",
            )
        kind = _kind(entry)
        folder = _checked_folder(root, entry.get("path", ""))
        if position == 0 and kind in _STATIC_KINDS:
            files.transformer_folder = folder
            files.static_kind = _STATIC_KINDS[kind]
            if files.static_kind == STATIC:
                files.pooling = (PoolingType.MEAN,)
        elif position == 0:
            if kind not in ("Transformer", "MLMTransformer", "CLIPModel"):
                raise _unsupported(
                    root, f"starts with the module {entry['type']}; penstock needs one of {_FIRST_MODULES} first"
                )
            _read_transformer(root, folder, files)
        elif kind == "Pooling" and files.pooling is None and not folders and not files.has_normalize:
            _read_pooling(root, folder, files)
        elif kind == "Dense" and not files.has_normalize:
            folders.append((folder, entry))
        elif kind == "LogitScore" and position == 1:
            files.logit_score = _read_logit_score(root, folder)
        elif kind == "Normalize":
            files.has_normalize = True
        elif kind == "SpladePooling" and position == 1:
            files.splade_folder = folder
        elif kind == "MultiVectorMask" and files.pooling is None:
            files.mask_folder = folder
        elif kind in ("Pooling", "Dense", "LogitScore", "MultiVectorMask", "SpladePooling"):
            raise _unsupported(root, f"has the module {entry['type']} ({folder}) at a position that is not supported")
        elif kind != "Dropout":
            raise _unsupported(root, f"lists the module {entry['type']} ({folder}); penstock supports {_KNOWN_MODULES}")
    files.dense = tuple(_read_dense(root, folder, entry["type"], files.transformer_folder) for folder, entry in folders)
    if own_class == _JINA_V5 and len(entries) == 1:  # its Transformer also pools and normalises
        files.pooling = (PoolingType.LAST,)
        files.has_normalize = True
    _read_settings(root, files)
    is_pylate = files.settings.get("model_type") == "ColBERT" or "query_prefix" in files.settings
    if files.pooling is None and (is_pylate or any(e["type"].startswith("pylate.") for _, e in folders)):
        # PyLate normalises token vectors in `encode`, without a Normalize module.
        files.has_normalize = True
    return files


def _own_class(root: Path) -> str:
    """Returns the class of the model in its own code; empty for a model without code."""
    auto_map = read_object(root / "config.json").get("auto_map")
    return str(auto_map.get("AutoModel")).rpartition(".")[2] if isinstance(auto_map, dict) else ""


def _kind(entry: dict[str, Any]) -> str:
    return str(entry["type"].rsplit(".", 1)[-1])


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("type"), str)


def _checked_folder(root: Path, folder: Any) -> str:
    """Returns the folder of a module. Raises ModelLoadError if it is outside the model."""
    if not isinstance(folder, str) or Path(folder).is_absolute() or ".." in Path(folder).parts:
        raise ModelLoadError(
            f"{root / MODULES_FILE} names the module folder {folder!r}, which is not inside the model."
        )
    return folder.strip("/")


def _read_settings(root: Path, files: SentenceTransformersFiles) -> None:
    config = files.settings = read_object(root / SETTINGS_FILE)
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict):
        raise ModelLoadError(f"{root / SETTINGS_FILE}: prompts is {prompts!r}; it must be an object of texts by name.")
    files.prompts = {name: text for name, text in prompts.items() if isinstance(text, str)}
    files.default_prompt_name = config.get("default_prompt_name")
    is_name = isinstance(files.default_prompt_name, str) and files.default_prompt_name in prompts
    if files.default_prompt_name is not None and not is_name:
        raise ModelLoadError(
            f"{root / SETTINGS_FILE} names the default prompt {files.default_prompt_name!r}, but its prompts are "
            f"{', '.join(prompts) or 'none'}."
        )
    files.truncate_dim = config.get("truncate_dim")
    if files.truncate_dim is not None and (type(files.truncate_dim) is not int or files.truncate_dim < 1):
        raise ModelLoadError(
            f"{root / SETTINGS_FILE}: truncate_dim is {files.truncate_dim!r}; it must be a positive integer."
        )
    files.activation_fn = config.get("activation_fn")


def _unsupported(root: Path, problem: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{root / MODULES_FILE} {problem}.")


def _read_transformer(root: Path, folder: str, files: SentenceTransformersFiles) -> None:
    files.transformer_folder = folder
    for name in _TRANSFORMER_FILES:
        config = read_object(root / folder / name)
        if config:
            path = root / folder / name
            tokenizer = _object(config, "processor_kwargs", path) or _object(config, "tokenizer_args", path)
            files.transformer_source = str(Path(folder) / name)
            files.transformer_config = config
            files.max_seq_length = config.get("max_seq_length")
            files.tokenizer_max_length = tokenizer.get("model_max_length")
            files.do_lower_case = bool(config.get("do_lower_case", False))
            files.pair_chat = _pair_chat(config, path)
            return


def _object(config: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    """Returns the object at a key of a file; {} without one. Raises ModelLoadError for a value of another type."""
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: {key} is {value!r}; it must be an object.")
    return value


def _read_logit_score(root: Path, folder: str) -> LogitScoreFile:
    path = root / folder / "config.json"
    config = read_object(path)
    ids = config.get("true_token_id"), config.get("false_token_id")
    if type(ids[0]) is not int or not (ids[1] is None or type(ids[1]) is int):
        raise ModelLoadError(f"{path} has true_token_id {ids[0]!r} and false_token_id {ids[1]!r}; they must be ids.")
    return LogitScoreFile(true_token_id=ids[0], false_token_id=ids[1], source=str(Path(folder) / "config.json"))


def _read_pooling(root: Path, folder: str, files: SentenceTransformersFiles) -> None:
    config = read_object(root / folder / "config.json")
    files.pooling_source = str(Path(folder) / "config.json")
    files.include_prompt = bool(config.get("include_prompt", True))
    modes = config.get("pooling_mode")
    if modes is None:
        on = tuple(pooling for key, pooling in _LEGACY_POOLING_KEYS.items() if config.get(key, False))
        files.pooling = on or (PoolingType.MEAN,)
        return
    modes = modes if isinstance(modes, list) else [modes]
    for mode in modes:
        if not isinstance(mode, str) or mode not in _POOLING_MODES:
            raise UnsupportedModelError(
                f"{root / files.pooling_source} has the pooling mode {mode!r}; "
                f"penstock supports {', '.join(_POOLING_MODES)}."
            )
    files.pooling = tuple(_POOLING_MODES[mode] for mode in modes)


def _read_dense(root: Path, folder: str, type_name: str, transformer_folder: str) -> DenseSpec:
    """Reads the config of one Dense module, without its weights.

    Args:
        root: Folder of the model.
        folder: Folder of the module in `root`.
        type_name: Class path of the module.
        transformer_folder: Folder of the Transformer module. The folder of the result is relative to it.
    """
    path = root / folder / "config.json"
    config = read_object(path)
    for key in ("in_features", "out_features"):
        if type(config.get(key)) is not int or config[key] < 1:
            raise ModelLoadError(f"{path} has {key} {config.get(key)!r}; it must be a positive integer.")
    if config.get("use_residual", False):
        raise UnsupportedModelError(f"{path} has use_residual, which penstock does not support.")
    if config.get("module_output_name") == "scores":
        raise UnsupportedModelError(
            f"{path} has module_output_name 'scores' (a cross-encoder head), which penstock does not support."
        )
    activation = config.get(
        "activation_function", "torch.nn.Identity" if type_name.startswith("pylate.") else "torch.nn.Tanh"
    )
    if not str(activation).startswith("torch.nn."):
        raise UnsupportedModelError(
            f"{path} has the activation {activation!r}; penstock supports only activations of torch.nn."
        )
    up = "../" * len(Path(transformer_folder).parts)
    return DenseSpec(
        folder=up + folder,
        in_features=config["in_features"],
        out_features=config["out_features"],
        bias=bool(config.get("bias", True)),
        activation=activation.rsplit(".", 1)[-1],
    )


def _pair_chat(config: dict[str, Any], path: Path) -> PairChat | None:
    """Returns the chat format of the Transformer module for pairs; None if it has none."""
    modalities = _object(config, "modality_config", path)
    if modalities.get("message") is None:
        return None
    chat = _object(modalities, "message", path)
    arguments = dict(_object(_object(config, "processing_kwargs", path), "chat_template", path))
    for key in ("restore_suffix", "padding", "truncation", "max_length", "return_tensors"):
        arguments.pop(key, None)
    return PairChat(is_structured=chat.get("format") == "structured", arguments=arguments)


_FILES: Final = ("router_config.json", "config.json")
"""The second one is the name in older versions."""
_NAMES: Final = {"query": ("query",), "document": ("document", "doc"), None: ()}
"""Names of the route of a purpose. "doc" is the name in the examples of Asym."""


class Routes(NamedTuple):
    """The modules of each purpose, as entries of modules.json.

    Attributes:
        query: Modules of queries.
        document: Modules of documents.
        default_is_query: Texts without a purpose use the modules of queries.
    """

    query: list[dict[str, Any]]
    document: list[dict[str, Any]]
    default_is_query: bool


def read_routes(root: Path, folder: str) -> Routes:
    """Reads the config of a Router (before version 5: Asym).

    The rules are those of the class: a mapping by purpose and modality, then a route with the name of the purpose, then
    the default route. All texts have the modality "text".

    Args:
        root: Folder of the model.
        folder: Folder of the Router in `root`.

    Raises:
        ModelLoadError: The file is missing or invalid.
        UnsupportedModelError: Queries, documents, or texts without a purpose have no route.
    """
    path = next(
        (root / folder / name for name in _FILES if (root / folder / name).is_file()), root / folder / _FILES[0]
    )
    config = read_object(path)
    try:
        types, structure, parameters = config["types"], config["structure"], config.get("parameters") or {}
        modules = {
            route: [{"type": types[name], "path": str(PurePosixPath(folder, name))} for name in names]
            for route, names in structure.items()
        }
        mapped: dict[str, str] = parameters.get("route_mappings") or {}
        default = parameters.get("default_route")
        if default is None and parameters.get("allow_empty_key", True):
            default = next(iter(modules))
        chosen = {purpose: _route_of(purpose, modules, mapped) for purpose in _NAMES}
        chosen[None] = chosen[None] or default
        query, document, other = (modules.get(chosen[purpose]) for purpose in _NAMES)
    except (KeyError, TypeError, AttributeError, StopIteration) as error:
        raise ModelLoadError(
            f"{path} is not the config of a Router: it needs types and structure ({error!r})."
        ) from error
    if not query or not document or other not in (query, document):
        raise UnsupportedModelError(
            f"{path} has the routes {', '.join(modules)} and the default {default!r}; penstock needs a route for "
            "queries and one for documents, and one of them as default_route."
        )
    return Routes(query, document, default_is_query=other != document)


def _route_of(purpose: str | None, modules: dict[str, Any], mapped: dict[str, str]) -> str | None:
    """Returns the route of a purpose; None if only the default route fits."""
    for key in ((purpose, "text"), (purpose, None), (None, "text"), (None, None)):
        if str(key) in mapped:
            return mapped[str(key)]
    return next((name for name in (*_NAMES[purpose], "text") if name in modules), None)


# Static embeddings: sentence-transformers saves them without a config.json, model2vec without sizes.

_STATIC_WEIGHTS: Final = "model.safetensors"


def read_model2vec_modules(root: Path) -> SentenceTransformersFiles | None:
    """Returns the modules of a folder that model2vec saved without modules.json; None for other folders."""
    if read_object(root / "config.json").get("model_type") != MODEL2VEC:
        return None
    return SentenceTransformersFiles(pooling=(PoolingType.MEAN,), pooling_source="config.json", static_kind=STATIC)


def read_static_config(folder: Path, kind: str) -> dict[str, Any]:
    """Returns the config of a static embedding: model_type, sizes and `static_table`.

    A table with the name that model2vec gives it is a model of model2vec: it ignores unknown tokens.

    Args:
        folder: Folder of the weights.
        kind: STATIC, or SPARSE_STATIC for one weight per token.

    Raises:
        UnsupportedModelError: The weights are not in model.safetensors.
        ModelLoadError: The file is damaged, or a tensor is missing or has a wrong shape.
    """
    path = folder / _STATIC_WEIGHTS
    try:
        header = json.loads(safetensors_header(path))
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except FileNotFoundError:
        raise UnsupportedModelError(
            f"{folder} has no {_STATIC_WEIGHTS}; penstock reads a static embedding from no other file. Load the model "
            "with sentence-transformers and save it with safe_serialization=True."
        ) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelLoadError(f"{path} cannot be read; download the model again ({error}).") from error
    names = ("weight",) if kind == SPARSE_STATIC else ("embedding.weight", "embeddings")
    name = next((name for name in names if name in shapes), None)
    if name is None or len(shapes[name]) != (1 if kind == SPARSE_STATIC else 2):
        raise ModelLoadError(f"{path} has the tensors {shapes}; it needs {' or '.join(names)} for every token.")
    is_model2vec = name == "embeddings"
    num_tokens = next((shapes[n][0] for n in ("mapping", "weights") if is_model2vec and n in shapes), shapes[name][0])
    config = read_object(folder / "config.json") if is_model2vec else {}
    return {
        **config,
        "model_type": MODEL2VEC if is_model2vec else kind,
        "architectures": ["StaticModel" if is_model2vec else f"{'Sparse' * (kind == SPARSE_STATIC)}StaticEmbedding"],
        "hidden_size": (*shapes[name], 1)[1],
        "vocab_size": num_tokens,
        "static_table": {
            "name": name,
            "shape": list(shapes[name]),
            "has_mapping": is_model2vec and "mapping" in shapes,
            "has_weights": is_model2vec and "weights" in shapes,
        },
    }
