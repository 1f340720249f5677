"""What happens to an input of too many tokens: it is refused, or cut to the limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .errors import InvalidRequestError, RequestTooLongError
from .length_limit import worded_limit

_CHARS_PER_TOKEN: Final = 64
_MIN_CHARS: Final = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """What to do with an input of too many tokens.

    Attributes:
        max_num_tokens: Tokens. The limit, special tokens included.
        cut: Cut to the limit; False refuses.
        side: "left" or "right", the side that is cut away; None means the tokenizer's own.
        param: Request field that an error names.
        name: What is behind the limit, where it is not the model's own; see length_limit.py.
    """

    max_num_tokens: int
    cut: bool = False
    side: str | None = None
    param: str | None = "input"
    name: str | None = None

    @property
    def max_chars(self) -> int:
        """Characters of a text that can matter: a token longer than this on average is not met in real text."""
        return max(_CHARS_PER_TOKEN * self.max_num_tokens, _MIN_CHARS)

    def bounded(self, text: str, *, cuts_left: bool) -> str:
        """Returns what the limit can keep of an enormous text, cut between words; other texts as they are.

        Args:
            text: The text.
            cuts_left: Its end is kept; else its beginning.
        """
        limit = self.max_chars
        if len(text) <= limit:
            return text
        if cuts_left:
            space = text.find(" ", len(text) - limit)
            return text[space:] if space >= 0 else text
        space = text.rfind(" ", 0, limit)
        return text[:space] if space >= 0 else text

    def refuse_unless_cut(self, num_tokens: int, index: int, *, is_whole: bool = True) -> None:
        """Refuses an input above the limit, unless it is to be cut.

        Args:
            num_tokens: Tokens of the input.
            index: Its place in the request.
            is_whole: All of it was read; else it has more.

        Raises:
            RequestTooLongError: It must not be cut.
        """
        if self.cut:
            return
        at_least = "" if is_whole else "at least "
        raise RequestTooLongError(
            f"{worded_limit(self.max_num_tokens, self.name)}, but input {index} has {at_least}{num_tokens} tokens. "
            "Please reduce the length of the input prompt, or set truncate_prompt_tokens to -1 to cut it.",
            num_tokens=num_tokens,
            max_num_tokens=self.max_num_tokens,
            param=self.param,
        )

    def no_room(self, why: str) -> InvalidRequestError:
        """Returns the error for a limit that leaves no room for text; `why` is the other half of its sentence."""
        return InvalidRequestError(
            f"The limit is {self.max_num_tokens} tokens, but {why}; allow more with truncate_prompt_tokens or "
            "--max-model-len.",
            param="truncate_prompt_tokens",
        )
