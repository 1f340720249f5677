"""Wrong bodies get a 400 that names the field and the value. test_tei.py has the errors of TEI's routes."""

import httpx
import pytest

from ...tables import cases, table

# [path, body, field, part of the message]
BODIES = table(__file__, "wrong_bodies")


@pytest.mark.parametrize(("path", "body", "param", "part"), BODIES)
async def test_wrong_body_is_400_with_field_and_value(client: httpx.AsyncClient, path, body, param, part) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert part in error["message"]
    assert response.json()["message"] == error["message"]
    if path.endswith("/embed"):  # the message has Cohere's names of fields
        assert " dimensions is" not in error["message"]
        assert "truncate_prompt_tokens" not in error["message"]


@cases(__file__, "path", "body", "different", "same")
async def test_names_of_one_option_must_have_one_value(client: httpx.AsyncClient, path, body, different, same) -> None:
    """`different` and `same` map two names of an option to values; a dot separates the names of nested objects."""

    def with_fields(fields: dict) -> dict:
        sent = dict(body)
        for name, value in fields.items():
            outer, dot, inner = name.partition(".")
            sent[outer] = {inner: value} if dot else value
        return sent

    response = await client.post(path, json=with_fields(different))
    assert response.status_code == (422 if "inputs" in body and path != "/classify" else 400), response.text
    assert all(f"{name} is " in response.json()["message"] for name in different)
    response = await client.post(path, json=with_fields(same))
    assert response.status_code == 200, response.text


@cases(__file__, "path", "body", "field")
async def test_length_of_a_list_is_limited_before_its_entries_are_read(client, path, body, field, monkeypatch) -> None:
    monkeypatch.setattr("penstock.server.schemas.inputs.MAX_ENTRIES", 2)
    response = await client.post(path, json=body)
    assert response.status_code in (400, 422)
    assert f"{field} has 3 entries; no request may have more than 2" in response.text
    assert (await client.post(path, json={**body, field: body[field][:2]})).status_code == 200


@pytest.mark.parametrize("path", ["/embed", "/api/embed"])
async def test_wrong_width_is_rejected_by_other_dialects(client: httpx.AsyncClient, path: str) -> None:
    body = {"inputs" if path == "/embed" else "input": "a", "dimensions": -1}
    response = await client.post(path, json=body)
    assert response.status_code in (400, 422)
    assert "dimensions must be at least 1, not -1." in response.text
