"""Reads the family, head, classes and activation of a checkpoint."""

from __future__ import annotations

import re
from typing import Final

from ..families.registry import FAMILIES, family_with_kernels
from ..families.vision_language import UNREADABLE, VISION_LANGUAGE
from ..protocol.errors import ModelLoadError, UnsupportedModelError
from ..protocol.model_info import Activation, ModelKind
from ..protocol.tasks import PoolingTask
from .draft import ModelDraft, config_parts
from .reranker import find_answers, resolve_answers, resolve_score_template
from .sentence_transformers_files import SETTINGS_FILE

# Families with causal attention, unless config.json says otherwise.
# fmt: off
DECODER_MODEL_TYPES: Final = frozenset((
    "arcee", "bamba", "bitnet", "bloom", "codegen", "cohere", "cohere2", "deepseek_v2", "deepseek_v3",
    "ernie4_5", "exaone4", "falcon", "falcon_h1", "falcon_mamba", "gemma", "gemma2", "gemma3", "gemma3_text",
    "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neo",
    "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe", "granitemoehybrid", "helium", "jamba", "lfm2",
    "llama", "llama4", "llama4_text", "mamba", "mamba2", "minicpm3", "ministral", "ministral3", "mistral",
    "mixtral", "modernbert-decoder", "mpt", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmoe",
    "openai-gpt", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5",
    "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl", "recurrent_gemma", "rwkv", "seed_oss", "smollm3", "stablelm",
    "starcoder2", "xglm", "zamba", "zamba2",
))
# fmt: on
# fmt: off
_LAYER_KEYS: Final = (
    "num_hidden_layers", "n_layers", "n_layer", "num_layers", "encoder_layers", "num_hidden_groups", "inner_group_num",
)
# fmt: on
_MAX_LAYERS: Final = 10_000
_MAX_LABELS: Final = 1_000_000
_PAGE_WIDTH: Final = 128
"""Default of embedding_dim in transformers."""
_PROJECTED: Final = ("embedding_gemma2", "embedding_gemma2_text")
_PROJECTED_WIDTH: Final = 768
"""Default of their embedding_dim in transformers."""
# Parts of config.json that describe an image or audio encoder.
_TOWERS: Final = {
    "vision_config": "images",
    "image_config": "images",
    "audio_config": "audio",
    "speech_config": "audio",
}
# Keys of models for images or audio. One key alone may have another meaning.
_OTHER_KEYS: Final = {
    "images": frozenset(("image_size", "num_channels", "patch_size", "image_mean")),
    "audio": frozenset(("num_mel_bins", "feat_extract_norm", "conv_kernel", "sampling_rate", "max_source_positions")),
}
_INPUT_TOKEN: Final = re.compile(r"(image|vision|video|audio|img|boi|eoi).*token")
_GENERATORS: Final = ("ForConditionalGeneration", "ForCausalLM", "ForImageTextToText")
_ACTIVATIONS: Final = {"Sigmoid": Activation.SIGMOID, "Softmax": Activation.SOFTMAX, "Identity": Activation.IDENTITY}
_PROBLEM_ACTIVATIONS: Final = {
    "regression": Activation.IDENTITY,
    "single_label_classification": Activation.SOFTMAX,
    "multi_label_classification": Activation.SIGMOID,
}
_TASKS: Final = {
    ModelKind.EMBEDDING: (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.SCORE),
    ModelKind.SEQUENCE_CLASSIFIER: (PoolingTask.CLASSIFY,),
    ModelKind.CROSS_ENCODER: (PoolingTask.CLASSIFY, PoolingTask.SCORE),
    ModelKind.TOKEN_CLASSIFIER: (PoolingTask.TOKEN_CLASSIFY,),
}


