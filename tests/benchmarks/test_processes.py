"""Control groups, processor times and servers of the benchmarks."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import processes
import pytest
from servers import Server

from ..servers import exists
from ..waiting import wait_until

SERVER = """
import json, os, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

child = subprocess.Popen(["sleep", "600"], start_new_session=True)
open(sys.argv[2], "w").write(str(child.pid))

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": "tiny"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_group_gets_a_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "CGROUPS", tmp_path)
    monkeypatch.setattr(processes, "_remove_group", lambda _: None)
    (tmp_path / "cgroup.controllers").write_text("cpu memory")
    with processes.quota(1.5) as entering:
        folder = next(path for path in tmp_path.rglob("penstock-bench-*"))
        assert (folder / "cpu.max").read_text() == "150000 100000"
        command = [*shlex.split(entering), "printf", "%s", "a word"]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "a word"


def test_stopped_server_leaves_no_child(tmp_path: Path, free_port: int) -> None:
    script, child_file = tmp_path / "server.py", tmp_path / "child"
    script.write_text(SERVER)
    command = f"NAME=value {sys.executable} {script} {free_port} {child_file}"
    server = Server("tiny", command, f"http://127.0.0.1:{free_port}", tmp_path / "log")
    server.start(60)
    try:
        child = int(child_file.read_text())
        assert child in processes.family(server.pid)
        assert server.ready_s > 0
        assert server.served_name() == "tiny"
        assert 0 < server.memory_bytes() <= server.peak_memory_bytes() * 1.01
        assert processes.processor_seconds(server.pid) > 0
    finally:
        server.stop()
    wait_until(lambda: not exists(child) and not exists(server.pid))
