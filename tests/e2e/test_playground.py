"""The playground in a headless Chromium with the default model."""

import base64
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.server.routes.encode import EncodeResponse
from penstock.server.routes.models import ModelList

from .browser import Page

READY = "document.querySelector('#status')?.className === 'ready' && cards.size"
TASKS = ("embed", "rerank", "score", "classify", "multi", "tokenize")
"""Tasks of the default model."""
LIST = {"id": "", "object": "list", "created": 0, "model": "m", "usage": {"prompt_tokens": 4, "total_tokens": 4}}
"""Fields of a response."""
FIELDS = json.loads(Path(__file__).with_name("playground.json").read_text("utf-8"))
"""Fields of a model of /v1/models, and of its facts."""


def stub(page: Page, answers: dict[str, tuple[int, object]]) -> None:
    """Answer requests of the page by path, and record them in `window.calls`. Status 0 means no answer.

    The page counts tokens whenever a text has not changed for a while: these requests are answered and not recorded.
    """
    answers = {"/tokenize": (200, [[1]]), **answers}
    page.call(
        "Page.addScriptToEvaluateOnNewDocument",
        source=f"""
            const answers = {json.dumps(answers)}, fetchReally = window.fetch;
            window.calls = [];
            window.fetch = (url, options) => {{
                const path = new URL(url).pathname, answer = answers[path];
                if (!answer) return fetchReally(url, options);
                if (path !== "/tokenize") window.calls.push({{ url, ...options, signal: null }});
                if (!answer[0]) return new Promise((_, fail) => {{
                    options.signal.addEventListener("abort", () => fail(options.signal.reason));
                }});
                return Promise.resolve(new Response(JSON.stringify(answer[1]), {{ status: answer[0] }}));
            }};""",
    )


def card(**values: Any) -> dict[str, Any]:
    """A model of /v1/models."""
    card = FIELDS["card"] | values
    return ModelList.model_validate({"object": "list", "data": [card], "models": []}).model_dump(mode="json")


def models(kind: str, tasks: tuple[str, ...], outputs: tuple[str, ...] = (), **facts: Any) -> dict[str, Any]:
    """The response of /v1/models for one model of a kind."""
    own = FIELDS["facts"] | {"kind": kind, "tasks": list(tasks), "outputs": list(outputs), **facts}
    status = {"value": "loaded", "state": "ready"}
    return {"/v1/models": (200, card(max_model_len=9, context_length=9, facts=own, status=status))}


def disabled(page: Page) -> list[str]:
    return page.texts("[role=tab][aria-disabled=true]")


def chosen(page: Page) -> list[str]:
    return page.texts("[role=tab][aria-selected=true]")


