"""Runs client libraries against real servers: `make test-clients`.

Each folder is a client with its pins and a file of checks. The checks run in the client's environment with the test
runner of its language, and compare results of the client with responses to plain HTTP. A client is skipped if this
machine has no toolchain for it.
"""

import os
import subprocess
import sys

from environments import BUILD, HERE, Client, InstallError, clients
from servers import serving

CHECKS_TIMEOUT_S = 900
# Clients use no other host.
OFFLINE = {
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NO_PROXY": "127.0.0.1,localhost",
}


def check(client: Client, variables: dict[str, str]) -> bool:
    """Run the checks of an installed client, which print their results. Returns whether they passed."""
    environment = {**os.environ, **OFFLINE, **variables, "PYTHONPATH": str(HERE), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("HF_HUB_OFFLINE", None)  # it would also reject the local server
    print(f"{client.name}: {', '.join(f'{name} {version}' for name, version in client.pins().items())}", flush=True)
    try:
        done = subprocess.run(client.command(), cwd=client.home, env=environment, timeout=CHECKS_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        print(f"{client.name}: no end after {CHECKS_TIMEOUT_S} s")
        return False
    return done.returncode == 0


def main(names: list[str]) -> int:
    """Install and check the named clients, or all."""
    known = {client.name: client for client in clients()}
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"There is no client {', '.join(unknown)}; there are {', '.join(known)}.", file=sys.stderr)
        return 2
    chosen = [known[name] for name in names] or list(known.values())
    failed: list[str] = []
    skipped: list[str] = []
    with serving(BUILD) as variables:
        for client in chosen:
            if not client.is_runnable:
                print(f"{client.name} skipped: no {client.program}")
                skipped.append(client.name)
                continue
            try:
                client.install()
            except InstallError as error:
                print(f"{client.name} cannot be installed: {error}")
                failed.append(client.name)
                continue
            if not check(client, variables):
                failed.append(client.name)
    print(f"{len(chosen)} clients; failed: {', '.join(failed) or 'none'}; skipped: {', '.join(skipped) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
