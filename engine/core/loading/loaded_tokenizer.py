"""A tokenizer that has been loaded, with what its files say beside the tokenizer itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

Render = Callable[..., str]


@dataclass(slots=True, kw_only=True)
class LoadedTokenizer:
    """A tokenizer of the `tokenizers` library, without truncation and padding, and what transformers keeps beside it.

    Attributes:
        backend: Texts to ids.
        class_name: The class of transformers that it is.
        settings: What it was made of, as in tokenizer_config.json.
        special_tokens_map: Named special tokens, such as cls_token.
        extra_special_tokens: Those without a name.
        chat_template: In Jinja; several by their names; None for none.
        padding_side: "left" or "right".
        truncation_side: "left" or "right".
        model_input_names: What the model reads, such as token_type_ids.
        render: Renders messages by the chat template, with transformers; None where transformers was not asked.
    """

    backend: Tokenizer
    class_name: str
    settings: Mapping[str, Any]
    special_tokens_map: Mapping[str, str]
    extra_special_tokens: Sequence[str] = ()
    chat_template: str | Mapping[str, str] | None = None
    padding_side: str = "right"
    truncation_side: str = "right"
    model_input_names: Sequence[str] = ("input_ids", "attention_mask")
    render: Render | None = None

    def __post_init__(self) -> None:
        self.backend.no_truncation()
        self.backend.no_padding()

    @classmethod
    def of_transformers(cls, tokenizer: Any) -> LoadedTokenizer:
        """Takes over what a fast tokenizer of transformers knows."""
        return cls(
            backend=tokenizer.backend_tokenizer,
            class_name=type(tokenizer).__name__,
            settings=tokenizer.init_kwargs,
            special_tokens_map=tokenizer.special_tokens_map,
            extra_special_tokens=tokenizer.extra_special_tokens,
            chat_template=tokenizer.chat_template,
            padding_side=tokenizer.padding_side,
            truncation_side=tokenizer.truncation_side,
            model_input_names=tokenizer.model_input_names,
            render=tokenizer.apply_chat_template,
        )

    def special_id(self, name: str) -> int | None:
        """Returns the id of a named special token, such as cls_token; None where there is none."""
        token = self.special_tokens_map.get(name)
        return None if token is None else self.backend.token_to_id(token)

    @property
    def all_special_ids(self) -> set[int]:
        """The ids of all special tokens."""
        tokens = {*self.special_tokens_map.values(), *self.extra_special_tokens}
        return {token_id for token in tokens if (token_id := self.backend.token_to_id(token)) is not None}
