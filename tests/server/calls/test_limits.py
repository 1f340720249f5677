"""Limits on the number of characters and tokens of a request."""

from collections.abc import Callable

import pytest

from penstock.engine.protocol.errors import InvalidRequestError
from penstock.server.calls import limits


@pytest.mark.parametrize(
    ("check", "limit"),
    [
        (limits.check_num_chars, limits.MAX_TOKENIZED_CHARS),
        (limits.check_num_tokens, limits.MAX_RESPONSE_TOKENS),
        (limits.check_num_named_tokens, limits.MAX_DECODED_IDS),
    ],
)
def test_one_more_than_a_limit_is_rejected(check: Callable[[int, str], None], limit: int) -> None:
    check(limit, "text")
    with pytest.raises(InvalidRequestError, match=f"^text has {limit + 1} .* {limit}") as rejected:
        check(limit + 1, "text")
    assert rejected.value.param == "text"
