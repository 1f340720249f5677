"""What happens to an input of too many tokens: it is refused, or cut to the limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..protocol.errors import InvalidRequestError, RequestTooLongError

_FEW_CHARS_PER_TOKEN: Final = 8
_MANY_CHARS_PER_TOKEN: Final = 64
_FIRST_CHARS: Final = 65_536
_MAX_CHARS: Final = 524_288
"""Of models with short limits, so that a text may begin with that many blanks."""
_MOST_CHARS: Final = 2_000_000
"""Of any model, so that one text takes no more than a GB to read."""
_LONGEST_WORD: Final = 1_000
"""Characters. Text is cut between words, unless that takes away more than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """What to do with an input of too many tokens.

    Attributes:
        max_num_tokens: Tokens. The limit, special tokens included.
        cut: Cut to the limit; False refuses.
        side: "left" or "right", the side that is cut away; None means the tokenizer's own.
        param: Request field that an error names.
        name: What is behind the limit, where it is not the model's own; see ModelInfo.limit_name.
    """

    max_num_tokens: int
    cut: bool = False
    side: str | None = None
    param: str | None = "input"
    name: str | None = None

    @property
    def first_chars(self) -> int:
        """Characters that are read first: they have more tokens than the limit in nearly every text."""
        return min(max(_FEW_CHARS_PER_TOKEN * self.max_num_tokens, _FIRST_CHARS), self.max_chars)

    @property
    def max_chars(self) -> int:
        """Characters of a text that are read: more for a token of the limit are not met in real text.

        Reading takes 500 bytes for a token and 30 for a character, so that this bounds the memory of one text.
        """
        return min(max(_MANY_CHARS_PER_TOKEN * self.max_num_tokens, _MAX_CHARS), _MOST_CHARS)

    @property
    def kept_chars(self) -> int:
        """Characters that the limit can keep of one text of a pair, of which not more is read where it may be cut."""
        return min(max(_MANY_CHARS_PER_TOKEN * self.max_num_tokens, _FIRST_CHARS), _MOST_CHARS)

    def refuse_unless_cut(self, num_tokens: int, index: int, *, is_whole: bool = True) -> None:
        """Refuses an input above the limit, unless it is to be cut.

        Args:
            num_tokens: Tokens of the input.
            index: Its place in the request.
            is_whole: All of it was read; else it has more.

        Raises:
            RequestTooLongError: It must not be cut.
        """
        at_least = "" if is_whole else "at least "
        self.refuse_found_unless_cut(f"input {index} has {at_least}{num_tokens} tokens", num_tokens)

    def refuse_unread_unless_cut(self, num_chars: int, num_tokens: int, index: int) -> None:
        """Raises RequestTooLongError unless an input of which only `num_tokens` tokens were read is to be cut."""
        self.refuse_found_unless_cut(
            f"input {index} has {num_chars} characters, of which {self.max_chars} would be read", num_tokens
        )

    def refuse_found_unless_cut(
        self,
        found: str,
        num_tokens: int,
        way_out: str = "Please reduce the length of the input prompt, or set {cut_to_fit} to cut it.",
    ) -> None:
        """Raises RequestTooLongError unless what is too long is to be cut; see RequestTooLongError.over_limit."""
        if not self.cut:
            raise RequestTooLongError.over_limit(
                found,
                way_out,
                num_tokens=num_tokens,
                max_num_tokens=self.max_num_tokens,
                limit_name=self.name,
                param=self.param,
            )

    def no_room(self, why: str) -> InvalidRequestError:
        """Returns the error for a limit that leaves no room for text; `why` is the other half of its sentence."""
        return InvalidRequestError(
            "The limit is {limit} tokens, but {why}; allow more with {truncate_prompt_tokens} or --max-model-len.",
            param="truncate_prompt_tokens",
            limit=self.max_num_tokens,
            why=why,
        )


def bounded(text: str, num_chars: int, *, keeps_end: bool) -> str:
    """Returns `num_chars` characters of a text at most, of its end or beginning, cut between words if there are any."""
    if len(text) <= num_chars:
        return text
    if keeps_end:
        start = len(text) - num_chars
        spaces = [text.find(space, start, start + _LONGEST_WORD) for space in " \n"]
        return text[min((place for place in spaces if place >= 0), default=start) :]
    space = max(text.rfind(space, max(num_chars - _LONGEST_WORD, 0), num_chars) for space in " \n")
    return text[: space if space >= 0 else num_chars]
