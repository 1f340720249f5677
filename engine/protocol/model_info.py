"""Description of a served model, known before its weights are read.

ModelInfo has every value that changes results, and its source. The engine process sends it to engine clients. Plain
Python; model_files/ reads the files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from .errors import ModelNotFoundError
from .images import ImageSpec
from .multi_vector import MultiVector, MultiVectorTokens, SparsePooling, TokenHeadFiles
from .tasks import ChunkedProcessingMode, PoolingTask, PoolingType
from .templates import ChatTemplate, InputPrompts, ScoreTemplate

KV_CACHE_SOURCE: Final = "size of the KV cache"
"""Source of max_model_len if the sequence pool lowers it: a sequence must fit into the pool."""
DEVICE_MEMORY_SOURCE: Final = "memory of the device"
"""Source of max_model_len if device memory lowers it, for models that run sequences whole."""
_LIMIT_NAMES: Final = {
    KV_CACHE_SOURCE: "the size of the server's KV cache, which --kv-cache-memory raises",
    DEVICE_MEMORY_SOURCE: "the memory of the server's GPU",
}


class ModelKind(StrEnum):
    """Output that the checkpoint was trained for."""

    EMBEDDING = "embedding"
    SEQUENCE_CLASSIFIER = "sequence_classifier"
    CROSS_ENCODER = "cross_encoder"
    TOKEN_CLASSIFIER = "token_classifier"


class Activation(StrEnum):
    """Function from class logits to scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    IDENTITY = "identity"


