"""Builds tokenizers as the tokenizer classes of transformers do.

Some classes of transformers 5 use tokenizer.json unchanged. The others use only its vocabulary and added tokens, and
build normalizer, pre-tokenizer, post-processor and decoder from tokenizer_config.json. The functions here do the same
to a tokenizer that was read from tokenizer.json. tests/engine/core/loading/test_tokenizer_files.py compares the results
byte by byte with transformers 5.23.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram, WordPiece

Values = Mapping[str, Any]
Build = Callable[[Tokenizer, Values], None]

_CLIP_WORDS: Final = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_QWEN2_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PLAIN: Final = "TokenizersBackend"
"""The class that uses tokenizer.json unchanged."""


class NeedsTransformersError(ValueError):
    """transformers must read the tokenizer. The message states the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerClass:
    """A tokenizer class of transformers.

    Attributes:
        build: Builds the parts that the class does not take from tokenizer.json, from options and special tokens by
            name. None: the class uses the file unchanged.
        tokens: Default special tokens; None: no such token.
        options: Keys of tokenizer_config.json that the class reads, with their defaults.
        padding_side: "left" or "right".
        input_names: Arrays that the model reads.
    """

    build: Build | None = None
    tokens: Mapping[str, str | None] = field(default_factory=dict)
    options: Mapping[str, bool | None] = field(default_factory=dict)
    padding_side: str = "right"
    input_names: tuple[str, ...] = ("input_ids", "attention_mask")


def class_name(model_type: str, declared: str | None, *, is_byte_level: bool) -> str:
    """Returns the class that transformers' AutoTokenizer chooses, without the suffix "Fast".

    Args:
        model_type: `model_type` of config.json.
        declared: `tokenizer_class` of tokenizer_config.json, or of config.json.
        is_byte_level: tokenizer.json has a ByteLevel step.

    Raises:
        NeedsTransformersError: The model type is not known here.
    """
    if model_type not in _REGISTERED:
        raise NeedsTransformersError(f"its model type is {model_type!r}")
    registered = _REGISTERED[model_type]
    # transformers ignores the declared class of these models, and of models with the plain class.
    if model_type in ("qwen2", "siglip2_text_model") or registered == PLAIN:
        return registered or PLAIN
    name = (declared or registered or PLAIN).removesuffix("Fast")
    # LlamaTokenizer would build a SentencePiece tokenizer, but Llama 3 has a byte-level one.
    return PLAIN if name == "PreTrainedTokenizer" or (name == "LlamaTokenizer" and is_byte_level) else name


def _bert(tokenizer: Tokenizer, values: Values) -> None:
    _word_piece(tokenizer, values)
    _cls_sep(tokenizer, values)


def _cls_sep(tokenizer: Tokenizer, values: Values) -> None:
    cls = values["cls_token"]
    sep = values["sep_token"]
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
        raise NeedsTransformersError("its vocabulary is not WordPiece with ##")
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
    scheme = "never"
    if has_prefix:
        scheme = "always" if values["legacy"] else "first"
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence([*_spaces(), *([decoders.Strip(content=" ", left=1)] if has_prefix else [])])


def _gemma(tokenizer: Tokenizer, values: Values) -> None:
    _bpe(tokenizer, affix=None, fuse_unk=True, byte_fallback=True, unk_token=values["unk_token"])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous", invert=False)
    tokenizer.decoder = decoders.Sequence(_spaces())


def _siglip2(tokenizer: Tokenizer, values: Values) -> None:
    _gemma(tokenizer, values)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(" ", "▁")])


def _clip(tokenizer: Tokenizer, values: Values) -> None:
    _bpe(tokenizer, affix="", unk_token=values["unk_token"])
    model = tokenizer.model
    assert isinstance(model, BPE)
    model.end_of_word_suffix = "</w>"
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_CLIP_WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    bos, eos = _ids(tokenizer, values["bos_token"], values["eos_token"])
    tokenizer.post_processor = processors.RobertaProcessing(eos, bos, False, False)


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
    """Resets all options of the BPE model. Only the vocabulary and the merges of the file are used."""
    model = tokenizer.model
    if not isinstance(model, BPE) or model.continuing_subword_prefix:
        raise NeedsTransformersError("its vocabulary is not plain BPE")
    model.continuing_subword_prefix = model.end_of_word_suffix = affix
    model.fuse_unk = fuse_unk
    model.byte_fallback = byte_fallback
    model.unk_token = unk_token
    model.dropout = None
    model.ignore_merges = False


