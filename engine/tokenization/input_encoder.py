"""Converts the inputs of a request to the sequences that the model runs: prompts, limits, windows, passages, pairs."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from ..images.preprocessor import ImagePreprocessor
from ..protocol.config import EngineConfig
from ..protocol.errors import CUT_TO_FIT, InvalidRequestError, RequestTooLongError
from ..protocol.images import ImageInput, MixedInput, PatchGrid
from ..protocol.messages import TokenizedInput
from ..protocol.model_info import ModelInfo, TextPadding
from ..protocol.multi_vector import DOCUMENT_PROMPTS, QUERY_PROMPTS, QueryExpansion
from ..protocol.params import Input, PoolingParams, RequestOptions, Text, TextOrImage
from ..protocol.tasks import PoolingTask
from .late_chunking import JoinedText, LateChunking, verify_late_chunking
from .long_text import MIN_PASSAGE_TOKENS, LongText, Passages, Windows
from .model_tokenizer import Truncation, truncate_chars
from .prompt_encoder import PromptEncoder
from .tokenizer import TokenizerPool

_SPARE_TOKENS: Final = 4
"""Tokens to leave free in passages that must not be truncated: tokenizing a passage alone may add tokens."""
_MEDIA: Final = re.compile(r"data:((?:image|audio|video)/[\w.+-]+)[;,]", re.IGNORECASE)
# The prompt format of E5-Mistral and Qwen3-Embedding: "Instruct: <task>\nQuery: ".
_INSTRUCTED_PROMPT: Final = re.compile(r"(Instruct: ?)(.*)(\n+Query: ?)", re.DOTALL)


class InputEncoder:
    """Encodes the inputs of one model. Safe to use from many tasks of one event loop.

    Checks the inputs, chooses the prompt and the limit of tokens, and tokenizes. Every method raises
    InvalidRequestError if there are no inputs or an input has no tokens, and the errors of TokenizerPool.

    Args:
        config: Limits, and the handling of empty and over-long inputs.
        images: Decodes images; None: the model reads texts only.

    Attributes:
        prompt_encoder: Encodes inputs of a model with prompts for texts and images; None for other models.

    Raises:
        ModelLoadError: The tokenizer does not support long-text mode.
    """

    def __init__(
        self, info: ModelInfo, tokenizer: TokenizerPool, config: EngineConfig, images: ImagePreprocessor | None = None
    ) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._images = images
        self._auto_truncate = config.auto_truncate
        self._checks = _InputChecks(info, config)
        self._max_queued_tokens = config.scheduler.max_queued_tokens
        self._long_text = LongText.of(info, tokenizer.special_tokens)
        self.prompt_encoder: PromptEncoder | None = None
        if tokenizer.input_prompts is not None and images is not None:
            self.prompt_encoder = PromptEncoder(tokenizer.input_prompts, tokenizer, images)
        self._queries: InputEncoder | None = None
        if info.query_model is not None and tokenizer.query_tokenizer is not None:
            limit = min(info.query_model.max_model_len, info.max_model_len)  # of one sequence in the scheduler
            self._queries = InputEncoder(
                replace(info.query_model, max_model_len=limit), tokenizer.query_tokenizer, config
            )

    def with_query_flag(self, params: PoolingParams, options: RequestOptions) -> PoolingParams:
        """Returns parameters with `is_query`, if the model distinguishes queries and documents."""
        if self._info.multi_vector is None and self._info.query_model is None:
            return params
        is_query, name = options.is_query, options.prompt_name
        if is_query is None:
            is_query = self._info.default_is_query if name is None else name in QUERY_PROMPTS
        return params.clone(is_query=is_query)

    async def encode(
        self,
        inputs: Sequence[Input],
        params: PoolingParams,
        options: RequestOptions,
        *,
        param: str | None = "input",
        positions: Sequence[int] | None = None,
    ) -> list[TokenizedInput]:
        """Returns each input as one sequence. Short multi-vector queries are padded with the expansion token.

        Errors name an input by its index, or by its number in `positions`.
        """
        if self._queries is not None and params.is_query:
            return await self._queries.encode(inputs, params, options, param=param)
        if self.prompt_encoder is not None:
            return await self._encode_prompts(self.prompt_encoder, inputs, params, options, param=param)
        if self._images is not None and (found := images_in(inputs)):
            return await self._encode_with_images(inputs, found, self._images, params, options, param=param)
        truncation = self._truncation(params, param=param)
        if positions is not None:
            truncation = replace(truncation, positions=positions)
        tokenized = await self._tokenizer.encode(
            self._checks.texts(inputs, options, positions),
            truncation,
            prompt=self._prompt(options, is_query=params.is_query),
            skip_prompt=not self._info.include_prompt,
            add_special_tokens=options.add_special_tokens,
        )
        self._report_truncated(tokenized, options)
        multi_vector = self._info.multi_vector
        token_id = self._tokenizer.multi_vector_tokens.expansion_id
        if multi_vector is not None and multi_vector.expansion is not None and token_id is not None and params.is_query:
            tokenized = [
                expanded_query(tokens, multi_vector.expansion, token_id) if isinstance(item, str) else tokens
                for item, tokens in zip(inputs, tokenized, strict=True)
            ]
        if self._tokenizer.padding is not None:
            return [padded(tokens, self._tokenizer.padding) for tokens in tokenized]
        return self._replace_empty(tokenized, truncation)

    async def _encode_prompts(
        self,
        encoder: PromptEncoder,
        inputs: Sequence[Input],
        params: PoolingParams,
        options: RequestOptions,
        *,
        param: str | None,
    ) -> list[TokenizedInput]:
        self._checks.check_inputs(inputs, param, options)
        truncation = self._truncation(params, param=param)
        tokenized = await encoder.encode(
            inputs,
            truncation,
            instruction=self._prompt(options),
            is_rendered=options.is_rendered,
            add_special_tokens=options.add_special_tokens,
        )
        self._report_truncated(tokenized, options)
        return self._replace_empty(tokenized, truncation)

    async def _encode_with_images(
        self,
        inputs: Sequence[Input],
        images: dict[int, ImageInput],
        preprocessor: ImagePreprocessor,
        params: PoolingParams,
        options: RequestOptions,
        *,
        param: str | None,
    ) -> list[TokenizedInput]:
        self._checks.check_inputs(inputs, param, options)
        texts = {index: item for index, item in enumerate(inputs) if index not in images}
        encoded: dict[int, TokenizedInput] = {}
        if texts:
            tokenized = await self.encode(list(texts.values()), params, options, param=param, positions=list(texts))
            encoded.update(zip(texts, tokenized, strict=True))
        patches = await preprocessor.preprocess(list(images.values()), list(images))
        for index, image in zip(images, patches, strict=True):
            encoded[index] = TokenizedInput.of_image(image, preprocessor.spec.num_class_rows)
        return [encoded[index] for index in range(len(inputs))]

    def patch_grid(self, tokens: TokenizedInput, token_ids: Sequence[int]) -> PatchGrid | None:
        """Returns the grid of the vectors of an image; None without one, see PromptEncoder.patch_grid."""
        return None if self.prompt_encoder is None else self.prompt_encoder.patch_grid(tokens, token_ids)

    async def windows(
        self, inputs: Sequence[Input], tokenized: list[TokenizedInput], options: RequestOptions
    ) -> Windows:
        """Splits encoded inputs of the embed task above the model's limit into windows (long_text.py)."""
        if self._long_text is None or all(len(tokens) <= self._info.max_model_len for tokens in tokenized):
            return Windows.unsplit(tokenized)
        prompt_ids = await self._prompt_ids(self._prompt(options))
        has_special = [isinstance(item, str) and options.add_special_tokens for item in inputs]
        return self._long_text.split(tokenized, has_special, prompt_ids)

    async def pairs(
        self,
        pairs: Sequence[tuple[TextOrImage, TextOrImage]],
        params: PoolingParams,
        options: RequestOptions,
        *,
        param: str | None,
    ) -> list[TokenizedInput]:
        """Returns each pair, such as a query and a document, as one sequence."""
        truncation = self._truncation(params, param=param)
        if options.max_passages == 1:  # `passages` has checked its pairs
            self._checks.check_pairs(pairs)
        if self.prompt_encoder is not None:
            tokenized = await self.prompt_encoder.pairs(pairs, truncation, options.instruction)
        else:
            texts = self._checks.text_pairs(pairs)
            tokenized = await self._tokenizer.encode_pairs(texts, truncation, instruction=options.instruction)
        self._report_truncated(tokenized, options)
        return self._replace_empty(tokenized, truncation)

    async def passages(
        self, queries: Sequence[TextOrImage], documents: Sequence[str], params: PoolingParams, options: RequestOptions
    ) -> Passages:
        """Splits documents into passages that fit beside their query or, for embedding tasks, alone.

        Checks the texts, and reports the truncated documents and, for pairs, the truncated queries. `encode` and
        `pairs` do neither for the passages.

        Raises:
            InvalidRequestError: A query or a document is empty or a media file.
            RequestTooLongError: A document does not fit into its passages and must not be truncated.
        """
        paired = queries if len(queries) == len(documents) else [queries[0]] * len(documents)
        self._checks.check_pairs(list(zip(paired, documents, strict=True)))
        truncation = replace(self._truncation(params, param=None), may_truncate=True)
        without_document = await self._without_document(queries, params, options, truncation)
        sizes = [truncation.max_num_tokens - len(tokens) for tokens in without_document]
        num_queries = sum(tokens.is_truncated for tokens in without_document)
        sizes = sizes if len(sizes) > 1 else sizes * len(documents)
        num_chars = replace(truncation, max_num_tokens=options.max_passages * truncation.max_num_tokens).max_chars
        read = [truncate_chars(document, num_chars, keeps_end=False) for document in documents]
        details = await self._tokenizer.token_details(read, add_special_tokens=False)
        offsets = [detail.offsets for detail in details]
        spare = _SPARE_TOKENS if params.reject_too_long else 0
        passages = Passages.of(read, offsets, sizes, options.max_passages, spare=spare)
        unread = [i for i, document in enumerate(documents) if read[i] is not document]
        too_long = next(iter((*passages.truncated_documents, *unread)), None)
        if params.reject_too_long and too_long is not None:
            is_read = read[too_long] is documents[too_long]
            num_tokens = len(offsets[too_long])
            size = sizes[too_long] - spare
            raise _document_too_long(too_long, num_tokens, size, options.max_passages, is_read=is_read)
        unsplit = [i for i, size in enumerate(sizes) if size < MIN_PASSAGE_TOKENS and len(offsets[i]) > size]
        options.report_truncated(len({*passages.truncated_documents, *unread, *unsplit}) + num_queries)
        return passages

    async def _without_document(
        self, queries: Sequence[TextOrImage], params: PoolingParams, options: RequestOptions, truncation: Truncation
    ) -> list[TokenizedInput]:
        """Returns the tokens beside a passage: of each query or, for embedding tasks, of the prompt."""
        if params.task in (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.SPARSE_EMBED):
            if self.prompt_encoder is not None:
                return await self._encode_prompts(self.prompt_encoder, ["a"], params, options, param=None)
            return await self._tokenizer.encode(["a"], truncation, prompt=self._prompt(options))
        pairs = self._checks.text_pairs([(query, "a") for query in queries])
        return await self._tokenizer.encode_pairs(pairs, truncation, instruction=options.instruction)

    def late_chunking(self, params: PoolingParams) -> LateChunking:
        """Returns the settings to join inputs. Raises InvalidRequestError if the model does not support it."""
        verify_late_chunking(self._info)
        special = self._tokenizer.special_tokens
        if special is None:
            raise InvalidRequestError(
                "late_chunking needs a tokenizer that only adds special tokens around a text; the tokenizer of "
                f"{self._info.name} does more.",
                param="late_chunking",
            )
        truncation = self._truncation(params, param="input")
        truncates_left = self._tokenizer.truncates_left(truncation)
        include_prompt = self._info.include_prompt
        return LateChunking(
            special=special, include_prompt=include_prompt, truncation=truncation, truncates_left=truncates_left
        )

    async def join(self, late: LateChunking, inputs: Sequence[Input], options: RequestOptions) -> JoinedText:
        """Returns all inputs as one sequence; see LateChunking.join."""
        texts = self._checks.texts(inputs, options)
        prompt = self._prompt(options) if isinstance(texts[0], str) else ""
        parts, is_complete = await self._tokenizer.encode_parts(texts, late.truncation, prompt=prompt)
        prompt_ids = await self._prompt_ids(prompt)
        joined = late.join(parts, [isinstance(i, str) for i in texts], prompt_ids, is_complete=is_complete)
        self._report_truncated([joined.tokens], options)  # the first or last input
        return joined

    def _report_truncated(self, tokenized: Sequence[TokenizedInput], options: RequestOptions) -> None:
        if options.max_passages == 1:
            options.report_truncated(sum(tokens.is_truncated for tokens in tokenized))

    def _replace_empty(self, tokenized: list[TokenizedInput], truncation: Truncation) -> list[TokenizedInput]:
        """Replaces inputs without tokens by the end token. Raises InvalidRequestError if the tokenizer has none."""
        for index, tokens in enumerate(tokenized):
            if len(tokens.token_ids):
                continue
            if self._tokenizer.end_id is None:
                raise InvalidRequestError(
                    f"Input {truncation.position(index)} is empty: the tokenizer of {self._info.name} returns no token "
                    "for it, and has no end token to use instead. Send some text.",
                    param="input",
                )
            tokenized[index] = TokenizedInput(np.array([self._tokenizer.end_id], np.int32))
        return tokenized

    async def _prompt_ids(self, prompt: str) -> Sequence[int]:
        return (await self._tokenizer.token_ids([prompt], add_special_tokens=False))[0] if prompt else ()

    def _prompt(self, options: RequestOptions, *, is_query: bool = False) -> str:
        if options.is_rendered:
            return ""
        if options.prompt is not None:
            return options.prompt
        adapter_prompt = options.adapter if options.adapter in self._info.prompts else None
        name = options.prompt_name or adapter_prompt or self._info.default_prompt_name
        if self._info.multi_vector is not None and options.prompt_name is None:
            names = QUERY_PROMPTS if is_query else DOCUMENT_PROMPTS
            name = next((name for name in names if name in self._info.prompts), None)
        if name is None:
            return ""
        if name not in self._info.prompts:
            known = ", ".join(self._info.prompts) or "none"
            raise InvalidRequestError(f"prompt_name is {name[:60]!r}; the model has: {known}.", param="prompt_name")
        return self._info.prompts[name]

    def _truncation(self, params: PoolingParams, *, param: str | None) -> Truncation:
        requested = params.truncate_prompt_tokens
        limit, name = self._info.max_model_len, self._info.limit_name
        if requested is not None and requested != -1:
            limit, name = requested, "{truncate_prompt_tokens}"
        elif self._long_text is not None and params.task is PoolingTask.EMBED:
            longest = self._info.max_embed_len
            limit, name = (longest, "max_embed_len") if longest else (self._max_queued_tokens, "max_queued_tokens")
        may_truncate = not params.reject_too_long and (requested is not None or self._auto_truncate)
        multi_vector = self._info.multi_vector
        if multi_vector is not None:
            vector_limit = multi_vector.max_num_tokens(is_query=params.is_query)
            if vector_limit is not None and vector_limit < limit:
                limit, name = vector_limit, "of a query" if params.is_query else "of a document"
            # The model was trained on queries of one length only.
            is_fixed = params.is_query and multi_vector.expansion is not None and multi_vector.expansion.is_fixed
            may_truncate = may_truncate or (is_fixed and not params.reject_too_long)
        return Truncation(
            max_num_tokens=limit, may_truncate=may_truncate, side=params.truncation_side, param=param, name=name
        )


