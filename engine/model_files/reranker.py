"""Detects generative rerankers, and resolves their answer tokens and their prompt for pairs.

Order of sources: the operator (`--hf-overrides`, with vLLM's keys), sentence-transformers' files, then the presets of
published rerankers. Presets are selected by the model's name, because the config.json of such models does not mention a
reranker. Each preset names its source.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..families.vision_language import VISION_LANGUAGE
from ..protocol.errors import ModelLoadError
from ..protocol.model_info import ClassifierMethod
from ..protocol.templates import ScoreTemplate

if TYPE_CHECKING:
    from .draft import ModelDraft

_TOKENS_KEY: Final = "classifier_from_token"
_METHOD_KEY: Final = "method"
_QWEN3_KEY: Final = "is_original_qwen3_reranker"
_TEMPLATE_KEY: Final = "score_template"
_HEADS: Final = ("ForCausalLM", "LMHeadModel", "ForSequenceClassification")
_VISION_HEAD: Final = "ForConditionalGeneration"
"""Class of a language model that reads images, and of other models."""
_SYSTEM_OPEN: Final = "<|im_start|>system\n"
_USER_OPEN: Final = "<|im_end|>\n<|im_start|>user\n"
_ASSISTANT_OPEN: Final = "<|im_end|>\n<|im_start|>assistant\n"
_MXBAI_TASK: Final = (
    "You are a search relevance expert who evaluates how well documents match search queries. For each query-document "
    "pair, carefully analyze the semantic relationship between them, then provide your binary relevance judgment (0 "
    "for not relevant, 1 for relevant).\nRelevance:"
)


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """The answer tokens of a generative reranker. Their next-token logits are its class logits.

    Attributes:
        tokens: Tokens as text or as vocabulary id.
        method: How the logits become scores.
        source: The file or flag that names the tokens.
    """

    tokens: tuple[str | int, ...]
    method: ClassifierMethod
    source: str

    @property
    def labels(self) -> tuple[str, ...]:
        """Class names, in the order of the columns."""
        classes = self.tokens[1:] if self.method is ClassifierMethod.FROM_2_WAY_SOFTMAX else self.tokens
        return tuple(token if isinstance(token, str) else f"LABEL_{i}" for i, token in enumerate(classes))


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankerPreset:
    """Facts about one published series of rerankers.

    Attributes:
        name: Name in messages and for `score_template`.
        pattern: Regular expression of model names, in lower case.
        model_type: model_type of the models.
        tokens: The answer tokens: false and true, or only true.
        method: How the logits become scores.
        template: The prompt.
    """

    name: str
    pattern: str
    model_type: str
    tokens: tuple[str, ...]
    method: ClassifierMethod
    template: ScoreTemplate


_QWEN3_BEGINNING: Final = (
    _SYSTEM_OPEN + "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".' + _USER_OPEN
)
# Model card of Qwen/Qwen3-Reranker-0.6B, "Transformers Usage": the user message is tokenized as one text and truncated,
# then the tokens before and after it are added.
QWEN3_RERANKER: Final = RerankerPreset(
    name="qwen3-reranker",
    pattern=r"qwen3-reranker",
    model_type="qwen3",
    tokens=("no", "yes"),
    method=ClassifierMethod.FROM_2_WAY_SOFTMAX,
    template=ScoreTemplate(
        parts=(
            _QWEN3_BEGINNING,
            "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
            _ASSISTANT_OPEN + "<think>\n\n</think>\n\n",
        ),
        instruction="Given a web search query, retrieve relevant passages that answer the query",
    ),
)
# The code beside the weights of Qwen/Qwen3-VL-Reranker-2B, format_mm_instruction: the chat template renders one text.
QWEN3_VL_RERANKER: Final = RerankerPreset(
    name="qwen3-vl-reranker",
    pattern=r"qwen3-vl-reranker",
    model_type="qwen3_vl",
    tokens=("no", "yes"),
    method=ClassifierMethod.FROM_2_WAY_SOFTMAX,
    template=ScoreTemplate(
        parts=(
            _QWEN3_BEGINNING,
            "<Instruct>: {instruction}<Query>:{query}\n<Document>:{document}",
            _ASSISTANT_OPEN,
        ),
        instruction="Given a search query, retrieve relevant candidates that answer the query.",
    ),
)
PRESETS: Final = (
    QWEN3_RERANKER,
    QWEN3_VL_RERANKER,
    # mixedbread-ai/mxbai-rerank, mxbai_rerank_v2.py: every part is tokenized separately. Its optional normalisation
    # subtracts 4.5 (base) or 6 (large) before the sigmoid: logit_mean of --pooler-config.
    RerankerPreset(
        name="mxbai-rerank-v2",
        pattern=r"mxbai-rerank-\w+-v2",
        model_type="qwen2",
        tokens=("0", "1"),
        method=ClassifierMethod.FROM_2_WAY_SOFTMAX,
        template=ScoreTemplate(
            parts=(
                _SYSTEM_OPEN + "You are Qwen, created by Alibaba Cloud. You are a helpful assistant." + _USER_OPEN,
                "{instruction}query: {query}",
                "\n",
                "document: {document}",
                "\n",
                _MXBAI_TASK,
                _ASSISTANT_OPEN,
            ),
            instruction_format="instruction: {instruction}\n",
        ),
    ),
    # Model card of BAAI/bge-reranker-v2-gemma, "LLM-based reranker": get_inputs; its `prompt` is the instruction. The
    # scores of the card are logits (use_activation false). By default penstock applies a sigmoid, as FlagEmbedding
    # does with normalize=True.
    RerankerPreset(
        name="bge-reranker-v2-gemma",
        pattern=r"bge-reranker-v2-gemma",
        model_type="gemma",
        tokens=("Yes",),
        method=ClassifierMethod.NO_POST_PROCESSING,
        template=ScoreTemplate(
            parts=("<bos>", "A: {query}", "\n", "B: {document}", "\n", "{instruction}"),
            instruction="Given a query A and a passage B, determine whether the passage contains an answer to the "
            "query by providing a prediction of either 'Yes' or 'No'.",
        ),
    ),
)


def find_preset(model_type: str, names: Iterable[str]) -> RerankerPreset | None:
    """Returns the first preset for this type whose pattern matches one of the names; None if there is none."""
    lowered = [name.lower() for name in names]
    for preset in PRESETS:
        if preset.model_type == model_type and any(re.search(preset.pattern, name) for name in lowered):
            return preset
    return None


def find_answers(draft: ModelDraft, architecture: str) -> AnswerTokens | None:
    """Returns the answer tokens of a generative reranker or classifier; None for other models.

    Raises:
        ModelLoadError: A setting is wrong.
    """
    config = draft.config
    files = draft.files
    reads_images = draft.fields["model_type"] in VISION_LANGUAGE and architecture.endswith(_VISION_HEAD)
    if not architecture.endswith(_HEADS) and not reads_images:
        if config.get(_TOKENS_KEY) is not None:
            raise ModelLoadError(
                f"{draft.source_of(_TOKENS_KEY)} needs a language model; {draft.name} is a {architecture}."
            )
        return None
    if config.get(_TOKENS_KEY) is not None:
        tokens = _listed_tokens(draft)
        return AnswerTokens(tokens, _method(draft, len(tokens)), draft.source_of(_TOKENS_KEY))
    if config.get(_QWEN3_KEY) is True:
        return AnswerTokens(QWEN3_RERANKER.tokens, QWEN3_RERANKER.method, draft.source_of(_QWEN3_KEY))
    if files is not None and files.logit_score is not None:
        score = files.logit_score
        if score.false_token_id is None:
            return AnswerTokens((score.true_token_id,), ClassifierMethod.NO_POST_PROCESSING, score.source)
        tokens = (score.false_token_id, score.true_token_id)
        return AnswerTokens(tokens, ClassifierMethod.FROM_2_WAY_SOFTMAX, score.source)
    preset = None if architecture.endswith("ForSequenceClassification") else _preset_of(draft)
    return None if preset is None else AnswerTokens(preset.tokens, preset.method, _source_of(preset))


def resolve_answers(draft: ModelDraft, answers: AnswerTokens | None) -> None:
    """Resolves the ids of the answers and the method for their logits. Needs `path` and `vocab_size`.

    Raises:
        ModelLoadError: The tokenizer lacks a token, or the model an id.
    """
    if answers is None:
        draft.set("classifier_tokens", (), "default")
        draft.set("classifier_method", ClassifierMethod.FROM_2_WAY_SOFTMAX, "default")
        return
    ids = _token_ids(draft, answers)
    for token_id in ids:
        if not 0 <= token_id < draft.fields["vocab_size"]:
            raise ModelLoadError(
                f"{answers.source} of {draft.name} names the token id {token_id}; "
                f"the model has the ids 0 to {draft.fields['vocab_size'] - 1}."
            )
    draft.set("classifier_tokens", ids, answers.source)
    draft.set("classifier_method", answers.method, answers.source)


def resolve_score_template(draft: ModelDraft, *, is_pair_model: bool) -> None:
    """Resolves the prompt of a pair, for a model that reads pairs.

    Raises:
        ModelLoadError: The operator's template is wrong.
    """
    files = draft.files
    config = draft.config
    draft.set("score_template", None, "default")
    draft.set("pair_chat", None, "default")
    if not is_pair_model:
        return
    if config.get(_TEMPLATE_KEY) is not None:
        draft.set("score_template", _given_template(draft), draft.source_of(_TEMPLATE_KEY))
    elif config.get(_QWEN3_KEY) is True:
        known = QWEN3_VL_RERANKER if draft.fields["model_type"] in VISION_LANGUAGE else QWEN3_RERANKER
        draft.set("score_template", known.template, draft.source_of(_QWEN3_KEY))
    elif files is not None and files.pair_chat is not None:
        draft.set("pair_chat", files.pair_chat, f"{files.transformer_source}: modality_config")
    elif (preset := _preset_of(draft)) is not None:
        draft.set("score_template", preset.template, _source_of(preset))


def _listed_tokens(draft: ModelDraft) -> tuple[str | int, ...]:
    tokens = draft.config[_TOKENS_KEY]
    if not isinstance(tokens, list) or not tokens or not all(type(token) in (str, int) for token in tokens):
        raise ModelLoadError(
            f"{draft.source_of(_TOKENS_KEY)} is {tokens!r}; it must be a list of tokens, as text or as id."
        )
    return tuple(tokens)


def _method(draft: ModelDraft, num_tokens: int) -> ClassifierMethod:
    """Returns the method for classifier_from_token. By default two tokens are false and true."""
    named = draft.config.get(_METHOD_KEY)
    is_qwen3 = draft.config.get(_QWEN3_KEY) is True
    if named is None:
        pair = is_qwen3 or num_tokens == 2
        method = ClassifierMethod.FROM_2_WAY_SOFTMAX if pair else ClassifierMethod.NO_POST_PROCESSING
    elif named in tuple(ClassifierMethod):
        method = ClassifierMethod(named)
    else:
        known = ", ".join(repr(known.value) for known in ClassifierMethod)
        raise ModelLoadError(f"{draft.source_of(_METHOD_KEY)} is {named!r}; penstock supports {known}.")
    if method is ClassifierMethod.FROM_2_WAY_SOFTMAX and num_tokens != 2:
        raise ModelLoadError(
            f"{draft.source_of(_TOKENS_KEY)} holds {num_tokens} tokens; {method.value} takes two, false and true."
        )
    return method


def _token_ids(draft: ModelDraft, answers: AnswerTokens) -> tuple[int, ...]:
    """Returns the vocabulary ids of the answers. Reads the tokenizer only if answers are given as text."""
    if all(isinstance(token, int) for token in answers.tokens):
        return tuple(int(token) for token in answers.tokens)
    from tokenizers import Tokenizer

    path = Path(draft.fields["path"]) / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(
            f"{answers.source} of {draft.name} names tokens, but {path} does not exist; "
            f"give their ids with --hf-overrides {_TOKENS_KEY}."
        )
    tokenizer = Tokenizer.from_file(str(path))
    return tuple(_token_id(tokenizer, token, draft, answers.source) for token in answers.tokens)


def _token_id(tokenizer: Any, token: str | int, draft: ModelDraft, source: str) -> int:
    if isinstance(token, int):
        return token
    known: int | None = tokenizer.token_to_id(token)
    if known is not None:
        return known
    ids: list[int] = tokenizer.encode(token, add_special_tokens=False).ids
    if len(ids) != 1:
        raise ModelLoadError(f"{source}: {token!r} is not one token of {draft.name}, but {len(ids)}.")
    return ids[0]


def _given_template(draft: ModelDraft) -> ScoreTemplate:
    value, source = draft.config[_TEMPLATE_KEY], draft.source_of(_TEMPLATE_KEY)
    if isinstance(value, str):
        preset = next((preset for preset in PRESETS if preset.name == value), None)
        if preset is None:
            known = ", ".join(repr(preset.name) for preset in PRESETS)
            raise ModelLoadError(f"{source} is {value!r}; known are {known}, or an object with parts.")
        return preset.template
    if not isinstance(value, dict):
        raise ModelLoadError(f"{source} is {value!r}; it must be the name of a preset or an object with parts.")
    try:
        return ScoreTemplate.from_dict(value)
    except ValueError as error:
        raise ModelLoadError(f"{source}: {error}") from error


def _preset_of(draft: ModelDraft) -> RerankerPreset | None:
    """Returns the preset for the model's name; None if it has modules after the Transformer."""
    files = draft.files
    if files is not None and (files.pooling is not None or files.dense or files.has_normalize):
        return None
    return find_preset(str(draft.config.get("model_type")), _names(draft))


def _names(draft: ModelDraft) -> Iterator[str]:
    """Yields the names of the model: of the operator, of the hub's cache, and of config.json."""
    for name in (draft.name, draft.config.get("_name_or_path")):
        if isinstance(name, str) and name:
            parts = Path(name).parts
            yield parts[-1] if parts else name
            yield from (part for part in parts if part.startswith("models--"))


def _source_of(preset: RerankerPreset) -> str:
    return f"preset {preset.name}, by the model's name"