def resolve_architecture(draft: ModelDraft) -> None:
    """Resolves family, sizes, kind and tasks.

    Raises:
        UnsupportedModelError: config.json does not describe a supported model.
    """
    _resolve_family(draft)
    architecture, model_type = draft.fields["architecture"], draft.fields["model_type"]
    _reject_other_inputs(draft, architecture)
    _resolve_sizes(draft, model_type)
    draft.set("is_causal", *_causality(draft, architecture, model_type))
    _resolve_kind(draft, architecture, model_type)


def _resolve_family(draft: ModelDraft) -> None:
    """Resolves `model_type`, `architecture` and `packed`."""
    config = draft.config
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise UnsupportedModelError(f"The config.json of {draft.name} has no model_type; its architecture is unknown.")
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) and name for name in architectures):
        raise ModelLoadError(
            f"{draft.source_of('architectures')} of {draft.name} is {architectures!r}; it must be a list of names."
        )
    architecture = architectures[0] if architectures else "AutoModel"
    is_made_causal = bool(config.get("is_decoder")) and model_type not in DECODER_MODEL_TYPES
    family = family_with_kernels(architecture, model_type, config)
    packed = family is not None and not is_made_causal and not family.leaves_out(architecture, config)
    # This key selects variants of BERT-like models; for Granite it has another meaning.
    has_own_meaning = model_type in DECODER_MODEL_TYPES or (family is not None and family.checks_positions)
    is_plain = has_own_meaning or config.get("position_embedding_type", "absolute") == "absolute"
    draft.set("model_type", model_type, draft.source_of("model_type"))
    draft.set("architecture", architecture, draft.source_of("architectures") if architectures else "default")
    draft.set("packed", packed and is_plain, draft.sources["model_type"])


def _resolve_sizes(draft: ModelDraft, model_type: str) -> None:
    """Resolves `hidden_size`, `vocab_size` and `num_attention_heads`."""
    for name in ("hidden_size", "vocab_size"):
        value, source = draft.lookup(name)
        if type(value) is not int or value < 1:
            raise UnsupportedModelError(
                f"The config.json of {draft.name} has {name} {value!r}; it must be a positive integer."
            )
        draft.set(name, value, source)
    _resolve_page_width(draft)
    _check_layers(draft)
    heads, source = draft.lookup("num_attention_heads")
    packed = draft.fields["packed"]
    width = draft.fields["hidden_size"]
    if packed and heads is not None and (type(heads) is not int or heads < 1):
        raise ModelLoadError(f"{source} of {draft.name} is {heads!r}; it must be a positive integer.")
    # The heads of decoders may have any width, which is checked when the weights are loaded.
    if packed and heads is not None and model_type not in DECODER_MODEL_TYPES and width % heads:
        raise ModelLoadError(f"{source} of {draft.engine.model} is {heads}; it must divide hidden_size, {width}.")
    draft.set("num_attention_heads", heads if type(heads) is int else 0, source or "default")


def _resolve_kind(draft: ModelDraft, architecture: str, model_type: str) -> None:
    """Resolves `kind` and `tasks`, and the answers of a generative reranker."""
    # A checkpoint with a Pooling module is an embedding model, unless the operator names another architecture.
    has_pooling = draft.files is not None and draft.files.pooling is not None
    pools = has_pooling and "architectures" not in draft.engine.hf_overrides
    draft.answers = None if pools else find_answers(draft, architecture)
    if draft.answers is not None or (architecture.endswith("ForSequenceClassification") and not pools):
        kind = ModelKind.CROSS_ENCODER if len(_labels(draft)[0]) == 1 else ModelKind.SEQUENCE_CLASSIFIER
    elif architecture.endswith("ForTokenClassification") and not pools:
        kind = ModelKind.TOKEN_CLASSIFIER
    else:
        kind = ModelKind.EMBEDDING
    source = draft.answers.source if draft.answers is not None else draft.sources["architecture"]
    draft.set("kind", kind, draft.files.source if draft.files is not None and pools else source)
    # The classifier of a decoder can score the row of any token, for example of process steps.
    is_decoder = draft.fields["packed"] and model_type in DECODER_MODEL_TYPES
    scores_rows = is_decoder and architecture.endswith("ForSequenceClassification")
    by_token = (PoolingTask.TOKEN_CLASSIFY,) if scores_rows and draft.answers is None and not pools else ()
    draft.set("tasks", (*_TASKS[kind], *by_token), "kind")


