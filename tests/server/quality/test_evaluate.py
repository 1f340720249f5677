"""Wrong arguments of `penstock eval` end it before the first request."""

import sys

import pytest

from penstock.server.quality.evaluate import evaluate
from penstock.server.settings import EvalSettings, UsageError

URL = "http://127.0.0.1:9"


def test_without_data_or_task_the_message_names_both() -> None:
    with pytest.raises(UsageError, match="DATA: name a folder with a data set, or a task of MTEB with --mteb"):
        next(evaluate(URL, [], EvalSettings()))


def test_missing_mteb_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mteb", None)
    with pytest.raises(UsageError, match=r"--mteb: needs mteb; run `pip install 'penstock\[mteb\]'`"):
        next(evaluate(URL, [], EvalSettings(mteb=("STSBenchmark",))))
