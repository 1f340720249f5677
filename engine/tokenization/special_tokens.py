"""What stands around the tokens of a text: special tokens, found out by asking the tokenizer, and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PROBE: Final = "One short text to begin with."


@dataclass(frozen=True, slots=True, eq=False)
class SpecialTokens:
    """The special tokens around a text.

    Attributes:
        leading: [A] int32, such as [CLS].
        trailing: [B] int32, such as [SEP].
    """

    leading: NDArray[np.int32]
    trailing: NDArray[np.int32]

    def __len__(self) -> int:
        """Returns the number of special tokens."""
        return len(self.leading) + len(self.trailing)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> SpecialTokens | None:
        """Returns the special tokens of a tokenizer; None where it does more to a text than to put tokens around it."""
        bare = tokenizer.encode(_PROBE, add_special_tokens=False).ids
        whole = tokenizer.encode(_PROBE).ids
        for start in range(len(whole) - len(bare) + 1):
            end = start + len(bare)
            if bare and whole[start:end] == bare:
                return cls(np.array(whole[:start], np.int32), np.array(whole[end:], np.int32))
        return None


def count_prompt(ids: NDArray[np.int32], prompt_ids: Sequence[int]) -> int:
    """Returns how many tokens of a prompt stand at the head of a text that was tokenized with it.

    Fewer than the prompt has by itself where its last letters became a token with the text's first ones.

    Args:
        ids: [L]. Of the prompt and the text as one, without special tokens.
        prompt_ids: Of the prompt by itself, without special tokens.
    """
    length = min(len(ids), len(prompt_ids))
    differs = np.flatnonzero(ids[:length] != np.asarray(prompt_ids[:length], np.int32))
    return int(differs[0]) if len(differs) else length
