"""What the runner prints and writes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from mutants import Key, Mutant
from rooms import is_in
from trials import Trial, Verdict


def shown(mutant: Mutant) -> str:
    """One line: id, place, kind, and the line before and after."""
    key = mutant.key
    return f"{mutant.id}  {key.file}:{mutant.line}  {key.operator}  {key.before}  ->  {key.after}"


def shown_trial(trial: Trial) -> str:
    """The same with what came of it."""
    by = f" {trial.by}" if trial.by else ""
    return f"{trial.verdict:8}  {shown(trial.mutant)}  |{by} ({trial.seconds:.1f} s)"


def seen_percent(trials: Sequence[Trial]) -> float:
    """How many of 100 wrong changes a test saw; a hang is seen."""
    survived = sum(trial.verdict is Verdict.SURVIVED for trial in trials)
    return 100.0 * (len(trials) - survived) / len(trials) if trials else 100.0


def summary(trials: Sequence[Trial], rooms: Sequence[str], num_equivalent: int) -> str:
    """A row per room and one for all, after the list of those that no test saw."""
    lines = [shown_trial(trial) for trial in trials if trial.verdict is Verdict.SURVIVED]
    lines = ["", "No test saw:", *lines] if lines else ["", "Every one was seen."]
    lines += ["", f"{'room':32} {'tried':>6} {'killed':>7} {'hung':>5} {'survived':>9} {'seen':>7}"]
    for room in rooms:
        lines.append(_row(room, [trial for trial in trials if is_in(room, trial.mutant.key.file)]))
    if len(rooms) > 1:
        lines.append(_row("all", trials))
    if num_equivalent:
        lines.append(f"Left out: {num_equivalent} that change nothing (equivalent.toml).")
    return "\n".join(lines)


def gone_equivalents(keys: Iterable[Key]) -> list[str]:
    """A line for each entry of equivalent.toml that names no change any more."""
    return [f"equivalent.toml names a change that cannot be made any more: {key}" for key in keys]


def gone_texts(names: Iterable[str]) -> list[str]:
    """A line for each entry of known.toml whose text is not there any more."""
    return [f"known.toml names a text that does not stand there just once: {name}" for name in names]


def write_json(file: Path, trials: Sequence[Trial]) -> None:
    """Writes the trials as a list of objects."""
    rows = [
        {
            "id": trial.mutant.id,
            "line": trial.mutant.line,
            **trial.mutant.key._asdict(),
            "verdict": trial.verdict,
            "by": trial.by,
            "seconds": round(trial.seconds, 2),
        }
        for trial in trials
    ]
    file.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def _row(name: str, trials: Sequence[Trial]) -> str:
    counts = Counter(trial.verdict for trial in trials)
    killed, hung, survived = (counts[verdict] for verdict in (Verdict.KILLED, Verdict.TIMEOUT, Verdict.SURVIVED))
    return f"{name:32} {len(trials):6} {killed:7} {hung:5} {survived:9} {seen_percent(trials):6.1f}%"
