"""Which class of transformers reads a model's tokenizer, and what that class builds anew.

transformers 5 takes tokenizer.json as it is for some classes. The others take its vocabulary and its added tokens, and
build what stands around them from tokenizer_config.json. A recipe here does the same to a tokenizer that was read from
tokenizer.json. Held to transformers 5.23, file by file and byte by byte, by
tests/engine/core/loading/test_tokenizer_files.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram, WordPiece

Values = Mapping[str, Any]
Build = Callable[[Tokenizer, Values], None]

_QWEN2_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PLAIN: Final = "TokenizersBackend"
"""The class that takes a file as it is."""


class NotBuiltHereError(ValueError):
    """transformers must read a tokenizer; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerClass:
    """What a class of transformers makes of tokenizer.json.

    Attributes:
        build: Builds what the class does not take from the file, from options and special tokens by their names.
        tokens: The special tokens that it has where no file names them; None for none.
        options: What it reads of tokenizer_config.json, with its defaults.
        padding_side: "left" or "right".
        has_token_types: The model reads token type ids.
    """

    build: Build | None = None
    tokens: Mapping[str, str | None] = field(default_factory=dict)
    options: Mapping[str, bool | None] = field(default_factory=dict)
    padding_side: str = "right"
    has_token_types: bool = False


def class_name(model_type: str, declared: str | None, *, is_byte_level: bool) -> str:
    """Returns the class that transformers' AutoTokenizer takes, without "Fast" at its end.

    Args:
        model_type: Of config.json.
        declared: `tokenizer_class` of tokenizer_config.json, or of config.json.
        is_byte_level: tokenizer.json names a ByteLevel step.

    Raises:
        NotBuiltHereError: Nothing is known here of the model's family.
    """
    if model_type not in _REGISTERED:
        raise NotBuiltHereError(f"its model type is {model_type!r}")
    registered = _REGISTERED[model_type]
    # transformers holds what files of Qwen2 declare for wrong, and reads a plain class as it is.
    if model_type == "qwen2" or registered == _PLAIN:
        return registered or _PLAIN
    name = (declared or registered or _PLAIN).removesuffix("Fast")
    # LlamaTokenizer would build what SentencePiece does, which is not what Llama 3 has.
    return _PLAIN if name == "PreTrainedTokenizer" or (name == "LlamaTokenizer" and is_byte_level) else name


def _bert(tokenizer: Tokenizer, values: Values) -> None:
    _word_piece(tokenizer, values)
    cls, sep = values["cls_token"], values["sep_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=_ids(tokenizer, cls, sep),
    )


def _mpnet(tokenizer: Tokenizer, values: Values) -> None:
    _word_piece(tokenizer, values)
    cls, sep = _ids(tokenizer, values["cls_token"], values["sep_token"])
    tokenizer.post_processor = processors.RobertaProcessing(sep, cls, True, False)


def _word_piece(tokenizer: Tokenizer, values: Values) -> None:
    model = tokenizer.model
    if not isinstance(model, WordPiece) or model.continuing_subword_prefix != "##":
        raise NotBuiltHereError("its vocabulary is not WordPiece with ##")
    model.unk_token = values["unk_token"]
    model.max_input_chars_per_word = 100
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=values["tokenize_chinese_chars"],
        strip_accents=values["strip_accents"],
        lowercase=values["do_lower_case"],
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")


def _roberta(tokenizer: Tokenizer, values: Values) -> None:
    _byte_level(tokenizer, values)
    cls, sep = _ids(tokenizer, values["cls_token"], values["sep_token"])
    tokenizer.post_processor = processors.RobertaProcessing(
        sep, cls, values["trim_offsets"], values["add_prefix_space"]
    )


def _gpt_neox(tokenizer: Tokenizer, values: Values) -> None:
    _byte_level(tokenizer, values)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=values["add_prefix_space"], trim_offsets=values["trim_offsets"]
    )
    tokenizer.post_processor = bare_texts()


def _byte_level(tokenizer: Tokenizer, values: Values) -> None:
    _bpe(tokenizer, affix="")
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=values["add_prefix_space"])
    tokenizer.decoder = decoders.ByteLevel()


def _qwen2(tokenizer: Tokenizer, values: Values) -> None:
    _bpe(tokenizer, affix="")
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=bool(values["add_prefix_space"]), use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    named = (token for name, token in values.items() if name.endswith("_token") and token is not None)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in (*named, *values["extra_special_tokens"])])


def _llama(tokenizer: Tokenizer, values: Values) -> None:
    _bpe(tokenizer, affix=None, fuse_unk=True, byte_fallback=True)
    has_prefix = values["add_prefix_space"] is not False
    scheme = "never" if not has_prefix else "always" if values["legacy"] else "first"
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence([*_spaces(), *([decoders.Strip(content=" ", left=1)] if has_prefix else [])])


def _gemma(tokenizer: Tokenizer, values: Values) -> None:
    _bpe(tokenizer, affix=None, fuse_unk=True, byte_fallback=True, unk_token=values["unk_token"])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous", invert=False)
    tokenizer.decoder = decoders.Sequence(_spaces())