class ClassifierMethod(StrEnum):
    """How the next-token logits of a reranker's answer tokens become scores. Values are vLLM's names."""

    FROM_2_WAY_SOFTMAX = "from_2_way_softmax"
    NO_POST_PROCESSING = "no_post_processing"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairChat:
    """How sentence-transformers renders inputs with the tokenizer's chat template.

    The roles of a pair are `query` and `document`; a single input is a message of the user.

    Attributes:
        is_structured: Contents are lists of typed parts instead of texts.
        arguments: Passed to the template.
    """

    is_structured: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """One sentence-transformers Dense module, or a projection of pooled rows in the model's own checkpoint.

    Attributes:
        folder: Relative to ModelInfo.path: "2_Dense", or "../2_Dense" if the Transformer is in a subfolder; "" for the
            model's own checkpoint.
        name: Name of the weights without ".weight".
        in_features: Width of the input.
        out_features: Width of the output.
        bias: Whether it has a bias.
        activation: Class name of the torch activation, such as "Tanh" or "Identity".
    """

    folder: str
    name: str = "linear"
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """A LoRA adapter of a model.

    Attributes:
        name: Requests name the model `model:name`.
        folder: Folder with the files of the peft library; None: the weights are not in such a folder.
        index: Index in the stacked adapter weights of the model's checkpoint; None: the weights are not there.
        is_task: The adapter belongs to the model, and requests may also select it by their purpose (`task`).
    """

    name: str
    folder: str | None = None
    index: int | None = None
    is_task: bool = False

    @property
    def is_served(self) -> bool:
        """Whether its weights are known. Otherwise the model's files only name it."""
        return self.folder is not None or self.index is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The resolved description of one model.

    Attributes:
        name: Folder or hub id, as the operator wrote it.
        path: Local folder with config.json, the weights and the tokenizer; or a GGUF file.
        architecture: Class name, from config.json, such as "BertModel".
        model_type: transformers' model_type, such as "bert".
        packed: Whether a family of engine/families/ runs the model; otherwise transformers runs it.
        kind: Output that the checkpoint was trained for.
        tasks: Supported tasks.
        hidden_size: Width of hidden states.
        vocab_size: Rows of the token embedding; token ids must be below it.
        num_attention_heads: Attention heads of a layer; 0 if the model has none.
        max_model_len: Tokens. Longest input, special tokens included.
        embedding_size: Width of an embedding after pooling and Dense modules; 0 for classifiers.
        sequence_pooling: Pooling types of a sequence, concatenated in this order.
        token_pooling: ALL or STEP.
        include_prompt: Whether the pooling includes the rows of the prompt.
        dense: Dense modules after the pooling, in order.
        normalize: Default L2 normalisation of embeddings.
        dimensions: Default width of embeddings; None: embedding_size.
        is_matryoshka: Requests may set any width up to embedding_size.
        matryoshka_dimensions: The widths that the model declares.
        use_activation: Default of use_activation for classes.
        activation: Function from class logits to scores.
        logit_mean: Subtracted from logits, before the activation.
        logit_sigma: Divides the logits, after the mean is subtracted.
        step_tag_id: Default for STEP pooling.
        returned_token_ids: Default for STEP pooling.
        attention_head: Head of ATTENTION pooling; None averages all.
        labels: Class names, in the order of the columns.
        problem_type: problem_type of config.json.
        classifier_tokens: Vocabulary ids of the answers of a generative reranker. Their next-token logits are its class
            logits. Empty if the model has a classification head.
        classifier_method: How these logits become scores.
        score_template: The prompt around a query and a document, if it is known without the tokenizer.
        pair_chat: Render pairs with the tokenizer's chat template. If this and score_template are None, the tokenizer
            joins the pair.
        input_chat: Render each input with the tokenizer's chat template: a prompt as system message, then the input as
            message of the user. None: inputs are not rendered.
        enable_chunked_processing: Embed text above max_model_len in windows; see long_text.py.
        max_embed_len: Tokens. Longest input of the embed task with chunked processing; None: the limit of the queue.
        chunk_overlap: Tokens that a window shares with the one before it.
        chunked_processing_mode: How the windows are cut and averaged.
        multi_vector: How a model with one vector per token (ColBERT) reads queries and documents; None for other
            models.
        sparse: How the model computes sparse vectors; None if it computes none.
        token_heads: Token heads in addition to the sentence embedding; None if the model has none.
        query_model: The model of queries, if they have another model than documents (Router in sentence-transformers).
            This one is then the model of documents.
        image: The model of images, if they have their own. This one is then the model of texts.
        image_spec: Preprocessing of the images that this model reads; None: it reads texts only.
        default_is_query: Texts without a purpose are queries of that model.
        is_causal: Attention is causal.
        adapters: LoRA adapters of the model's folder, then those of --adapter.
        default_adapter: Name of the adapter of requests that select none; None: the base weights.
        prompts: Named prompts of the model.
        default_prompt_name: Prompt applied when a request names none.
        do_lower_case: Lower-case text before tokenizing.
        auto_truncate: Truncate over-long inputs. Requests may override it.
        dtype: Resolved type of weights and hidden states, such as "float32".
        device: Resolved device, such as "cpu".
        kernels: Code that runs the forward: "torch", or the native kernels with their instruction set ("native, avx2").
        num_lanes: Threads of the native kernels. Their number changes no result. 0 if torch runs the model.
        arithmetic: Arithmetic of the native kernels with bfloat16 weights: "bfloat16", or "float32" if that is as fast
            on this CPU; None for other weights, or if torch runs the model.
        root: Local folder of the whole model if `path` is a part of it.
        sources: Maps a field name to the file and key of its value.
        config: config.json with overrides, as plain values.
    """

    name: str
    path: str
    architecture: str
    model_type: str
    packed: bool
    kind: ModelKind
    tasks: tuple[PoolingTask, ...]
    hidden_size: int
    vocab_size: int
    max_model_len: int
    embedding_size: int
    sequence_pooling: tuple[PoolingType, ...]
    num_attention_heads: int = 0
    token_pooling: PoolingType = PoolingType.ALL
    include_prompt: bool = True
    dense: tuple[DenseSpec, ...] = ()
    normalize: bool = True
    dimensions: int | None = None
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()
    use_activation: bool = True
    activation: Activation = Activation.IDENTITY
    logit_mean: float = 0.0
    logit_sigma: float = 1.0
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = None
    attention_head: int | None = None
    labels: tuple[str, ...] = ()
    problem_type: str | None = None
    classifier_tokens: tuple[int, ...] = ()
    classifier_method: ClassifierMethod = ClassifierMethod.FROM_2_WAY_SOFTMAX
    score_template: ScoreTemplate | None = None
    pair_chat: PairChat | None = None
    input_chat: PairChat | None = None
    enable_chunked_processing: bool = False
    max_embed_len: int | None = None
    chunk_overlap: int = 0
    chunked_processing_mode: ChunkedProcessingMode = ChunkedProcessingMode.WINDOWS
    multi_vector: MultiVector | None = None
    sparse: SparsePooling | None = None
    token_heads: TokenHeadFiles | None = None
    query_model: ModelInfo | None = None
    image: ModelInfo | None = None
    image_spec: ImageSpec | None = None
    default_is_query: bool = False
    is_causal: bool = False
    adapters: tuple[AdapterSpec, ...] = ()
    default_adapter: str | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    do_lower_case: bool = False
    auto_truncate: bool = False
    dtype: str = "float32"
    device: str = "cpu"
    kernels: str = "torch"
    num_lanes: int = 0
    arithmetic: str | None = None
    root: str | None = None
    sources: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def reads_images(self) -> bool:
        """Whether an input may be an image."""
        return self.image is not None or self.image_spec is not None

    @property
    def mixes_images(self) -> bool:
        """Whether an input may have images and texts."""
        return self.image_spec is not None and self.multi_vector is None

    @property
    def folder(self) -> str:
        """Local folder of exactly this version of the model, even if the hub id changes later."""
        return self.root or self.path

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest text, or rows of the longest image if there are more."""
        return self.max_model_len if self.image is None else max(self.max_model_len, self.image.max_model_len)

    @property
    def task_adapters(self) -> tuple[AdapterSpec, ...]:
        """The adapters of a model that was trained with one adapter per task; otherwise empty."""
        task_adapters = tuple(adapter for adapter in self.adapters if adapter.is_task)
        return task_adapters if len(task_adapters) > 1 else ()

    @property
    def served_adapters(self) -> tuple[AdapterSpec, ...]:
        """The adapters that requests may select, in the order of their numbers in a batch."""
        return tuple(adapter for adapter in self.adapters if adapter.is_served)

    def adapter_of(self, requested: str | None) -> str | None:
        """Returns the adapter of a request: `requested`, or else the default. None: the base weights.

        Raises:
            ModelNotFoundError: The model has no such adapter. The message lists its adapters.
        """
        names = [adapter.name for adapter in self.served_adapters]
        if requested is not None and requested not in names:
            raise ModelNotFoundError(
                f"{self.name} has no LoRA adapter {requested[:60]!r}; it has: {', '.join(names) or 'none'}.",
                param="model",
            )
        return self.default_adapter if requested is None else requested

    @property
    def num_labels(self) -> int:
        """Number of class columns."""
        return len(self.labels)

    @property
    def limit_name(self) -> str | None:
        """Cause of max_model_len; None if it is the model or --max-model-len."""
        return _LIMIT_NAMES.get(self.sources.get("max_model_len", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPadding:
    """Padding of every text to one length.

    Attributes:
        token_id: The token to add.
        length: Tokens of a padded text.
        side: "left" or "right": the side of the added tokens.
    """

    token_id: int
    length: int
    side: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSpec:
    """The tokenizer of the model. The engine process resolves it, because engine clients must not load transformers.

    Attributes:
        json: Serialised tokenizer of the `tokenizers` library, without truncation and padding.
        truncation_side: "left" or "right".
        uses_token_types: The model reads token type ids.
        sample_ids: Token ids of a short text, special tokens included.
        score_template: The prompt around a pair; None joins pairs with the tokenizer's own special tokens.
        chat_template: Renders the messages of a chat; None if the model has no chat template.
        multi_vector_tokens: Token ids of a multi-vector model.
        end_id: The end, padding or start token, used for a text without tokens; None if there is none.
        dropped_id: Id of tokens that the model ignores; None if there is none.
        chars_per_token: A text that may be truncated is first cut to this many characters per token of the limit, as in
            model2vec; None: it is not.
        input_prompts: The prompts around inputs of texts and images; None for other models.
        padding: Padding of texts, which the model reads like other tokens; None: no padding.
        query_tokenizer: The tokenizer of ModelInfo.query_model.
        config: tokenizer_class and arguments, as in tokenizer_config.json.
    """

    json: str
    truncation_side: str
    uses_token_types: bool
    sample_ids: tuple[int, ...] = ()
    score_template: ScoreTemplate | None = None
    chat_template: ChatTemplate | None = None
    multi_vector_tokens: MultiVectorTokens = field(default_factory=MultiVectorTokens)
    end_id: int | None = None
    dropped_id: int | None = None
    chars_per_token: int | None = None
    padding: TextPadding | None = None
    input_prompts: InputPrompts | None = None
    query_tokenizer: TokenizerSpec | None = None
    config: dict[str, Any] = field(default_factory=dict)
