"""A headless Chromium, controlled by the DevTools protocol."""

import fcntl
import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any

TIMEOUT_S = 120
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-quic", "--disable-extensions", "--no-proxy-server", "--window-size=1280,1000"),
)


class Chromium:
    """A browser. It reads commands from descriptor 3 and writes responses to 4, with a zero byte at the end of each."""

    def __init__(self, binary: str, profile: Path) -> None:
        ends = [fd for pipe in (os.pipe(), os.pipe()) for fd in pipe]
        # Above 3 and 4, which the shell assigns.
        commands, self._commands, self._answers, answers = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in ends)
        for fd in ends:
            os.close(fd)
        script = f'exec "$@" 3<&{commands} 4>&{answers} {commands}<&- {answers}>&-'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", binary, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(commands, answers),
            env={**os.environ, "HOME": str(profile)},
        )
        os.close(commands)
        os.close(answers)
        self._buffer = b""
        self._last_id = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._last_id += 1
        command = {"id": self._last_id, "method": method, "params": params}
        if session is not None:
            command["sessionId"] = session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        give_up_s = time.monotonic() + TIMEOUT_S
        while True:
            message = self._read(give_up_s - time.monotonic())
            if message.get("id") == self._last_id:
                assert "error" not in message, (method, message)
                return message["result"]
            self.events.append(message)

    def _read(self, timeout_s: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._answers], [], [], max(timeout_s, 0))[0], "Chromium does not answer"
            part = os.read(self._answers, 1 << 20)
            assert part, "Chromium has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def close(self) -> None:
        """Close the commands, which ends the browser."""
        os.close(self._commands)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)


class Page:
    """A tab."""

    def __init__(self, browser: Chromium) -> None:
        browser.events.clear()
        self._browser = browser
        self._target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def open(self, url: str, until: str) -> None:
        """Load a page and wait until an expression is true in it."""
        self.call("Page.navigate", url=url)
        self.wait_for(until)

    def value(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """The value of an expression once it is true."""
        give_up_s = time.monotonic() + TIMEOUT_S
        while not (value := self.value(expression)):
            assert time.monotonic() < give_up_s, (
                f"{expression} stays {value!r}:\n{self.value('document.body.innerText')}"
            )
            time.sleep(0.02)
        return value

    def text(self, selector: str) -> str:
        return self.value(f"document.querySelector({json.dumps(selector)}).innerText")

    def texts(self, selector: str) -> list[str]:
        return self.value(f"[...document.querySelectorAll({json.dumps(selector)})].map((node) => node.innerText)")

    def click(self, selector: str) -> None:
        self.value(f"document.querySelector({json.dumps(selector)}).click()")

    def fill(self, selector: str, text: str) -> None:
        """Replace the text of a field as by typing."""
        self.value(f"document.querySelector({json.dumps(selector)}).select()")
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, ctrl: bool = False) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, modifiers=2 if ctrl else 0)

    def send(self, task: str) -> None:
        """Send the form of a task and wait for the result."""
        self.value(f"document.querySelector('#{task} .result').replaceChildren()")
        self.click(f"#{task} .go button")
        self.wait_for(f"document.querySelector('#{task} .result').childElementCount && !running.{task}")

    def events(self, method: str) -> list[dict[str, Any]]:
        self.value("1")
        return [event["params"] for event in self._browser.events if event["method"] == method]

    def errors(self) -> list[str]:
        """Errors: exceptions, rejected styles and scripts, and failed requests."""
        thrown = [event["exceptionDetails"] for event in self.events("Runtime.exceptionThrown")]
        logged = [event["entry"] for event in self.events("Log.entryAdded")]
        return [*map(str, thrown), *(entry["text"] for entry in logged if entry["level"] == "error")]

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)
