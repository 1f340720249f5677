"""How large an answer may grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.engine.errors import InvalidRequestError

MAX_TOKEN_VALUES: Final = 20_000_000  # Numbers in an answer with rows for every token: about 250 MB of JSON.


def check_token_values(rows: Sequence[NDArray[np.float32]], num_tokens: int, param: str) -> None:
    """Raises InvalidRequestError if an answer with rows for every token would be too large.

    Args:
        rows: [L_i, D] each.
        num_tokens: Tokens of all inputs.
        param: The request field that holds the inputs.
    """
    num_values = sum(row.size for row in rows)
    if num_values > MAX_TOKEN_VALUES:
        raise InvalidRequestError(
            f"The answer would hold {num_values} numbers for {num_tokens} tokens; the limit is {MAX_TOKEN_VALUES}. "
            "Send fewer inputs at once.",
            param=param,
        )
