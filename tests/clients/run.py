"""Runs client libraries against real servers: `make test-clients`.

Each folder is a client with its pins and a file of checks. The checks run in the client's environment, by pytest or by
Node's test runner, and compare results of the client with responses to plain HTTP.
"""

import os
import subprocess
import sys
import textwrap
import time
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass, field

from environments import BUILD, HERE, Client, InstallError, clients
from servers import serving

CHECKS_TIMEOUT_S = 900
WIDTH = 118
# Clients use no other host.
OFFLINE = {
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NO_PROXY": "127.0.0.1,localhost",
}


@dataclass
class Outcome:
    """Results of the checks of one client.

    Attributes:
        counts: Numbers of "passed", "failed" and "skipped" checks.
        names: Names of the checks, in order.
        notes: Reasons of failed and skipped checks.
    """

    client: Client
    counts: Counter[str] = field(default_factory=Counter)
    names: dict[str, None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def fail(self, note: str) -> None:
        self.counts["failed"] += 1
        self.notes.append(note)

    def show(self) -> None:
        """Print its row of the table."""
        counts = "  ".join(f"{self.counts[kind]:3} {kind}" for kind in ("passed", "failed", "skipped"))
        packages = ", ".join(f"{name} {version}" for name, version in self.client.pins().items())
        print(f"{self.client.name:18} {counts}  {self.seconds:6.1f} s")
        for text in filter(None, (packages, ", ".join(self.names))):
            indent = " " * 19
            print(textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False))
        for note in self.notes:
            print(textwrap.indent(note, "    | "))
        sys.stdout.flush()


def check(client: Client, variables: dict[str, str]) -> Outcome:
    """Run the checks of an installed client."""
    outcome = Outcome(client)
    report = client.home / "report.xml"
    report.unlink(missing_ok=True)
    environment = {**os.environ, **OFFLINE, **variables, "PYTHONPATH": str(HERE), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("HF_HUB_OFFLINE", None)  # it would also reject the local server
    begin_s = time.monotonic()
    try:
        done = subprocess.run(
            client.command(report),
            cwd=client.home,
            env=environment,
            capture_output=True,
            text=True,
            timeout=CHECKS_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        outcome.fail(f"no end after {CHECKS_TIMEOUT_S} s")
        return outcome
    finally:
        outcome.seconds = time.monotonic() - begin_s
    cases = list(ET.parse(report).iter("testcase")) if report.exists() else []
    for case in cases:
        _count(outcome, case)
    if not cases or (done.returncode and not outcome.counts["failed"]):
        outcome.fail(f"ended with {done.returncode}:\n" + (done.stdout + done.stderr)[-2000:])
    return outcome


def _count(outcome: Outcome, case: ET.Element) -> None:
    name = case.get("name", "")
    outcome.names[name.partition("[")[0].removeprefix("test_").replace("_", " ")] = None
    problems = [*case.findall("failure"), *case.findall("error")]
    skipped = case.find("skipped")
    if problems:
        outcome.fail("\n".join(f"{name}: {problem.get('message')}\n{problem.text}" for problem in problems))
    elif skipped is not None:
        outcome.counts["skipped"] += 1
        outcome.notes.append(f"{name} skipped: {skipped.get('message')}")
    else:
        outcome.counts["passed"] += 1


def main(names: list[str]) -> int:
    """Install and check the named clients, or all."""
    known = {client.name: client for client in clients()}
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"There is no client {', '.join(unknown)}; there are {', '.join(known)}.", file=sys.stderr)
        return 2
    chosen = [known[name] for name in names] or list(known.values())
    outcomes = []
    ready = []
    for client in chosen:
        try:
            client.install()
            ready.append(client)
        except InstallError as error:
            outcome = Outcome(client)
            outcome.fail(f"{client.name} cannot be installed: {error}")
            outcomes.append(outcome)
    with serving(BUILD) as variables:
        for client in ready:
            outcomes.append(check(client, variables))
            outcomes[-1].show()
    for outcome in outcomes[: len(chosen) - len(ready)]:
        outcome.show()
    total = sum((outcome.counts for outcome in outcomes), Counter())
    print(f"{len(outcomes)} clients: {total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
