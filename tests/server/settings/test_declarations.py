import pytest

from penstock.engine.protocol.setting import parse_size, shown_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("2GiB", 2 << 30), ("500MB", 500_000_000), ("1.5k", 1500), ("7", 7), ("8 kib", 8192), ("3b", 3), ("1TB", 10**12)],
)
def test_size_is_parsed_and_shown(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes
    assert parse_size(shown_size(num_bytes)) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 apples", "1e9", "nan"])
def test_invalid_size_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="must be a size such as"):
        parse_size(text)