class _InputChecks:
    """Checks the inputs of one model. Every method raises InvalidRequestError.

    Empty texts are rejected with `--empty-input error` only. With passages, `check_pairs` has checked the texts before
    they are split, and the other methods do not check them again.
    """

    def __init__(self, info: ModelInfo, config: EngineConfig) -> None:
        self._info = info
        self._rejects_empty = config.empty_input == "error"

    def texts(
        self, inputs: Sequence[Input], options: RequestOptions, positions: Sequence[int] | None = None
    ) -> list[Text]:
        """Returns inputs that are all texts. Rejects an empty list, images, empty texts and media files.

        `positions` as in InputEncoder.encode.
        """
        if not inputs:
            raise InvalidRequestError("Give at least one input.", param="input")
        texts: list[Text] = []
        for index, item in zip(positions or range(len(inputs)), inputs, strict=True):
            if isinstance(item, ImageInput | MixedInput):
                raise self._image_error(item, index)
            if isinstance(item, str) and options.max_passages == 1:
                self._check_text(item, index, "input")
            texts.append(item)
        return texts

    def check_inputs(self, inputs: Sequence[Input], param: str | None, options: RequestOptions) -> None:
        """Rejects an empty list, empty texts and media files."""
        if not inputs:
            raise InvalidRequestError("Give at least one input.", param="input")
        for index, item in enumerate(inputs):
            if isinstance(item, str) and options.max_passages == 1:
                self._check_text(item, index, param or "input")

    def text_pairs(self, pairs: Sequence[tuple[TextOrImage, TextOrImage]]) -> list[tuple[str, str]]:
        """Returns pairs that are all pairs of texts. Rejects images."""
        texts: list[tuple[str, str]] = []
        for index, (left, right) in enumerate(pairs):
            if not isinstance(left, str) or not isinstance(right, str):
                raise self._image_error(right if isinstance(left, str) else left, index)
            texts.append((left, right))
        return texts

    def check_pairs(self, pairs: Sequence[tuple[TextOrImage, TextOrImage]]) -> None:
        """Rejects an empty list, empty texts and media files."""
        if not pairs:
            raise InvalidRequestError("Give at least one input.", param="input")
        for index, pair in enumerate(pairs):
            for item, param in zip(pair, ("text_1", "text_2"), strict=True):
                if isinstance(item, str):
                    self._check_text(item, index, param)

    def _image_error(self, item: Input, index: int) -> InvalidRequestError:
        image = item.images[0] if isinstance(item, MixedInput) else item
        assert isinstance(image, ImageInput)
        if self._info.reads_images:
            reason = "has an image beside a text, but the model embeds each alone. Send them as separate inputs"
            return image.error(index, reason)
        return image.error(index, f"is an image, but {self._info.name} reads only text. Send text")

    def _check_text(self, text: str, index: int, param: str) -> None:
        if self._rejects_empty and (not text or text.isspace()):
            raise InvalidRequestError(
                f"Input {index} is empty. Send some text, or start the server with --empty-input embed.",
                param=param,
            )
        if text.startswith("data:") and (match := _MEDIA.match(text)):
            remedy = "but the model only reads text. Send text"
            if self._info.reads_images:
                remedy = 'sent as a text. The model reads texts and images: send {"image": ...}'
            raise InvalidRequestError(f"Input {index} is a data URI of {match[1]}, {remedy}.", param=param)


