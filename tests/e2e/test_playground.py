"""The playground in a headless Chromium, driven over the DevTools protocol, against the default model."""

import json
import shutil
import subprocess
import sys

import pytest

from penstock.server.schemas.classify import TokenClassifyResponse
from penstock.server.schemas.openai import ModelList

from .browser import Page

READY = "document.querySelector('#status')?.className === 'ready' && cards.size"

ON_CONTRAST = """(() => {
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = (color) => {
    pen.fillStyle = color;
    pen.fillRect(0, 0, 1, 1);
    const parts = [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3).map((v) => v / 255);
    const [r, g, b] = parts.map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    const color = getComputedStyle(node).backgroundColor;
    return /[,/] 0\\)$/.test(color) && node.parentElement ? ground(node.parentElement) : color;
  };
  const faint = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].filter((child) => child.nodeType === 3 && child.data.trim());
    if (!own.length || !node.checkVisibility() || ["SCRIPT", "OPTION"].includes(node.tagName)) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(ground(node))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) faint.push([own[0].data.trim().slice(0, 30), (a + 0.05) / (b + 0.05)]);
  }
  return faint;
})()"""


def stub(page: Page, answers: dict[str, tuple[int, object]]) -> None:
    """Let the page find these answers at their paths; what it sends is kept in `window.calls`. Status 0 is never."""
    page.call(
        "Page.addScriptToEvaluateOnNewDocument",
        source=f"""
            const answers = {json.dumps(answers)}, ask = window.fetch;
            window.calls = [];
            window.fetch = (url, options) => {{
                const answer = answers[new URL(url).pathname];
                if (!answer) return ask(url, options);
                window.calls.push({{ url, ...options, signal: null }});
                if (!answer[0]) return new Promise((_, fail) => {{
                    options.signal.addEventListener("abort", () => fail(options.signal.reason));
                }});
                return Promise.resolve(new Response(JSON.stringify(answer[1]), {{ status: answer[0] }}));
            }};""",
    )


def models(*endpoints: str) -> dict[str, tuple[int, object]]:
    card = {"id": "m", "object": "model", "created": 0, "owned_by": "", "max_model_len": 1, "name": "m"}
    card |= {"endpoints": list(endpoints), "context_length": 1}
    return {
        "/v1/models": (200, ModelList.model_validate({"object": "list", "data": [card], "models": []}).model_dump())
    }


