"""/docs in a headless Chromium without a network."""

import httpx

from .browser import Page

SHOWN = "document.querySelectorAll('.opblock').length"
OPERATION = "#operations-openai-v1_embeddings"


def test_docs_show_every_route_and_use_no_other_host(page: Page, server, http: httpx.Client) -> None:
    page.open(f"{server.url}/docs", SHOWN)
    paths = page.texts(".opblock .opblock-summary-path")
    assert {path.replace("\u200b", "") for path in paths} == set(http.get("/openapi.json").json()["paths"])
    urls = [event["request"]["url"] for event in page.events("Network.requestWillBeSent")]
    assert len(urls) >= 4
    assert not [url for url in urls if not url.startswith((server.url, "data:"))]
    assert not page.errors()


def test_example_can_be_sent(page: Page, server) -> None:
    page.open(f"{server.url}/docs/", SHOWN)
    page.click(f"{OPERATION} .opblock-summary-control")
    page.wait_for(f"!!document.querySelector('{OPERATION} .execute')")
    page.click(f"{OPERATION} .execute")
    page.wait_for(f"!!document.querySelector('{OPERATION} .live-responses-table .response-col_status')")
    assert page.text(f"{OPERATION} .live-responses-table .response .response-col_status").startswith("200")
    assert f"{server.url}/v1/embeddings" in page.text(f"{OPERATION} .curl-command")
    assert not page.errors()