def _resolve_page_width(draft: ModelDraft) -> None:
    """Resolves the width of the rows of a model that ends with a projection: for pages, and EmbeddingGemma 2."""
    model_type = draft.fields["model_type"]
    family = VISION_LANGUAGE.get(model_type)
    if model_type in _PROJECTED:
        width = {**draft.config, **(draft.config.get("text_config") or {})}.get("embedding_dim", _PROJECTED_WIDTH)
    elif family is not None and family.pages is not None:
        width = draft.config.get("embedding_dim", _PAGE_WIDTH)
    else:
        return
    if type(width) is not int or width < 1:
        raise UnsupportedModelError(f"embedding_dim of {draft.name} is {width!r}; it must be a positive integer.")
    draft.set("hidden_size", width, draft.source_of("embedding_dim"))


def _reject_other_inputs(draft: ModelDraft, architecture: str) -> None:
    """Raises UnsupportedModelError if config.json describes a model that needs images or audio.

    A language model with image tokens also runs on text alone and is accepted.
    """
    config = draft.config
    inputs = sorted({_TOWERS[key] for key in _TOWERS if isinstance(config.get(key), dict)})
    reads_tokens = any(_INPUT_TOKEN.search(key) for key in config) or architecture.endswith(_GENERATORS)
    if not inputs and draft.lookup("vocab_size")[0] is None:
        inputs = [name for name, keys in _OTHER_KEYS.items() if len(keys & config.keys()) > 1]
        reads_tokens = False
    if inputs and not reads_tokens:
        raise UnsupportedModelError(
            f"{draft.name} (model_type {draft.fields['model_type']!r}) reads {' and '.join(inputs)}; {UNREADABLE}"
        )


def _check_layers(draft: ModelDraft) -> None:
    """Raises ModelLoadError for a huge number of layers, because libraries create lists of that length."""
    for part in config_parts(draft.config):
        for key in _LAYER_KEYS:
            value = part.get(key)
            if isinstance(value, int | float) and not 0 < value <= _MAX_LAYERS:
                raise ModelLoadError(
                    f"{draft.source_of(key)} of {draft.name} is {value!r}; it must be from 1 to {_MAX_LAYERS}."
                )


def _causality(draft: ModelDraft, architecture: str, model_type: str) -> tuple[bool, str]:
    config = draft.config
    if isinstance(config.get("is_causal"), bool):
        return config["is_causal"], draft.source_of("is_causal")
    if config.get("use_bidirectional_attention") in (True, "all"):
        return False, draft.source_of("use_bidirectional_attention")
    if "Bidirectional" in architecture:
        return False, draft.sources["architecture"]
    if config.get("is_decoder") is True:
        return True, draft.source_of("is_decoder")
    if architecture.endswith("ForCausalLM") and model_type not in FAMILIES:
        return True, draft.sources["architecture"]
    return model_type in DECODER_MODEL_TYPES, draft.sources["model_type"]


def _labels(draft: ModelDraft) -> tuple[tuple[str, ...], str]:
    """Returns the class names in the order of the columns, and the source."""
    if draft.answers is not None:
        return draft.answers.labels, draft.answers.source
    config = draft.config
    overrides = draft.engine.hf_overrides
    id2label = config.get("id2label")
    if isinstance(id2label, dict) and id2label and ("num_labels" not in overrides or "id2label" in overrides):
        if not all(str(column).isdecimal() and len(str(column)) < len(str(_MAX_LABELS)) for column in id2label):
            raise ModelLoadError(
                f"{draft.source_of('id2label')} of {draft.name} must map column numbers below {_MAX_LABELS} to names."
            )
        names = {int(column): str(label) for column, label in id2label.items()}
        return tuple(names.get(i, f"LABEL_{i}") for i in range(max(names) + 1)), draft.source_of("id2label")
    num_labels = config.get("num_labels")
    if num_labels is None:
        # transformers leaves id2label out of config.json for its default of two classes.
        return ("LABEL_0", "LABEL_1"), "default"
    if type(num_labels) is not int or not 1 <= num_labels <= _MAX_LABELS:
        raise ModelLoadError(
            f"{draft.source_of('num_labels')} of {draft.name} is {num_labels!r}; it must be from 1 to {_MAX_LABELS}."
        )
    return tuple(f"LABEL_{i}" for i in range(num_labels)), draft.source_of("num_labels")