def test_embed(page: Page, server) -> None:
    page.open(server.url, READY)
    assert page.text("#status") == "ready"
    assert page.value("document.querySelector('#model').value").endswith("all-MiniLM-L6-v2")
    page.fill("#embed-texts", "A dam.\n\n  A weir. \n<img src=x onerror=alert(1)>")
    page.press("Enter", ctrl=True)
    page.wait_for("!!document.querySelector('#embed .facts')")
    assert page.text("#embed .facts").startswith("3 texts · 384 numbers each · ")
    assert page.texts("#embed .heat .one-line") == ["A dam.", "A weir.", "<img src=x onerror=alert(1)>"]
    cells = page.texts("#embed td")
    assert [cells[0], cells[4], cells[8]] == ["1.00"] * 3
    assert float(cells[1]) > float(cells[2])
    colors = "new Set(new Uint32Array(document.querySelector('#embed canvas').getContext('2d')"
    assert page.value(f"{colors}.getImageData(0, 0, 384, 1).data.buffer)).size") > 50
    page.value("document.querySelector('.heat').focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.press(key)
    assert page.text(".legend output").startswith("text 2, number 2 of 384: ")
    own = [event["request"]["url"] for event in page.events("Network.requestWillBeSent")]
    assert own
    assert [url for url in own if not url.startswith((server.url, "data:"))] == []
    assert page.complaints() == []


def test_rerank_and_classify(page: Page, server) -> None:
    page.open(f"{server.url}/#rerank", READY)
    assert page.texts("[role=tab][aria-selected=true]") == ["Rerank"]
    page.send("rerank")
    assert page.texts("#rerank .text")[0] == "The dam holds back the water of the valley."
    scores = [float(text) for text in page.texts("#rerank .score")]
    assert scores == sorted(scores, reverse=True)
    widths = page.value("[...document.querySelectorAll('#rerank .fill')].map((node) => node.clientWidth)")
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > 0
    page.value("document.querySelector('#rerank-tab').focus()")
    page.press("ArrowRight")
    assert page.value("document.activeElement.id") == "classify-tab"
    assert page.value("document.querySelector('#request').hidden")
    page.send("classify")
    assert page.texts("#classify .card .bars li:first-child .text") == ["banking", "cinema", "sport"]
    assert page.complaints() == []


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_what_was_sent_can_be_sent_again(page: Page, server) -> None:
    page.open(server.url, READY)
    query = "It's a \"dam\", \\ isn't it? $HOME `id` \u2028 \U0001f30a"
    page.click("#rerank-tab")
    page.fill("#rerank-query", query)
    page.fill("#rerank-documents", "Don't.\nC:\\dam\n\U0001f30a")
    page.send("rerank")
    page.click("[data-view=answer]")
    results = json.loads(page.value("document.querySelector('#code').textContent"))["results"]
    page.click("[data-view=curl]")
    command = page.value("document.querySelector('#code').textContent")
    shown = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout
    assert json.loads(shown)["results"] == results
    page.click("[data-view=python]")
    program = page.value("document.querySelector('#code').textContent") + "\nassert 'results' in response.json()"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert repr(results) in shown


def test_a_server_with_keys(page: Page, server) -> None:
    stub(page, {"/v1/embeddings": (401, {"message": "The API key is missing or wrong."})})
    page.open(server.url, READY)
    page.fill("#key", "secret-key")
    page.value("document.querySelector('#embed-texts').focus()")
    page.send("embed")
    assert page.text("#embed [role=alert]").split("\n")[:2] == ["Refused with 401", "The API key is missing or wrong."]
    assert page.value("document.activeElement.id") == "key"
    assert page.value("window.calls[0].headers.Authorization") == "Bearer secret-key"
    for view, variable in (("curl", "$PENSTOCK_API_KEY"), ("python", "os.environ['PENSTOCK_API_KEY']")):
        page.click(f"[data-view={view}]")
        assert variable in page.text("#code")
        assert "secret-key" not in page.value("document.body.innerText")


def test_an_error_of_the_server(page: Page, server) -> None:
    page.open(server.url, READY)
    page.fill("#embed-texts", "a " * 600)
    page.send("embed")
    alert = page.text("#embed [role=alert]")
    assert alert.startswith("Refused with 400\n")
    assert "truncate_prompt_tokens" in alert
    assert "\nrequest " in alert


def test_a_request_can_be_stopped(page: Page, server) -> None:
    stub(page, {"/v1/embeddings": (0, None)})
    page.open(server.url, READY)
    page.click("#embed .go button")
    assert page.wait_for("running.embed && document.querySelector('#embed .go button').innerText") == "Stop"
    page.click("#embed .go button")
    page.wait_for("!running.embed")
    assert page.text("#embed [role=alert]").startswith("Stopped\n")
    assert page.text("#embed .go button") == "Embed"


def test_a_server_that_starts_and_goes(page: Page, server) -> None:
    stub(page, {"/health/ready": (503, {"status": "unavailable", "engines": {}})})
    page.call("Page.navigate", url=server.url)
    page.wait_for("document.querySelector('#status')?.innerText === 'starting'")
    assert page.value("document.querySelector('#model').length") == 0
    page.value("delete answers['/health/ready']")
    page.wait_for("document.querySelector('#status').innerText === 'ready'")
    assert page.value("document.querySelector('#model').length") > 0
    page.value("void (answers['/health/ready'] = [200, null], watch())")
    page.wait_for("document.querySelector('#status').innerText === 'cannot be reached'")


def test_a_token_classifier(page: Page, server) -> None:
    tokens = [("Ada", "B-PER", 0.99), ("sleeps", "O", 0.98)]
    row = {
        "index": 0,
        "tokens": [{"token": t, "token_id": 7, "label": k, "score": s, "probs": [s]} for t, k, s in tokens],
        "num_classes": 2,
    }
    answer = {"id": "", "object": "list", "created": 0, "model": "m", "labels": ["O", "B-PER"], "data": [row]}
    answer["usage"] = {"prompt_tokens": 4, "total_tokens": 4}
    TokenClassifyResponse.model_validate(answer)
    stub(page, {**models(), "/v1/classify": (200, answer)})
    page.open(server.url, READY)
    assert page.value("[...document.querySelectorAll('[role=tab]')].map((tab) => tab.hidden)") == [True, True, False]
    page.fill("#classify-texts", "Ada sleeps")
    page.send("classify")
    assert json.loads(page.value("window.calls.at(-1).body")) == {"model": "m", "input": ["Ada sleeps"]}
    assert page.texts("#classify .tokens > span") == ["AdaB-PER", "sleeps"]


def test_a_reranker_has_classes_of_its_own(page: Page, server) -> None:
    stub(page, models("rerank", "classify"))
    page.open(server.url, READY)
    assert page.value("[...document.querySelectorAll('[role=tab]')].map((tab) => tab.hidden)") == [True, False, False]
    assert page.texts("[role=tab][aria-selected=true]") == ["Rerank"]
    assert page.value("document.querySelector('#classify-own').hidden")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read_and_every_control_has_a_name(page: Page, server, scheme: str) -> None:
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    page.open(server.url, READY)
    assert page.value("localStorage.clear()") is None
    for task in ("embed", "rerank", "classify"):
        page.click(f"#{task}-tab")
        page.send(task)
        assert page.value(ON_CONTRAST) == []
        nodes = page.call("Accessibility.getFullAXTree")["nodes"]
        controls = {"button", "combobox", "link", "searchbox", "tab", "table", "tabpanel", "textbox"}
        found = [(n["role"]["value"], n.get("name", {}).get("value")) for n in nodes if "role" in n]
        assert {role for role, _ in found} >= {"button", "combobox", "link", "tab", "tabpanel", "textbox"}
        assert [role for role, name in found if role in controls and not name] == []
    ground = "getComputedStyle(document.body).backgroundColor"
    before = page.value(ground)
    page.click("#theme")
    assert page.value(ground) != before
    assert page.value(ON_CONTRAST) == []
    page.click("#theme")
    assert page.value(ground) == before


def test_it_fits_a_phone(page: Page, server) -> None:
    page.call("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2, mobile=True)
    page.open(server.url, READY)
    for task in ("embed", "rerank", "classify"):
        page.click(f"#{task}-tab")
        page.send(task)
        assert page.value("document.documentElement.scrollWidth") <= 360