def images_in(inputs: Sequence[object]) -> dict[int, ImageInput]:
    """Returns the images among inputs, by position."""
    return {index: item for index, item in enumerate(inputs) if isinstance(item, ImageInput)}


def expanded_query(tokens: TokenizedInput, expansion: QueryExpansion, token_id: int) -> TokenizedInput:
    """Returns a query padded to the length of the expansion. Longer queries are not changed."""
    missing = expansion.length - len(tokens)
    if missing <= 0:
        return tokens
    token_ids = np.concatenate([tokens.token_ids, np.full(missing, token_id, np.int32)])
    return replace(tokens, token_ids=token_ids, num_masked=0 if expansion.attends else missing)


def padded(tokens: TokenizedInput, padding: TextPadding) -> TokenizedInput:
    """Returns a padded text. Longer texts are not changed."""
    missing = padding.length - len(tokens)
    if missing <= 0:
        return tokens
    added = np.full(missing, padding.token_id, np.int32)
    parts = [added, tokens.token_ids] if padding.side == "left" else [tokens.token_ids, added]
    return replace(tokens, token_ids=np.concatenate(parts))


def _document_too_long(
    index: int, num_tokens: int, passage_size: int, max_passages: int, *, is_read: bool
) -> RequestTooLongError:
    """Returns the error of a document that does not fit into its passages. `is_read`: all of it was tokenized."""
    at_least = "" if is_read else "at least "
    return RequestTooLongError(
        "{found}. Please allow more passages, or set {cut_to_fit} to cut it.",
        found=f"Document {index} has {at_least}{num_tokens} tokens, which do not fit into {max_passages} passages of "
        f"up to {passage_size}",
        cut_to_fit=CUT_TO_FIT,
        num_tokens=num_tokens,
        max_num_tokens=max_passages * passage_size,
        param=None,
    )


def instructed_prompt(info: ModelInfo, names: Iterable[str], instruction: str) -> str:
    """Replaces the instruction in the first of the named prompts that has one.

    A model that reads inputs as chats takes any instruction. Like its publisher's code, adds a missing full stop.

    Raises:
        InvalidRequestError: No named prompt has an instruction.
    """
    if info.input_chat is not None:
        instruction = instruction.strip()
        return instruction if unicodedata.category(instruction[-1:] or ".").startswith("P") else f"{instruction}."
    for name in names:
        match = _INSTRUCTED_PROMPT.fullmatch(info.prompts.get(name, ""))
        if match is not None:
            return match[1] + instruction + match[3]
    raise InvalidRequestError(
        f"{info.name} is an embedding model without a query prompt of the form 'Instruct: ...', "
        "so it accepts no instruction.",
        param="instruction",
    )
