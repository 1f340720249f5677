"""Runs schemathesis on the OpenAPI document of real servers, one for each kind of model.

`make test-schema` calls it with the Python of build/schema, which has schemathesis. Servers and tiny models run in the
project's environment. Command-line arguments such as `--seed 7` go to `schemathesis run`.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from openapi_spec_validator import validate

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "schema"
MODELS, REPORTS = BUILD / "models", BUILD / "reports"
SERVER_BIN = ROOT / ".venv" / "bin"
START_TIMEOUT_S = 120
KEY = "a-key"


@dataclass(frozen=True)
class Suite:
    """A server, and options of schemathesis.

    Attributes:
        name: Name of the report.
        model: Folder of a tiny model; "" for the embedded one.
        phases: Phases of schemathesis. Coverage does not depend on the model and runs once, in two halves.
        max_examples: For each operation in the fuzzing phase.
        has_key: Whether the server needs an API key.
        paths: Options that select operations.
        flags: Further flags of `penstock serve`.
    """

    name: str
    model: str
    phases: str = "examples,fuzzing,stateful"
    max_examples: int = 30
    has_key: bool = False
    paths: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


VERSIONED = "^/v[12]/"
MATRYOSHKA = ("--hf-overrides", '{"is_matryoshka": true}')
SUITES = (
    Suite("coverage-versioned", "embedding", "coverage", paths=("--include-path-regex", VERSIONED), flags=MATRYOSHKA),
    Suite("coverage-others", "embedding", "coverage", paths=("--exclude-path-regex", VERSIONED), flags=MATRYOSHKA),
    Suite("embedding-with-key", "embedding", max_examples=100, has_key=True, flags=MATRYOSHKA),
    Suite("all-MiniLM-L6-v2", ""),
    Suite("classifier", "classifier"),
    Suite("token-classifier", "token-classifier"),
    Suite("cross-encoder", "cross-encoder"),
    Suite("sparse", "sparse"),
)


def environment() -> dict[str, str]:
    """Returns the environment of servers: no settings, no network, one thread."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return {**others, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until the server at `url` is ready. Ends the run if it does not start."""
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while server.poll() is None and time.monotonic() < give_up_s:
        try:
            with urllib.request.urlopen(f"{url}/health/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    sys.exit(f"The server did not start:\n{log.read_text()}")


def run(suite: Suite, options: list[str]) -> dict[str, object]:
    """Starts a server, validates its document, runs schemathesis and returns its report."""
    url, log = f"http://127.0.0.1:{free_port()}", REPORTS / f"{suite.name}.server.log"
    command = [str(SERVER_BIN / "penstock"), "serve", *([str(MODELS / suite.model)] if suite.model else [])]
    # The document allows no unknown fields.
    command += ["--unknown-fields", "reject", *suite.flags, *(("--api-key", KEY) if suite.has_key else ())]
    with log.open("wb") as stderr:
        address = ("--host", "127.0.0.1", "--port", url.rsplit(":", 1)[1], "--device", "cpu")
        server = subprocess.Popen([*command, *address], stderr=stderr, env=environment())
    try:
        wait_until_ready(url, server, log)
        with urllib.request.urlopen(f"{url}/openapi.json", timeout=30) as response:
            validate(json.load(response))
        return schemathesis(suite, url, options)
    finally:
        server.terminate()
        server.wait(60)


def schemathesis(suite: Suite, url: str, options: list[str]) -> dict[str, object]:
    """Runs schemathesis. Its output goes to a file beside its report."""
    report, printed = REPORTS / f"{suite.name}.json", REPORTS / f"{suite.name}.txt"
    report.unlink(missing_ok=True)
    command = [str(Path(sys.executable).parent / "schemathesis"), "--config-file", "schemathesis.toml"]
    command += ["run", f"{url}/openapi.json", "--phases", suite.phases, "--max-examples", str(suite.max_examples)]
    command += ["--report", "json", "--report-json-path", str(report)]
    command += suite.paths
    if suite.has_key:
        command += ["--header", f"Authorization: Bearer {KEY}"]
    with printed.open("wb") as stdout:
        subprocess.run([*command, *options], cwd=HERE, stdout=stdout, stderr=subprocess.STDOUT, check=False)
    if not report.exists():
        sys.exit(f"schemathesis ended without a report:\n{printed.read_text()}")
    return json.loads(report.read_text())


def show(suite: Suite, report: dict) -> int:
    """Prints a line. Returns the number of failures and errors."""
    cases, rates = report["test_cases"], [rate for phases in report["valid_rates"].values() for rate in phases.values()]
    accepted, rejected = (sum(rate[kind] for rate in rates) for kind in ("accepted", "rejected"))
    num_failed = cases["unique_failures"] + len(report["errors"])
    print(
        f"{suite.name:22} {report['operations']['tested']:>10} {cases['generated']:>8} {accepted:>9} {rejected:>8} "
        f"{num_failed:>9} {report['running_time']:>7.0f} s   seed {report['seed']}",
        flush=True,
    )
    return num_failed + (not report["complete"])


def main(options: list[str]) -> int:
    """Runs all suites, two in parallel. Returns the exit code."""
    began_s = time.monotonic()
    REPORTS.mkdir(parents=True, exist_ok=True)
    maker = [str(SERVER_BIN / "python"), str(HERE / "tiny_models.py"), str(MODELS)]
    subprocess.run(maker, env=environment(), check=True)
    print(f"{'server':22} {'operations':>10} {'cases':>8} {'accepted':>9} {'rejected':>8} {'failures':>9} {'time':>9}")
    num_failed = num_cases = 0
    with ThreadPoolExecutor(2) as pool:
        for suite, report in zip(SUITES, pool.map(lambda suite: run(suite, options), SUITES), strict=True):
            failed = show(suite, report)
            num_failed, num_cases = num_failed + failed, num_cases + report["test_cases"]["generated"]
            if failed:
                print((REPORTS / f"{suite.name}.txt").read_text(), flush=True)
    print(f"{num_cases} cases, {num_failed} failures in {time.monotonic() - began_s:.0f} s; reports in {REPORTS}")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
