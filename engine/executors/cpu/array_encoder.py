"""An encoder or decoder with its head, run by the native kernels: packed arrays in, arrays out.

Shape letters: T packed tokens, N sequences, D model width, H heads, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.cpu import CpuEncoder, CpuForward, EncoderSpec, Machine

from ...checkpoint.views import ArrayWeights, Floats
from ...model_files.registry import native_class
from ...protocol.errors import UnsupportedTaskError
from ...protocol.model_info import ModelInfo, ModelKind
from ...scheduling import CacheSpec
from .arithmetic import Arithmetic
from .decoders.gemma import Gemma2Config, Gemma3Config, GemmaConfig
from .decoders.llama import LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config
from .decoders.reader import DecoderReader
from .encoder_configs import DistilBertConfig, ElectraConfig, EncoderConfig, MPNetConfig, RobertaConfig
from .heads import ArrayHead, HeadSteps
from .modernbert import ModernBertConfig, ModernBertReader
from .packed_arrays import PackedArrays
from .post_norm import PostNormReader


class EncoderReader(Protocol):
    """What a family knows of its checkpoints; see PostNormReader."""

    hidden_size: int
    scores_rows: bool
    """Whether the head of a sequence is one map of one row, and so fits the row of any token."""

    def fits(self, info: ModelInfo) -> bool:
        """Whether the native kernels have all that the model needs."""
        ...

    def cache_spec(self, info: ModelInfo) -> CacheSpec | None:
        """What is kept of a sequence from chunk to chunk; None where sequences cannot run in chunks."""
        ...

    def spec(self, info: ModelInfo, weights: ArrayWeights) -> EncoderSpec:
        """Reads the encoder."""
        ...

    def head(self, info: ModelInfo, weights: ArrayWeights) -> HeadSteps:
        """Reads the classification head."""
        ...

    def places(self, batch: PackedArrays) -> NDArray[np.int64]:
        """Returns the rows of the table that is added to the words' rows, [T]."""
        ...


# By the class that the registry names.
_READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], EncoderReader]]] = {
    "BertModel": lambda config: PostNormReader(EncoderConfig.read(config)),
    "RobertaModel": lambda config: PostNormReader(RobertaConfig.read(config)),
    "ElectraModel": lambda config: PostNormReader(ElectraConfig.read(config)),
    "DistilBertModel": lambda config: PostNormReader(DistilBertConfig.read(config)),
    "MPNetModel": lambda config: PostNormReader(MPNetConfig.read(config)),
    "ModernBertModel": lambda config: ModernBertReader(ModernBertConfig.read(config)),
    "LlamaModel": lambda config: DecoderReader(LlamaConfig.read(config)),
    "MistralModel": lambda config: DecoderReader(MistralConfig.read(config)),
    "Qwen2Model": lambda config: DecoderReader(Qwen2Config.read(config)),
    "Qwen3Model": lambda config: DecoderReader(Qwen3Config.read(config)),
    "Phi3Model": lambda config: DecoderReader(Phi3Config.read(config)),
    "GemmaModel": lambda config: DecoderReader(GemmaConfig.read(config)),
    "Gemma2Model": lambda config: DecoderReader(Gemma2Config.read(config)),
    "Gemma3Model": lambda config: DecoderReader(Gemma3Config.read(config)),
}


def find_reader(info: ModelInfo) -> EncoderReader | None:
    """Returns the reader of a model that the native kernels can run, on a CPU that has them; None for others.

    Raises:
        ModelLoadError: No family knows the model, or a value of its config.json is of no use.
    """
    if not info.native or info.device != "cpu" or info.dtype == "float16":
        return None
    _, class_name = native_class(info.architecture, info.model_type, info.config)
    if class_name not in _READERS:
        return None
    reader = _READERS[class_name](info.config)
    return reader if reader.fits(info) else None


class ArrayOutput(NamedTuple):
    """What one forward gives.

    Attributes:
        hidden_states: [T, D] float32: the last layer's rows.
        attention_weights: [T, H] float32: how much the first token of each sequence attends to each of its tokens in
            the last layer; None where nobody asked.
        logits: None: the pooler calls the head.
    """

    hidden_states: Floats
    attention_weights: Floats | None
    logits: Floats | None = None


class ArrayEncoder:
    """An encoder or decoder with the head that its kind asks for. Calls come from one thread.

    Args:
        info: The resolved model.
        reader: Of its family.
        weights: View of the whole checkpoint; nothing here keeps memory of its files.
        machine: The native kernels.

    Attributes:
        cache_spec: What pages keep of every token of a sequence in chunks; None where there are none.
        page_itemsize: Bytes of a number in them: 4 for float32, 2 for bfloat16.

    Raises:
        WeightError: A tensor is missing, has another shape, or holds NaN or inf.
        UnsupportedModelError: An option of it is not known.
    """

    def __init__(self, info: ModelInfo, reader: EncoderReader, weights: ArrayWeights, machine: Machine) -> None:
        self.machine = machine
        self.hidden_size = reader.hidden_size
        self.cache_spec = reader.cache_spec(info)
        self._places = reader.places
        arithmetic = Arithmetic.of(info)
        self._encoder = CpuEncoder(
            machine, reader.spec(info, weights), arithmetic.products, attention=arithmetic.attention
        )
        head = ArrayHead(machine, reader.head(info, weights)) if info.kind is not ModelKind.EMBEDDING else None
        self.page_itemsize = self._encoder.page_itemsize
        is_of_tokens = info.kind is ModelKind.TOKEN_CLASSIFIER
        self.sequence_head = None if is_of_tokens else head
        fits_tokens = is_of_tokens or (reader.scores_rows and not info.classifier_tokens)
        self.token_head = head if fits_tokens else None

    def begin(self, batch: PackedArrays, *, need_attention: bool = False) -> CpuForward:
        """Begins a forward of the encoder; others may be under way.

        Args:
            batch: Whole sequences; of decoders also chunks.
            need_attention: Also return the weights.

        Raises:
            MemoryError: Memory is short.
            ValueError: An id, a place or a page has no row.
        """
        return self._encoder.begin(
            batch.input_ids,
            self._places(batch),
            batch.cu_seqlens,
            visible_N=None if batch.num_hidden is None else batch.lengths - batch.num_hidden,
            need_attention=need_attention,
            past=batch.past,
        )

    def forward(self, batch: PackedArrays, *, need_attention: bool = False) -> ArrayOutput:
        """As `begin`, and waits for it."""
        return ArrayOutput(*self.begin(batch, need_attention=need_attention).result())

    def classify(self, rows_ND: Floats) -> Floats:
        """Returns class logits [N, C] of pooled rows [N, D]."""
        if self.sequence_head is None:
            raise UnsupportedTaskError("This model has no sequence classification head.", param="task")
        return self.sequence_head(rows_ND)

    def classify_tokens(self, rows_TD: Floats) -> Floats:
        """Returns class logits [T, C] of the rows of tokens [T, D]."""
        if self.token_head is None:
            raise UnsupportedTaskError("This model has no token classification head.", param="task")
        return self.token_head(rows_TD)
