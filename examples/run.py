"""Runs the examples against a server with the embedded model and the models of hybrid_search.py and image_search.py.

python examples/run.py penstock                     # the command to start; `make examples` does the same
python examples/run.py penstock late_chunking.py    # some of them
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXAMPLES = sorted(path for path in HERE.glob("*.py") if path != Path(__file__).resolve())
START_TIMEOUT_S = 120


@contextlib.contextmanager
def serving(penstock: str) -> Iterator[str]:
    """Starts a server with `--data-dir` and all models. Yields its URL."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        info = subprocess.run([penstock, "info", "--json"], check=True, capture_output=True)
        minilm, idf, clip = json.loads(info.stdout)["path"], f"{folder}/idf-model", f"{folder}/random-clip"
        subprocess.run([sys.executable, HERE / "hybrid_search.py", "build", idf, minilm], check=True)
        subprocess.run([sys.executable, HERE / "data" / "random_clip.py", clip, minilm], check=True)
        models = "".join(
            f"[[models]]\nmodel = {json.dumps(path)}\nname = {json.dumps(name)}\n"
            for path, name in ((minilm, "all-MiniLM-L6-v2"), (idf, "idf-model"), (clip, "random-clip"))
        )
        config = Path(folder, "penstock.toml")
        config.write_text(f"data_dir = {json.dumps(folder + '/data')}\n{models}")
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        flags = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
        process = subprocess.Popen([penstock, "serve", *flags])
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(url, process)
            yield url
        finally:
            process.terminate()
            process.wait()


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Returns when all models are loaded. Raises RuntimeError if the server ends or takes too long."""
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up_s and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health/ready"):
            return
        time.sleep(0.1)
    raise RuntimeError("the server did not become ready")


def run(example: Path, url: str, penstock: str) -> bool:
    """Runs an example with the folder of `penstock` first in PATH. Returns whether it succeeded."""
    path = f"{Path(penstock).absolute().parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, "HAYSTACK_TELEMETRY_ENABLED": "False"}
    return subprocess.run([sys.executable, example, url], env=variables, check=False).returncode == 0


def main(penstock: str, *names: str) -> int:
    """Runs the named examples, or all. Returns the exit code."""
    known = {example.name: example for example in EXAMPLES}
    if unknown := [name for name in names if name not in known]:
        print(f"There is no example {', '.join(unknown)}; there are {', '.join(known)}.", file=sys.stderr)
        return 2
    chosen = [known[name] for name in names] or EXAMPLES
    failed = []
    with serving(penstock) as url:
        for example in chosen:
            print(f"\n== {example.name}", flush=True)
            if not run(example, url, penstock):
                failed.append(example.name)
    print(f"\n{len(chosen)} examples, {len(failed)} failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
