import re
from collections import Counter

import pytest

from penstock.server.embed_jobs import progress as progress_module
from penstock.server.embed_jobs.progress import Progress

from ...clock import Clock


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]):
    """Percentage and remaining time of the progress line."""

    def last() -> tuple[int, str]:
        line = re.split(r"[\r\n]+", capsys.readouterr().err.rstrip())[-1]
        rows, percentage = re.match(r"(\d+/\d+ rows) +(\d+)%", line).groups()
        return int(percentage), rows

    return last


def bar(info, *texts: str) -> Progress:
    return Progress(Counter(map(len, texts)), info, is_terminal=True)


def test_truncated_characters_have_no_weight(make_engine, shown) -> None:
    with bar(make_engine(auto_truncate=True, max_model_len=24).info, "a" * 10_000, "a" * 96) as progress:
        progress.update(["a" * 10_000])
    assert shown() == (50, "1/2 rows")


def test_progress_without_a_terminal_is_logged(make_engine, capsys, caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(progress_module.time, "monotonic", clock)
    caplog.set_level("INFO")
    with Progress(Counter({96: 1000}), make_engine().info, is_terminal=False) as progress:
        progress.skip(["a" * 96] * 100)  # takes no time of this run
        clock.now_s = 29.0
        progress.update(["a" * 96] * 300)
        assert not caplog.messages
        clock.now_s = 40.0
        progress.update(["a" * 96] * 100)
    assert caplog.messages == ["500/1000 rows, 50%, about 00:50 left"]
    assert capsys.readouterr().err == ""


def test_rows_of_an_earlier_run_do_not_count_for_speed(make_engine, shown) -> None:
    with bar(make_engine().info, *["a" * 96] * 4) as progress:
        progress.skip(["a" * 96])
        progress.update(["a" * 96])
        assert (progress._bar.n, progress._bar.initial) == (200, 100)
    assert shown() == (50, "2/4 rows")
