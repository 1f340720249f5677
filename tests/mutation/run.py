"""Which small wrong changes to the code no quick test sees: `make mutants ARGS='--rooms engine/scheduling --count 40'`.

A change is made to one line at a time, in a copy of the checkout, and the quick tests run on it: those that mirror the
changed file first, then others that pass through its room, up to the first that fails. A change that every test lets
pass has SURVIVED: a test is missing there, or the change makes no difference; what was judged to make none is listed in
equivalent.toml with the reason, and is left out.

The sample is the same every time for a seed, and so is the verdict: tests that draw examples draw the same ones. A test
that fails by chance would count as one that has seen something; the tests are run without a change first.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from mutants import Judged, Mutant, known_changes, mutants_of, sample
from report import gone_equivalents, gone_texts, seen_percent, shown, shown_trial, summary, write_json
from rooms import ROOMS, is_in
from trials import Trial, Trials

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def main() -> int:
    """Returns 0, or 1 where fewer are seen than `--at-least` asks for."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the copies are removed then, too
    arguments = _parser().parse_args()
    rooms = [room.strip("/") for room in arguments.rooms]
    num_equivalent = 0
    if arguments.known:
        mutants, gone = known_changes(ROOT, HERE / "known.toml")
        notes = gone_texts(gone)
        rooms = sorted({str(Path(mutant.key.file).parent) for mutant in mutants})
    else:
        judged = Judged(HERE / "equivalent.toml")
        everything = [mutant for room in rooms for mutant in mutants_of(ROOT, room)]
        notes = gone_equivalents(judged.gone_from(everything))
        candidates = [mutant for mutant in everything if mutant not in judged or mutant.id in arguments.only]
        num_equivalent = len(everything) - len(candidates)
        count = None if arguments.count == 0 or arguments.only else arguments.count
        by_room = [[mutant for mutant in candidates if is_in(room, mutant.key.file)] for room in rooms]
        mutants = [mutant for of_room in by_room for mutant in sample(of_room, count, arguments.seed)]
    if arguments.only:
        mutants = [mutant for mutant in mutants if mutant.id in arguments.only]
    for note in notes:
        print(note, file=sys.stderr)
    if arguments.list:
        print("\n".join(map(shown, mutants)))
        return 0
    if not mutants:
        raise SystemExit("There is nothing to try.")
    trials = _try(mutants, arguments)
    print(summary(trials, rooms, num_equivalent))
    return int(seen_percent(trials) < arguments.at_least)


def _try(mutants: Sequence[Mutant], arguments: argparse.Namespace) -> list[Trial]:
    trials: list[Trial] = []
    print(f"{len(mutants)} wrong changes; first the tests without any.")
    try:
        for trial in Trials(ROOT, jobs=arguments.jobs, mirror_only=arguments.mirror_only).run(mutants):
            trials.append(trial)
            print(f"{len(trials):4}/{len(mutants)}  {shown_trial(trial)}")
    finally:
        order = {mutant.id: number for number, mutant in enumerate(mutants)}
        trials.sort(key=lambda trial: order[trial.mutant.id])
        if arguments.json is not None:
            write_json(arguments.json, trials)
    return trials


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rooms", nargs="+", default=list(ROOMS), metavar="PATH", help="folders or files to change")
    add("--count", type=int, default=30, help="wrong changes per room; 0 for all (default: %(default)s)")
    add("--seed", default="0", help="decides the sample (default: %(default)s)")
    add("--known", action="store_true", help="the changes that known.toml lists, in place of a sample")
    add("--only", nargs="+", default=[], metavar="ID", help="these alone, also if they are judged to change nothing")
    add("--mirror-only", action="store_true", help="run the tests of the changed file's own folder alone")
    add("--list", action="store_true", help="print the changes and try none")
    add("--jobs", type=int, default=2, help="copies that are tested at a time (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the outcome to a file as well")
    add("--at-least", type=float, default=0.0, metavar="PERCENT", help="fail where fewer are seen")
    return parser


if __name__ == "__main__":
    sys.exit(main())
