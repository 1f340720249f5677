"""An unknown key within two edits of a known one is a typing error."""

import itertools

from penstock.server.http.json_body import _is_within


def edits_between(a: str, b: str) -> int:
    """Returns the Damerau-Levenshtein distance. It edits no part twice (optimal string alignment)."""
    if not a or not b:
        return len(a) + len(b)
    steps = [edits_between(a[1:], b) + 1, edits_between(a, b[1:]) + 1, edits_between(a[1:], b[1:]) + (a[0] != b[0])]
    if len(a) > 1 and len(b) > 1 and (a[0], a[1]) == (b[1], b[0]):
        steps.append(edits_between(a[2:], b[2:]) + 1)
    return min(steps)


def test_misspelt_key_is_within_the_number_of_its_edits() -> None:
    words = ["".join(letters) for length in range(5) for letters in itertools.product("ab", repeat=length)]
    words += ["abc", "acb", "cab", "abcd", "badc", "abdce"]
    for a, b in itertools.product(words, words):
        found = [_is_within(a, b, edits) for edits in range(4)]
        assert found == [edits_between(a, b) <= edits for edits in range(4)], (a, b)
