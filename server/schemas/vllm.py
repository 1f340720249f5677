"""Bodies of vLLM's routes: outputs of the model, tokens, load and settings."""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from penstock.engine import PoolingParams, PoolingTask
from penstock.engine.protocol.errors import InvalidRequestError
from penstock.engine.protocol.templates import ChatOptions

from ..dialects import VLLM, keys_ignored_by
from ..wire.json_schema import documented
from .chat import ChatFields, InputFields
from .encodings import EncodingOptions
from .inputs import TokenIds
from .options import Count, EmbeddingBody, Flag, ListAnswer, Listed, RequestBody

_EXAMPLE_CHAT: Final[list[JsonValue]] = [{"role": "user", "content": "What holds back the water?"}]


class PoolingRequest(EncodingOptions, InputFields, EmbeddingBody):
    """Body of POST /pooling."""

    model_config = documented(
        {"input": ["A gate holds the water."], "task": "token_embed"},
        {"input": "A gate.", "encoding_format": "base64", "embed_dtype": "float16"},
        {"messages": _EXAMPLE_CHAT},
        one_of=("input", "messages"),
    )

    ignored_keys: ClassVar = keys_ignored_by(VLLM)

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = Field(
        None,
        description=(
            "One vector or one row of class scores for each input, or one for each of its tokens. Absent: the first of "
            "these that the model serves."
        ),
    )
    step_tag_id: Count | None = Field(None, description="STEP pooling: answer with the rows of tokens with this id.")
    returned_token_ids: Listed[Count] | None = Field(None, description="STEP pooling: columns of the scores.")

    def pooling_task(self, tasks: tuple[PoolingTask, ...]) -> PoolingTask:
        """Returns the task, given those that the model serves; one that it refuses where it has none of this route."""
        if self.task is not None:
            return PoolingTask(self.task)
        order = (PoolingTask.EMBED, PoolingTask.CLASSIFY, PoolingTask.TOKEN_EMBED, PoolingTask.TOKEN_CLASSIFY)
        return next((task for task in order if task in tasks), PoolingTask.CLASSIFY)

    def check_prompt(self, task: PoolingTask) -> None:
        """Raises InvalidRequestError where a task for texts as they are is asked for with a prompt."""
        for name in self.prompt_fields:
            if getattr(self, name):
                raise InvalidRequestError(
                    f"{name} puts a prompt before texts that are embedded; the task {task.value!r} reads them as they "
                    f"are. Leave {name} out.",
                    param=name,
                )

    def pooling_params(self) -> PoolingParams:
        """Returns the pooling parameters."""
        return (
            super()
            .pooling_params()
            .clone(
                step_tag_id=self.step_tag_id,
                returned_token_ids=tuple(self.returned_token_ids) if self.returned_token_ids else None,
            )
        )


class PoolingRow(BaseModel):
    """What the model makes of one input."""

    index: int
    object: Literal["pooling"]
    data: list[float] | list[list[float]] | list[int] | list[list[int]] | str = Field(
        description="One row, one row per token, or the base64 of either, flattened: `bytes` tells the shape."
    )


class PoolingResponse(ListAnswer[PoolingRow]):
    """Answer of POST /pooling, in the order of the inputs."""


class TokenizeRequest(ChatFields):
    """vLLM's body of POST /tokenize."""

    model_config = documented(
        {"prompt": "A gate holds the water.", "return_token_strs": True},
        {"messages": _EXAMPLE_CHAT, "add_generation_prompt": False},
        one_of=("prompt", "messages"),
    )

    ignored_keys: ClassVar = keys_ignored_by(VLLM)

    prompt: str | None = Field(None, description="The text.")
    return_token_strs: Flag | None = Field(None, description="Answer with the tokens as the vocabulary has them, too.")
    tools: Listed[dict[str, Any]] | None = Field(None, description="Tools for the chat template.")

    def check_given(self) -> None:
        """Raises InvalidRequestError unless there is one text to tokenize: `prompt`, or `messages` of one chat."""
        if (self.prompt is None) == (self.messages is None):
            has = "neither" if self.prompt is None else "both"
            raise InvalidRequestError(
                f"Give one of prompt and messages (or TEI's inputs, or Cohere's text); the body has {has}.",
                param="prompt",
            )
        if self.messages is not None and len(self.messages) > 1:
            raise InvalidRequestError("messages holds several chats; send one.", param="messages")

    def chat_options(self) -> ChatOptions:
        """Returns how the messages are to be rendered; here the head of an answer is added unless it is refused."""
        options = super().chat_options()
        adds = not options.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
        return ChatOptions(
            add_generation_prompt=adds,
            continue_final_message=options.continue_final_message,
            arguments={**options.arguments, "tools": self.tools} if self.tools else options.arguments,
        )


class TokenizeResponse(BaseModel):
    """vLLM's answer of POST /tokenize."""

    count: int
    max_model_len: int = Field(description="Tokens. Longest input that the model takes.")
    tokens: list[int]
    token_strs: list[str] | None = Field(description="With return_token_strs only.")


class DetokenizeRequest(RequestBody):
    """Body of POST /detokenize."""

    model_config = documented({"tokens": [7592, 2088]})

    own_names: ClassVar = {"input": "tokens"}
    ignored_keys: ClassVar = keys_ignored_by(VLLM)

    tokens: TokenIds = Field(description="Token ids of the served model.")


class DetokenizeResponse(BaseModel):
    """Answer of POST /detokenize."""

    prompt: str = Field(description="The text, with special tokens as they are spelled.")


class TokenizerInfo(BaseModel):
    """Answer of GET /tokenizer_info: what tokenizer_config.json holds, special tokens and chat template among it."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str = Field(examples=["BertTokenizer"])


class ResolvedField(BaseModel):
    """What was resolved of a model, and the file and key that it was read from."""

    value: str
    source: str


class ServerInfo(BaseModel):
    """Answer of GET /server_info."""

    version: str = Field(examples=["0.1.0"])
    settings: dict[str, JsonValue] = Field(description="Flags by their names, without API keys and other secrets.")
    models: dict[str, dict[str, ResolvedField]] = Field(description="By shown name.")
    places: dict[str, list[str]] = Field(
        description="Where each replica of a model runs, by its shown name; empty where one has all of the machine.",
        examples=[{"all-MiniLM-L6-v2": ["cores 0-3", "cores 4-7"]}],
    )
    system: dict[str, JsonValue] = Field(description="Python, machine and cores.")


class ClearedPrefixes(BaseModel):
    """What POST /reset_prefix_cache did to one model."""

    prefix_caching: bool = Field(description="False: the model keeps no prefixes, or prefix caching is off.")
    cleared_blocks: int = Field(description="Blocks that the cache held.")


class PrefixCacheReset(BaseModel):
    """Answer of POST /reset_prefix_cache, when it has happened."""

    success: bool
    models: dict[str, ClearedPrefixes] = Field(description="By shown name.")


class Load(BaseModel):
    """Answer of GET /load."""

    server_load: int = Field(description="Requests under way in the engines.")
