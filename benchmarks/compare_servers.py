r"""Embeds the same texts through several servers, in alternating rounds, and prints ratios.

    python benchmarks/compare_servers.py \
        --server penstock http://127.0.0.1:8101 ".venv/bin/penstock serve --port 8101 --dtype bfloat16" \
        --server vllm http://127.0.0.1:8102 "VLLM_CPU_KVCACHE_SPACE=1 vllm serve MODEL --runner pooling ..." \
        --output benchmarks/results/servers-cpu.json

Rounds alternate between the servers, so that a machine that slows down slows all of them. The first server is compared
with each other one, round by round; the table shows the medians. Without a command, a server is taken to be running.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from closed_loop import Round, run_round
from loads import LOADS
from machine import machine
from servers import Server
from summary import summarize


def main() -> None:
    """Parses the arguments, measures, prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", nargs="+", action="append", required=True, metavar="NAME URL [COMMAND]")
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="length of one round")
    parser.add_argument(
        "--settle", type=float, default=1.5, help="seconds of the same load before a round, not counted"
    )
    parser.add_argument("--encoding-format", default="float", choices=("float", "base64"))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    logs = Path(tempfile.mkdtemp(prefix="compare-servers-"))
    servers = [Server(s[0], s[2] if len(s) > 2 else "", s[1].rstrip("/"), logs / f"{s[0]}.log") for s in args.server]
    print(f"server logs: {logs}")
    try:
        for server, spec in zip(servers, args.server, strict=True):
            if len(spec) > 2:
                server.start()
                print(f"{server.name}: ready after {server.ready_s:.1f} s")
        report = asyncio.run(measure(servers, args))
        for server, spec in zip(servers, args.server, strict=True):
            if len(spec) > 2:
                report["servers"][server.name] |= {
                    "ready_s": round(server.ready_s, 2),
                    "resident_mib": round(server.memory_bytes() / 2**20),
                }
    finally:
        for server in servers:
            server.stop()
    show(report)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(report, indent=1) + "\n")


async def measure(servers: list[Server], args: argparse.Namespace) -> dict[str, Any]:
    """Runs all rounds and returns the report."""
    report: dict[str, Any] = {
        "machine": machine(),
        "settings": {
            "rounds": args.rounds,
            "seconds": args.seconds,
            "settle": args.settle,
            "encoding_format": args.encoding_format,
        },
        "servers": {server.name: {} for server in servers},
        "loads": {},
    }
    names = {server.name: server.served_name() for server in servers}
    for load in (LOADS[name] for name in args.loads):
        rounds: dict[str, list[Round]] = {server.name: [] for server in servers}
        for server in servers:  # warm-up, not counted
            await run_round(server.url, load, load.bodies(names[server.name], args.encoding_format, seed=-1), 2.0)
        for number in range(args.rounds):
            for server in servers if number % 2 == 0 else reversed(servers):
                bodies = load.bodies(names[server.name], args.encoding_format, seed=number)
                await run_round(server.url, load, bodies, args.settle)  # its memory may have gone cold meanwhile
                rounds[server.name].append(await run_round(server.url, load, bodies, args.seconds))
        report["loads"][load.name] = summarize(rounds)
        print(f"{load.name}: done", flush=True)
    return report


def show(report: dict[str, Any]) -> None:
    """Prints the report as a table."""
    for name, facts in report["servers"].items():
        if facts:
            print(f"{name}: ready after {facts['ready_s']} s, {facts['resident_mib']} MiB resident")
    print(f"{'load':8} {'server':12} {'texts/s':>9} {'p50 ms':>9} {'p99 ms':>9} {'ratio':>7}")
    for load, own in report["loads"].items():
        for name, r in own.items():
            print(
                f"{load:8} {name:12} {r['median_texts_per_s']:9.1f} {r['p50_ms']:9.2f} {r['p99_ms']:9.2f} "
                f"{r['first_is_times_faster']:7.2f}"
            )


if __name__ == "__main__":
    main()