def test_embed_shows_similarities_and_vectors(page: Page, server) -> None:
    page.open(server.url, READY)
    assert page.text("#status") == "ready"
    assert page.value("document.querySelector('#model').value").endswith("all-MiniLM-L6-v2")
    page.fill("#embed-texts", "A dam.\nA weir.\n<img src=x onerror=alert(1)>")
    page.press("Enter", ctrl=True)
    page.wait_for("!!document.querySelector('#embed .facts')")
    assert page.text("#embed .facts").startswith("3 texts · 384 numbers each · ")
    assert page.texts("#embed .heat .one-line") == ["A dam.", "A weir.", "<img src=x onerror=alert(1)>"]
    cells = page.texts("#embed td")
    assert [cells[0], cells[4], cells[8]] == [""] * 3
    assert float(cells[1]) > float(cells[2])
    assert page.texts("#embed .pair .one-line")[:2] == ["1 A dam.", "2 A weir."]
    page.value("document.querySelector('.heat').focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.press(key)
    assert page.text(".heat + .legend output").startswith("text 2, number 2 of 384: ")
    own = [event["request"]["url"] for event in page.events("Network.requestWillBeSent")]
    assert own
    assert [url for url in own if not url.startswith((server.url, "data:"))] == []
    assert page.errors() == []


def test_lines_or_paragraphs_are_counted(page: Page, server) -> None:
    page.open(server.url, READY)
    line = "document.querySelector('#embed-texts + .count').textContent"
    page.fill("#embed-texts", "A dam.\nA weir.\n")
    page.wait_for(f"{line} === '2 texts · 10 tokens, the longest text 5 of 256'")
    page.fill("#embed-texts", "A dam.\nA weir.\n \n\nA gate.")
    page.wait_for(f"{line} === '2 texts · 13 tokens, the longest text 8 of 256'")
    page.fill("#embed-texts", "a " * 300)
    page.wait_for(f"{line} === '1 text · 302 tokens, the longest text 302 of 256'")
    assert page.value("document.querySelector('#embed-texts + .count').className") == "count over"
    page.fill("#embed-texts", "A dam.\nIt holds.\n\nA gate.")
    page.send("embed")
    page.click("[data-view=answer]")
    assert len(json.loads(page.value("code"))["data"]) == 2


def test_long_text_is_rejected_or_cut(page: Page, server) -> None:
    page.open(server.url, READY)
    page.fill("#embed-texts", "a " * 300)
    page.send("embed")
    alert = page.text("#embed [role=alert]")
    assert alert.startswith("Status 400\n")
    assert "truncate_prompt_tokens" in alert
    assert "\nrequest " in alert
    page.value("document.querySelector('#embed-cut').value = 'END'")
    page.send("embed")
    assert "256 tokens" in page.text("#embed .facts")
    page.fill("#embed-limit", "10")
    page.send("embed")
    assert "10 tokens" in page.text("#embed .facts")
    assert page.value("document.querySelector('#embed-dimensions').disabled")
    assert "Matryoshka" in page.text("#widths-hint")


def test_rerank_score_and_classify_show_sorted_bars(page: Page, server) -> None:
    page.open(f"{server.url}/#rerank", READY)
    assert chosen(page) == ["Rerank"]
    page.send("rerank")
    assert page.texts("#rerank .text")[0] == "Refunds are paid within five days of receiving the returned goods."
    scores = [float(text) for text in page.texts("#rerank .score")]
    assert scores == sorted(scores, reverse=True)
    page.value("document.querySelector('#rerank-tab').focus()")
    page.press("ArrowRight")
    assert page.value("document.activeElement.id") == "score-tab"
    assert page.value("document.querySelector('#request').hidden")
    page.send("score")
    assert sorted(map(float, page.texts("#score .score")), reverse=True) == pytest.approx(scores, abs=2e-4)
    page.fill("#score-left", "a\nb")
    page.send("score")
    assert page.text("#score [role=alert]").startswith("Status 400\n")
    page.click("#classify-tab")
    page.send("classify")
    assert page.texts("#classify .card .bars li:first-child .text") == ["banking", "cinema", "sport"]
    assert [text for text in page.errors() if "status of 400" not in text] == []


def test_multi_vector_and_tokenize_show_tokens(page: Page, server) -> None:
    page.open(server.url, READY)
    page.click("#multi-tab")
    page.fill("#multi-query", "dam")
    page.fill("#multi-documents", "a song\na dam")
    page.send("multi")
    assert page.texts("#multi .bars .text") == ["a dam", "a song"]
    assert page.texts("#multi .pairs td:nth-child(1)") == ["[CLS]", "dam", "[SEP]"]
    assert page.texts("#multi .pairs td:nth-child(2)")[1] == "dam"
    found = [float(text) for text in page.texts("#multi .pairs td:nth-child(3)")]
    assert sum(found) == pytest.approx(float(page.texts("#multi .score")[0]), abs=2e-3)
    page.click("#tokenize-tab")
    page.fill("#tokenize-texts", "A penstock.")
    page.send("tokenize")
    pieces = page.value("[...document.querySelectorAll('.pieces span')].map((node) => node.firstChild.data)")
    assert (pieces[0], "".join(pieces[1:-1]), pieces[-1]) == ("[CLS]", "Apenstock.", "[SEP]")
    assert page.errors() == []


def test_sparse_vectors_show_words_and_weights(page: Page, server) -> None:
    rows = [([5, 9], [0.5, 1.5]), ([9, 30000], [2.0, 0.25])]
    data = [
        {"object": "encoding", "index": i, "sparse": {"indices": indices, "values": values}}
        for i, (indices, values) in enumerate(rows)
    ]
    answer = {**LIST, "data": data}
    EncodeResponse.model_validate(answer)
    stub(
        page,
        {
            **models("embedding", ("sparse_embed", "score"), ("sparse",)),
            "/v1/encode": (200, answer),
            "/decode": (200, ["dam", "<b>", "weir"]),
        },
    )
    page.open(server.url, READY)
    assert chosen(page) == ["Sparse"]
    assert disabled(page) == ["Embed", "Classify", "Multi-vector"]
    page.click("#embed-tab")
    assert chosen(page) == ["Sparse"]
    page.fill("#sparse-texts", "one\ntwo")
    page.send("sparse")
    assert page.texts("#sparse td") == ["", "3.00", "3.00", ""]
    assert page.texts("#sparse .weight") == ["dam1.50", "<b>0.50", "dam2.00", "weir0.25"]
    calls = [json.loads(call["body"]) for call in page.value("window.calls") if call.get("body")]
    assert calls[-1]["ids"] == [[9], [5], [30000]]
    assert calls[-2] == {"model": "m", "input": ["one", "two"], "outputs": ["sparse"]}


def test_images_are_compared_with_texts(page: Page, server) -> None:
    rows = [[1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [0.96, 0.28]]
    data = [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)]
    own = models("embedding", ("embed", "score"), ("dense",), modalities=["text", "image"])
    ranks = [{"index": index, "relevance_score": score} for index, score in ((1, 0.9), (0, 0.1))]
    stub(page, {**own, "/v1/embeddings": (200, {**LIST, "data": data}), "/v2/rerank": (200, {"results": ranks})})
    page.open(server.url, READY)
    add = """(async (task, kind, names) => {
        const canvas = Object.assign(document.createElement("canvas"), { width: 400, height: 20 });
        const blob = await new Promise((done) => canvas.toBlob(done)), transfer = new DataTransfer();
        for (const name of names) transfer.items.add(new File([blob], name, { type: "image/png" }));
        transfer.items.add(new File(["text"], "notes.txt", { type: "text/plain" }));
        const options = { bubbles: true, cancelable: true, dataTransfer: transfer, clipboardData: transfer };
        const field = document.querySelector(`#${task} textarea`);
        field.dispatchEvent(kind === "drop" ? new DragEvent(kind, options) : new ClipboardEvent(kind, options));
        return (await new Response(blob).bytes()).toString();
    })"""
    page.fill("#embed-texts", "A dam.\nA weir.")
    page.value(f"{add}('embed', 'drop', ['a.png', 'b.png', 'c.png'])")
    page.wait_for("document.querySelectorAll('#embed .thumbs img').length === 3")
    page.click("#embed [aria-label='Remove b.png']")
    assert page.texts("#embed .thumbs .one-line") == ["a.png", "c.png"]
    page.send("embed")
    assert page.text("#embed .facts").startswith("2 texts · 2 images · 2 numbers each")
    assert page.texts("#embed .matrix td") == ["0.60", "0.96", "0.80", "0.28"]
    assert page.texts("#embed .pair .one-line")[:2] == ["1 A dam.", "4 c.png"]
    assert page.texts("#embed .heat .one-line") == ["A dam.", "A weir.", "a.png", "c.png"]
    sent = json.loads(page.value("window.calls.at(-1).body"))["input"]
    assert sent[:2] == ["A dam.", "A weir."]
    assert [list(item) for item in sent[2:]] == [["image"], ["image"]]
    assert sent[2]["image"].startswith("data:image/png;base64,iVBOR")
    assert '"image": "data:image/png;base64,<base64 of a.png>"' in page.text("#code")

    page.click("#rerank-tab")
    page.fill("#rerank-documents", " ")
    page.value(f"{add}('rerank', 'paste', ['a.png', 'b.png'])")
    page.wait_for("document.querySelectorAll('#rerank .thumbs img').length === 2")
    page.send("rerank")
    assert page.texts("#rerank .text") == ["b.png", "a.png"]
    assert page.errors() == []
    page.value("void (facts().modalities = ['text'], offer())")
    assert page.value("document.querySelector('#rerank .images').hidden")
    assert page.value("document.querySelector('#rerank-documents').required")


def test_query_tokens_are_shown_on_a_page(page: Page, server) -> None:
    # The query and the page get the same response. Its last four vectors belong to patches.
    rows = np.array([[1, 0], [0.6, 0.8], [0.8, 0.6], [0, 1], [1, 0]], "<f4")
    row = {"object": "encoding", "index": 0, "token_ids": [8, 7, 7, 7, 7]}
    row |= {"multi_vector": base64.b64encode(rows.tobytes()).decode()}
    row |= {"patches": {"rows": 2, "columns": 2, "vectors": [4, 2, 3, 1]}}
    answers = {"/v1/encode": (200, {**LIST, "data": [row]}), "/decode": (200, ["<page>", "dam"])}
    own = models("embedding", ("token_embed", "score"), ("multi_vector",), modalities=["text", "image"])
    stub(page, {**own, **answers})
    page.open(server.url, READY)
    page.click("#multi-tab")
    page.fill("#multi-query", "dam")
    page.fill("#multi-documents", "")
    page.value("""(async () => {
        const canvas = Object.assign(document.createElement("canvas"), { width: 80, height: 40 });
        const blob = await new Promise((done) => canvas.toBlob(done));
        await addImages("multi", [new File([blob], "report.png", { type: "image/png" })]);
    })()""")
    page.send("multi")
    assert page.text("#multi .facts").startswith("5 query vectors · 1 image")
    assert page.texts("#multi .chips button")[0] == "All tokens"
    shown = "document.querySelector('#multi .page canvas')"
    opacity = f"[...{shown}.getContext('2d').getImageData(0, 0, 2, 2).data].filter((_, i) => i % 4 === 3).join()"
    page.click("#multi .chips button:nth-child(2)")
    assert page.texts("#multi .chips [aria-pressed=true]") == page.texts("#multi .chips button:nth-child(2)")
    assert page.value(opacity) == "200,160,0,120"
    page.value("document.querySelector('#multi .page').focus()")
    page.press("ArrowRight")
    page.press("ArrowRight")
    page.press("ArrowDown")
    assert page.text("#multi .legend output") == "row 2, column 2: 0.6000"
    page.click("#multi .folds details details summary")
    page.wait_for("document.querySelectorAll('#multi .pairs tbody tr').length > 1")
    assert page.texts("#multi .pairs tbody tr:nth-child(2) td")[1] == "row 2, column 2"
    assert page.errors() == []
    page.value("void (facts().outputs = ['dense'], offer())")
    assert page.value("document.querySelector('#multi .images').hidden")


def test_images_added_together_are_kept_beside_unreadable_ones(page: Page, server) -> None:
    stub(page, models("embedding", ("embed",), ("dense",), modalities=["text", "image"]))
    page.open(server.url, READY)
    page.value("""(() => {
        const type = "image/png", file = (name) => new File(["data"], name, { type });
        const lost = { name: "gone.png", type };  // The browser rejects an object that is not a file.
        return Promise.all([addImages("embed", [file("a.png"), lost]), addImages("embed", [file("b.png")])]);
    })()""")
    assert sorted(page.texts("#embed .thumbs .one-line")) == ["a.png", "b.png"]
    assert page.text("#embed .images [role=alert]") == "Not added\nThe browser cannot read gone.png."
    page.value("addImages('embed', [])")
    assert page.texts("#embed .images [role=alert]") == []


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl: apt-get install curl")
def test_shown_commands_repeat_the_request(page: Page, server) -> None:
    def output_of(program: str) -> str:
        code = page.value("document.querySelector('#code').textContent")
        return subprocess.run([program, "-c", code], capture_output=True, text=True, check=True).stdout

    page.open(server.url, READY)
    query = "It's a \"dam\", \\ isn't it? $HOME `id` \u2028 \U0001f30a"
    page.click("#rerank-tab")
    page.fill("#rerank-query", query)
    page.fill("#rerank-documents", "Don't.\nC:\\dam\n\U0001f30a")
    page.send("rerank")
    page.click("[data-view=answer]")
    results = json.loads(page.value("document.querySelector('#code').textContent"))["results"]
    page.click("[data-view=curl]")
    assert json.loads(output_of("sh"))["results"] == results
    page.click("[data-view=python]")
    assert repr(results) in output_of(sys.executable)
    page.click("#embed-tab")
    page.fill("#embed-texts", query)
    page.value("document.querySelector('#embed-cut').value = 'END'")
    page.send("embed")
    assert "client.embeddings.create(" in page.text("#code")
    assert output_of(sys.executable).startswith("0 384 [")


def test_api_key_is_sent_and_not_shown(page: Page, server) -> None:
    stub(page, {"/v1/embeddings": (401, {"message": "The API key is missing or wrong."})})
    page.open(server.url, READY)
    page.fill("#key", "secret-key")
    page.value("document.querySelector('#embed-texts').focus()")
    page.send("embed")
    assert page.text("#embed [role=alert]").split("\n")[:2] == ["Status 401", "The API key is missing or wrong."]
    assert page.value("document.activeElement.id") == "key"
    assert page.value("window.calls[0].headers.Authorization") == "Bearer secret-key"
    for view, variable in (("curl", "$PENSTOCK_API_KEY"), ("python", 'os.environ["PENSTOCK_API_KEY"]')):
        page.click(f"[data-view={view}]")
        assert variable in page.text("#code")
        assert "secret-key" not in page.value("document.body.innerText")


def test_request_can_be_stopped(page: Page, server) -> None:
    stub(page, {"/v1/embeddings": (0, None)})
    page.open(server.url, READY)
    page.click("#embed .go button")
    assert page.wait_for("running.embed && document.querySelector('#embed .go button').innerText") == "Stop"
    page.click("#embed .go button")
    page.wait_for("!running.embed")
    assert page.text("#embed [role=alert]").startswith("Stopped\n")
    assert page.text("#embed .go button") == "Embed"


def test_status_follows_the_server(page: Page, server) -> None:
    stub(page, {"/health/ready": (503, {"status": "unavailable", "engines": {}})})
    page.call("Page.navigate", url=server.url)
    page.wait_for("document.querySelector('#status')?.innerText === 'starting'")
    assert page.value("document.querySelector('#model').length") == 0
    page.value("delete answers['/health/ready']")
    page.wait_for("document.querySelector('#status').innerText === 'ready'")
    assert page.value("document.querySelector('#model').length") > 0
    page.value("void (answers['/health/ready'] = [200, null], watch())")
    page.wait_for("document.querySelector('#status').innerText === 'cannot be reached'")


def test_prompts_and_dimensions_are_sent(page: Page, server) -> None:
    prompts = {"query": "Find <b>this</b>: ", "document": ""}
    facts = {"prompts": prompts, "default_prompt_name": "document", "matryoshka_dimensions": [2, 4]}
    row = {"object": "embedding", "index": 0, "embedding": [0.6, 0.8]}
    answer = (200, {**LIST, "data": [row]})
    stub(page, {**models("embedding", ("embed", "score"), ("dense",), **facts), "/v1/embeddings": answer})
    page.open(server.url, READY)
    shown = dict(zip(page.texts("#facts dt"), page.texts("#facts dd"), strict=True))
    assert (shown["Dimensions"], shown["Longest input"]) == ("8, or 2, 4", "9 tokens")
    page.click("#facts summary")
    page.wait_for("document.querySelectorAll('#facts q').length === 2")
    assert page.value("document.querySelector('#facts q').textContent") == "Find <b>this</b>: "
    assert page.texts("#embed-prompt option") == ["default (document)", "query", "document"]
    page.value("document.querySelector('#embed-prompt').value = 'query'")
    page.fill("#embed-dimensions", "2")
    page.fill("#embed-texts", "a")
    page.send("embed")
    sent = [json.loads(call["body"]) for call in page.value("window.calls") if "/v1/embeddings" in call["url"]]
    assert sent == [{"model": "m", "input": ["a"], "prompt_name": "query", "dimensions": 2}]
    page.click("[data-view=python]")
    assert 'extra_body={\n        "prompt_name": "query",\n    },' in page.text("#code")


def test_controls_have_names(page: Page, server) -> None:
    page.open(server.url, READY)
    controls = {"button", "combobox", "link", "searchbox", "tab", "table", "tabpanel", "textbox"}
    for task in TASKS:
        page.click(f"#{task}-tab")
        page.send(task)
        nodes = page.call("Accessibility.getFullAXTree")["nodes"]
        found = [(n["role"]["value"], n.get("name", {}).get("value")) for n in nodes if "role" in n]
        assert {role for role, _ in found} >= {"button", "combobox", "link", "tab", "tabpanel", "textbox"}
        assert [role for role, name in found if role in controls and not name] == []


def test_page_fits_a_phone(page: Page, server) -> None:
    page.call("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2, mobile=True)
    page.open(server.url, READY)
    for task in TASKS:
        page.click(f"#{task}-tab")
        page.send(task)
        assert page.value("document.documentElement.scrollWidth") <= 360, task
        inside = "[...document.querySelectorAll('.panel')].every((node) => node.scrollWidth <= node.clientWidth + 1)"
        assert page.value(inside), task
