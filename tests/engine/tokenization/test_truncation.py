"""Enormous texts are read up to a number of characters, from the side that is kept, and cut between words."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from penstock.engine.tokenization.model_tokenizer import bounded

LONGEST_WORD = 1_000

WORDS = st.lists(st.integers(1, 1_500), min_size=1, max_size=12).flatmap(
    lambda lengths: st.lists(st.sampled_from(" \n"), min_size=len(lengths), max_size=len(lengths)).map(
        lambda spaces: "".join("a" * length + space for length, space in zip(lengths, spaces, strict=True))
    )
)


@given(WORDS, st.integers(1, 6_000), st.booleans())
def test_a_bounded_text_is_an_end_of_it_cut_between_words(text: str, num_chars: int, keeps_end: bool) -> None:
    kept = bounded(text, num_chars, keeps_end=keeps_end)
    if len(text) <= num_chars:
        assert kept is text
        return
    assert len(kept) <= num_chars
    assert num_chars - len(kept) <= min(LONGEST_WORD, num_chars)
    if keeps_end:
        assert text.endswith(kept)
        start = len(text) - num_chars
        spaces = [place for place in range(start, min(start + LONGEST_WORD, len(text))) if text[place] in " \n"]
        assert len(text) - len(kept) == (spaces[0] if spaces else start)
    else:
        assert text.startswith(kept)
        places = range(max(num_chars - LONGEST_WORD, 0), num_chars)
        spaces = [place for place in places if text[place] in " \n"]
        assert len(kept) == (spaces[-1] if spaces else num_chars)


@pytest.mark.parametrize(
    ("text", "keeps_end", "kept"),
    [
        ("one two\nthree", False, "one two"),
        ("one two\nthree", True, "\nthree"),
        ("one two a\nb c", True, " a\nb c"),
        ("one two\na b c", True, "\na b c"),
        ("one\ntwo three", False, "one\ntwo"),
        ("onetwothreefour", False, "onetwothr"),
        ("onetwothreefour", True, "threefour"),
    ],
)
def test_the_nearest_space_or_line_end_is_where_it_is_cut(text: str, keeps_end: bool, kept: str) -> None:
    assert bounded(text, 9, keeps_end=keeps_end) == kept


@pytest.mark.parametrize("num_letters", [999, 1_000])
def test_no_more_than_the_longest_word_is_lost(num_letters: int) -> None:
    word = "a" * num_letters
    num_chars = num_letters + 5
    is_lost = num_letters < LONGEST_WORD
    assert bounded(f"word {word}bbb", num_chars, keeps_end=False) == ("word" if is_lost else f"word {word}")
    assert bounded(f"bbb{word} word", num_chars, keeps_end=True) == (" word" if is_lost else f"{word} word")
