"""What the files say that sentence-transformers saves beside a model. Read by modules.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ..protocol.model_info import DenseSpec, PairChat
from ..protocol.tasks import PoolingType

MODULES_FILE: Final = "modules.json"
SETTINGS_FILE: Final = "config_sentence_transformers.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitScoreFile:
    """What the config of a LogitScore module says: whose next-token logits are the score of a cross-encoder.

    Attributes:
        true_token_id: Vocabulary id.
        false_token_id: Its logit is subtracted; None subtracts nothing.
        source: The file.
    """

    true_token_id: int
    false_token_id: int | None
    source: str


@dataclass(slots=True, kw_only=True)
class SentenceTransformersFiles:
    """What the files say; None where they say nothing. Built once by `read_modules`, then only read.

    Attributes:
        transformer_folder: Folder of the Transformer module inside the model; "" is the model itself.
        pooling: Pooling types of the Pooling module, in the order of concatenation.
        pooling_source: The file that `pooling` was read from.
        include_prompt: Whether the rows of the prompt are pooled.
        dense: Dense modules in order; their folders are relative to the Transformer folder.
        has_normalize: A Normalize module ends the chain.
        max_seq_length: Tokens. Of the Transformer module.
        tokenizer_max_length: Tokens. model_max_length among the module's tokenizer arguments.
        transformer_source: The file that the two above were read from.
        do_lower_case: Lower-case text before tokenizing.
        prompts: Named prompts.
        default_prompt_name: Prompt applied when a request names none.
        truncate_dim: Default width of embeddings.
        activation_fn: Class path of a cross-encoder's activation.
        logit_score: The LogitScore module.
        pair_chat: Pairs go through the tokenizer's chat template.
        mask_folder: Folder of the MultiVectorMask module.
        is_pylate: PyLate has saved the model.
        splade_folder: Folder of the SpladePooling module.
    """

    transformer_folder: str = ""
    pooling: tuple[PoolingType, ...] | None = None
    pooling_source: str = MODULES_FILE
    include_prompt: bool = True
    dense: tuple[DenseSpec, ...] = ()
    has_normalize: bool = False
    max_seq_length: int | None = None
    tokenizer_max_length: int | None = None
    transformer_source: str = ""
    do_lower_case: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    truncate_dim: int | None = None
    activation_fn: str | None = None
    logit_score: LogitScoreFile | None = None
    pair_chat: PairChat | None = None
    mask_folder: str | None = None
    is_pylate: bool = False
    splade_folder: str | None = None