def _xlm_roberta(tokenizer: Tokenizer, values: Values) -> None:
    if not isinstance(tokenizer.model, Unigram) or values["unk_id"] != 3 or values["byte_fallback"]:
        raise NeedsTransformersError("its vocabulary is not Unigram with <unk> as number 3")
    charsmap = values["charsmap"]
    tokenizer.normalizer = None if charsmap is None else normalizers.Precompiled(charsmap)
    scheme = "always" if values["add_prefix_space"] else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme)]
    )
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme=scheme)
    bos = values["bos_token"]
    eos = values["eos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A", eos], pair=[bos, "$A", eos, eos, "$B", eos], special_tokens=_ids(tokenizer, bos, eos)
    )


def _deberta(tokenizer: Tokenizer, values: Values) -> None:
    unk_id = tokenizer.token_to_id(values["unk_token"])
    if not isinstance(tokenizer.model, Unigram) or values["unk_id"] != unk_id or values["byte_fallback"]:
        raise NeedsTransformersError("its vocabulary is not Unigram with its unknown token")
    if json.loads(tokenizer.to_str())["model"]["vocab"][unk_id][1] != 0.0:
        raise NeedsTransformersError("the score of its unknown token is not 0")  # transformers would use token 1
    steps = [normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " "), normalizers.NFC(), normalizers.Strip(left=False)]
    tokenizer.normalizer = normalizers.Sequence([*([normalizers.Lowercase()] * values["do_lower_case"]), *steps])
    scheme = "always" if values["add_prefix_space"] else "first"
    words = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme)
    marks = [pre_tokenizers.Punctuation(behavior="isolated")] if values["split_by_punct"] else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*marks, words])
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme=scheme)
    _cls_sep(tokenizer, values)


def bare_texts() -> processors.PostProcessor:
    """Returns a post-processor that adds no special tokens: transformers' default."""
    return processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])


def _ids(tokenizer: Tokenizer, *tokens: str) -> list[tuple[str, int]]:
    pairs = ((token, tokenizer.token_to_id(token)) for token in tokens)
    return [(token, token_id) for token, token_id in pairs if token_id is not None]


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
    "BertTokenizer": TokenizerClass(
        build=_bert,
        tokens=_BERT_TOKENS,
        options=_BERT_OPTIONS,
        input_names=("input_ids", "token_type_ids", "attention_mask"),
    ),
    "MPNetTokenizer": TokenizerClass(
        build=_mpnet, tokens=_ROBERTA_TOKENS | {"unk_token": "[UNK]"}, options=_BERT_OPTIONS
    ),
    "RobertaTokenizer": TokenizerClass(
        build=_roberta, tokens=_ROBERTA_TOKENS, options={"add_prefix_space": False, "trim_offsets": True}
    ),
    "XLMRobertaTokenizer": TokenizerClass(
        build=_xlm_roberta, tokens=_ROBERTA_TOKENS, options={"add_prefix_space": True}
    ),
    "DebertaV2Tokenizer": TokenizerClass(
        build=_deberta,
        tokens=_BERT_TOKENS | {"bos_token": "[CLS]", "eos_token": "[SEP]"},
        options={"do_lower_case": False, "split_by_punct": False, "add_prefix_space": True},
        input_names=("input_ids", "attention_mask", "token_type_ids"),
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
    "Siglip2Tokenizer": TokenizerClass(build=_siglip2, tokens=_GEMMA_TOKENS, padding_side="left"),
    "CLIPTokenizer": TokenizerClass(
        build=_clip, tokens=_GPT_TOKENS | {"bos_token": "<|startoftext|>", "pad_token": "<|endoftext|>"}
    ),
}
"""Supported tokenizer classes. transformers reads the tokenizers of other classes."""

_REGISTERED: Final[dict[str, str | None]] = {
    "bert": "BertTokenizer",
    "roberta": "RobertaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "camembert": "CamembertTokenizer",
    "electra": "BertTokenizer",
    "deberta-v2": "DebertaV2Tokenizer",
    "distilbert": "BertTokenizer",
    "nomic_bert": "BertTokenizer",
    "gte": "XLMRobertaTokenizer",
    "jina_embeddings_v3": "XLMRobertaTokenizer",
    "mpnet": "MPNetTokenizer",
    "modernbert": "TokenizersBackend",
    "mistral": "TokenizersBackend",
    "ministral3": "TokenizersBackend",
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
    "new": None,
    "ministral3_bidirec": None,
    "lfm2": None,
    "clip_text_model": "CLIPTokenizer",
    "siglip2_text_model": "Siglip2Tokenizer",
}
"""Maps a model_type to its tokenizer class in transformers. None: the declared class, or else PLAIN."""