def _spaces() -> list[decoders.Decoder]:
    return [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def _bpe(
    tokenizer: Tokenizer,
    *,
    affix: str | None,
    fuse_unk: bool = False,
    byte_fallback: bool = False,
    unk_token: str | None = None,
) -> None:
    """Leaves of the file's model its vocabulary and its merges."""
    model = tokenizer.model
    if not isinstance(model, BPE) or model.continuing_subword_prefix:
        raise NotBuiltHereError("its vocabulary is not plain BPE")
    model.continuing_subword_prefix = model.end_of_word_suffix = affix
    model.fuse_unk, model.byte_fallback, model.unk_token = fuse_unk, byte_fallback, unk_token
    model.dropout, model.ignore_merges = None, False


def _xlm_roberta(tokenizer: Tokenizer, values: Values) -> None:
    if not isinstance(tokenizer.model, Unigram) or values["unk_id"] != 3 or values["byte_fallback"]:
        raise NotBuiltHereError("its vocabulary is not Unigram with <unk> as number 3")
    charsmap = values["charsmap"]
    tokenizer.normalizer = None if charsmap is None else normalizers.Precompiled(charsmap)
    scheme = "always" if values["add_prefix_space"] else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme)]
    )
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme=scheme)
    bos, eos = values["bos_token"], values["eos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A", eos], pair=[bos, "$A", eos, eos, "$B", eos], special_tokens=_ids(tokenizer, bos, eos)
    )


def bare_texts() -> processors.PostProcessor:
    """Returns what puts nothing around texts: what transformers gives a file that says nothing of it."""
    return processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])


def _ids(tokenizer: Tokenizer, *tokens: str) -> list[tuple[str, int]]:
    return [(token, token_id) for token in tokens if (token_id := tokenizer.token_to_id(token)) is not None]


_BERT_TOKENS: Final = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
_BERT_OPTIONS: Final = {"do_lower_case": True, "tokenize_chinese_chars": True, "strip_accents": None}
_ROBERTA_TOKENS: Final = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "cls_token": "<s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
_GPT_TOKENS: Final = {"unk_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
_GEMMA_TOKENS: Final = {
    "unk_token": "<unk>",
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
_LLAMA_TOKENS: Final = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}

CLASSES: Final = {
    "TokenizersBackend": TokenizerClass(),
    "BertTokenizer": TokenizerClass(build=_bert, tokens=_BERT_TOKENS, options=_BERT_OPTIONS, has_token_types=True),
    "MPNetTokenizer": TokenizerClass(
        build=_mpnet, tokens=_ROBERTA_TOKENS | {"unk_token": "[UNK]"}, options=_BERT_OPTIONS
    ),
    "RobertaTokenizer": TokenizerClass(
        build=_roberta, tokens=_ROBERTA_TOKENS, options={"add_prefix_space": False, "trim_offsets": True}
    ),
    "XLMRobertaTokenizer": TokenizerClass(
        build=_xlm_roberta, tokens=_ROBERTA_TOKENS, options={"add_prefix_space": True}
    ),
    "GPT2Tokenizer": TokenizerClass(
        build=_byte_level, tokens=_GPT_TOKENS | {"pad_token": None}, options={"add_prefix_space": False}
    ),
    "GPTNeoXTokenizer": TokenizerClass(
        build=_gpt_neox,
        tokens=_GPT_TOKENS | {"pad_token": "<|padding|>"},
        options={"add_prefix_space": False, "trim_offsets": True},
    ),
    "Qwen2Tokenizer": TokenizerClass(
        build=_qwen2,
        tokens=_GPT_TOKENS | {"bos_token": None, "pad_token": "<|endoftext|>"},
        options={"add_prefix_space": None},
    ),
    "LlamaTokenizer": TokenizerClass(
        build=_llama, tokens=_LLAMA_TOKENS, options={"add_prefix_space": None, "legacy": False}, padding_side="left"
    ),
    "GemmaTokenizer": TokenizerClass(build=_gemma, tokens=_GEMMA_TOKENS, padding_side="left"),
}
"""Classes of transformers that are known here; what belongs to another one is left to transformers."""

_REGISTERED: Final[dict[str, str | None]] = {
    "bert": "BertTokenizer",
    "roberta": "RobertaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "camembert": "CamembertTokenizer",
    "electra": "BertTokenizer",
    "distilbert": "BertTokenizer",
    "mpnet": "MPNetTokenizer",
    "modernbert": "TokenizersBackend",
    "mistral": "TokenizersBackend",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "gemma": "GemmaTokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "phi3": "TokenizersBackend",
    "mamba": "GPTNeoXTokenizer",
    "falcon_mamba": "GPTNeoXTokenizer",
    "mamba2": "GPTNeoXTokenizer",
    "jamba": "TokenizersBackend",
    "granitemoehybrid": "TokenizersBackend",
    "llama": None,
    "bamba": None,
}
"""model_type -> the class that transformers has for it."""
