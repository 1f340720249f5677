"""Servers under test: they are ready when they answer, and nothing of them is left when they are stopped."""

import sys
import time
from pathlib import Path

import processes
import pytest
from servers import Server

SERVER = """
import json, os, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

child = subprocess.Popen(["sleep", "600"], start_new_session="apart" in sys.argv)
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


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pid: int) -> bool:
    until = time.monotonic() + 120
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not is_running(pid)


@pytest.mark.parametrize("kind", ["beside", "apart"])
def test_stopping_ends_children_that_outlive_the_server(tmp_path: Path, free_port: int, kind: str) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    child_file = tmp_path / "child"
    command = f"NAME=value {sys.executable} {script} {free_port} {child_file} {kind}"
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
    assert wait_until_gone(child)
    assert wait_until_gone(server.pid)


def test_a_server_that_ends_says_with_what(tmp_path: Path, free_port: int) -> None:
    command = f"{sys.executable} -c 'raise SystemExit(7)'"
    server = Server("short", command, f"http://127.0.0.1:{free_port}", tmp_path / "log")
    with pytest.raises(RuntimeError, match="short ended with 7"):
        server.start(60)
    server.stop()


def test_what_is_gone_already_is_fine() -> None:
    nobody = 2**22 - 1  # above the largest number that the kernel gives
    processes.kill(nobody)
    processes.kill_group(nobody)
    assert processes.memory_bytes(nobody) == 0