def resolve_classes(draft: ModelDraft) -> None:
    """Resolves class names, problem type, activation and the prompt of a reranker. Needs `kind` and `path`.

    Raises:
        UnsupportedModelError: penstock does not support the problem type or activation.
        ModelLoadError: Invalid class names, or a wrong setting of a reranker.
    """
    resolve_answers(draft, draft.answers)
    resolve_score_template(draft, is_pair_model=draft.fields["kind"] is ModelKind.CROSS_ENCODER)
    for prompt in ("score_template", "pair_chat"):
        if draft.fields[prompt] is not None:
            # It scores a prompt with a query and a document, and cannot classify a single text.
            draft.set("tasks", (PoolingTask.SCORE,), draft.sources[prompt])
    if draft.fields["kind"] is ModelKind.EMBEDDING:
        for name, value in (("labels", ()), ("problem_type", None), ("activation", Activation.IDENTITY)):
            draft.set(name, value, "kind")
        return
    draft.set("labels", *_labels(draft))
    problem_type = draft.config.get("problem_type")
    if problem_type is not None and problem_type not in _PROBLEM_ACTIVATIONS:
        raise UnsupportedModelError(
            f"{draft.source_of('problem_type')} of {draft.name} is {problem_type!r}; "
            f"penstock supports {', '.join(_PROBLEM_ACTIVATIONS)}."
        )
    draft.set("problem_type", problem_type, draft.source_of("problem_type") if problem_type else "default")
    draft.set("activation", *_activation(draft))


def _activation(draft: ModelDraft) -> tuple[Activation, str]:
    # A cross-encoder follows sentence-transformers' CrossEncoder, a classifier transformers' problem_type.
    kind, problem_type = draft.fields["kind"], draft.fields["problem_type"]
    is_pair_model = kind is ModelKind.CROSS_ENCODER
    if is_pair_model or (kind is ModelKind.SEQUENCE_CLASSIFIER and problem_type is None):
        saved = _saved_activation(draft)
        if saved is not None:
            return saved
    if problem_type is not None:
        return _PROBLEM_ACTIVATIONS[problem_type], draft.sources["problem_type"]
    if is_pair_model:
        return Activation.SIGMOID, "default of cross-encoders"
    return Activation.SOFTMAX, "default of classifiers"


def _saved_activation(draft: ModelDraft) -> tuple[Activation, str] | None:
    """Returns the activation that sentence-transformers saved with a cross-encoder, and the source."""
    nested = draft.config.get("sentence_transformers")
    old_key = "sbert_ce_default_activation_function"
    for path, source in (
        (draft.files.activation_fn if draft.files else None, f"{SETTINGS_FILE}: activation_fn"),
        (nested.get("activation_fn") if isinstance(nested, dict) else None, draft.source_of("sentence_transformers")),
        (draft.config.get(old_key), draft.source_of(old_key)),
    ):
        if path is None:
            continue
        activation = _ACTIVATIONS.get(str(path).rsplit(".", 1)[-1])
        if activation is None or not str(path).startswith("torch.nn."):
            raise UnsupportedModelError(
                f"{source} of {draft.name} is {path!r}; penstock supports torch.nn's {', '.join(_ACTIVATIONS)}."
            )
        return activation, source
    return None
