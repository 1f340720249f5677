"""The progress of `penstock embed`: log lines, or a bar on a terminal."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from penstock.server.embed_jobs import progress as progress_module
from penstock.server.embed_jobs.progress import LOG_EVERY_S, Progress

from ...clock import Clock


def test_log_has_the_speed_of_the_last_minute(fake, caplog, monkeypatch) -> None:
    caplog.set_level("INFO", progress_module.logger.name)
    clock = Clock()
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=clock))
    with Progress({4: 1000}, fake.info, is_terminal=False) as progress:
        progress.skip([4] * 100)
        for rows_per_interval in (1, *[40] * 7):  # the first interval is slow
            clock.now_s += LOG_EVERY_S / 2
            progress.update([])
            clock.now_s += LOG_EVERY_S / 2
            progress.update([4] * rows_per_interval)
    assert caplog.messages[0] == "101/1000 rows, 10%, 0.1 rows/s, about 2:29:50 left"
    assert caplog.messages[-1] == "381/1000 rows, 38%, 4 rows/s, about 02:34 left"
    speeds = [message.split(", ")[2].removesuffix(" rows/s") for message in caplog.messages]
    assert speeds == ["0.1", "2.05", "2.7", "3.02", "3.22", "3.35", "4", "4"]


def test_bar_counts_rows_of_both_runs_by_their_weight(fake, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress({0: 1, 4: 2}, fake.info, is_terminal=True) as progress:  # weights 4, 8, 8
        progress.skip([0, 4])
        progress.update([4])
    bars = capsys.readouterr().err.split("\r")
    assert any(bar.startswith("0/3 rows   0%|") for bar in bars)
    assert "3/3 rows 100%|" in bars[-1]
    assert bars[-1].endswith("\n")
    with Progress({0: 1, 4: 2}, fake.info, is_terminal=True) as progress:
        progress.skip([4])
        assert progress._bar.initial == 8, "rows of an earlier run do not count for the speed"
        assert progress._bar.dynamic_ncols, "it follows the width of the terminal"
        progress._bar.mininterval = 0
        progress.update([0])
    assert "2/3 rows  60%|" in capsys.readouterr().err.split("\r")[-1]


@pytest.mark.parametrize(
    ("truncates", "splits", "share"), [(True, False, "50%"), (False, False, "87%"), (True, True, "87%")]
)
def test_long_text_counts_up_to_the_limit_if_it_is_truncated(fake, capsys, truncates, splits, share) -> None:
    info = replace(fake.info, auto_truncate=truncates, enable_chunked_processing=splits, max_model_len=2)
    with Progress({8: 1, 100: 1, 4: 1}, info, is_terminal=True) as progress:
        progress.skip([100])
        progress._bar.mininterval = 0
        progress.update([0])
    assert f"2/3 rows  {share}|" in capsys.readouterr().err.split("\r")[-1]
