"""API keys in request headers, in settings and in a file that changes at run time; routes without a key."""

import os
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest

from penstock.server.middleware.auth import CHECK_EVERY_S, ApiKeyStore
from penstock.server.settings import UsageError

from ...clock import Clock
from ...tables import cases

KEYS = ("first-key", "second-key")
BODY = {"input": "a"}


@pytest.fixture
async def guarded(serving, engine):
    async with serving(engine, api_key=KEYS) as client:
        yield client


@cases(__file__, "headers")
async def test_key_is_accepted_in_each_header(guarded: httpx.AsyncClient, headers: dict[str, str]) -> None:
    assert (await guarded.post("/v1/embeddings", json=BODY, headers=headers)).status_code == 200


@cases(__file__, "headers")
async def test_wrong_or_missing_key_gets_401(guarded: httpx.AsyncClient, engine, headers: dict[str, str]) -> None:
    for path in ("/v1/embeddings", "/v1/embeddings/", "/rerank", "/score", "/nowhere", "/v1/v1/embeddings"):
        response = await guarded.post(path, json=BODY, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert "first-key" not in response.json()["message"]
    assert not engine.calls


@pytest.mark.parametrize("value", ["", "Bearer None", "Bearer 123", "raw-token", "Bearer "])
async def test_without_keys_headers_are_ignored(client: httpx.AsyncClient, value: str) -> None:
    response = await client.post("/v1/embeddings", json=BODY, headers={"authorization": value})
    assert response.status_code == 200


class TickingClock(Clock):
    def tick(self) -> None:
        self.now_s += CHECK_EVERY_S


def write(file: Path, text: str) -> None:
    """Writes a file with a later modification time than before."""
    before = file.stat().st_mtime_ns if file.exists() else 0
    file.write_text(text)
    os.utime(file, ns=(before + 10**9, before + 10**9))


def accepts(keys: ApiKeyStore, key: str) -> bool:
    return keys.owner_of([key.encode()]) is not None


def test_keys_of_settings_and_file_are_accepted(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\ufeffone\n\n# not-a-key\n  two  \nschlüssel\n", "utf-8")
    keys = ApiKeyStore(("zero",), file)
    assert all(accepts(keys, key) for key in ("zero", "one", "two", "schlüssel"))
    assert not any(accepts(keys, key) for key in ("", "# not-a-key", "not-a-key", "One", "onetwo"))
    assert keys.owner_of([b"wrong", b"two"]) == keys.owner_of([b"two"])


def test_client_id_is_random_unless_processes_share_a_salt() -> None:
    one, other = (ApiKeyStore(("a", "b"), salt=b"shared") for _ in range(2))
    assert one.owner_of([b"a"]) == other.owner_of([b"a"]) != one.owner_of([b"b"])
    assert ApiKeyStore(("a", "b")).owner_of([b"a"]) != ApiKeyStore(("a", "b")).owner_of([b"a"])
    with_known_salt = ApiKeyStore(("one",), salt=bytes(range(32))).owner_of([b"one"])
    assert with_known_salt == "891f78406170883ac48a182168d25fbd", "batches keep their owner after an upgrade"
    alone = ApiKeyStore(("a",))
    assert alone.client_name(alone.owner_of([b"a"])) == ""


def test_owner_is_known_while_its_key_is_valid(tmp_path: Path) -> None:
    clock, file = TickingClock(), tmp_path / "keys"
    write(file, "one\ntwo\n")
    keys = ApiKeyStore((), file, clock_s=clock)
    owner = keys.owner_of([b"one"])
    assert owner
    assert keys.is_valid(owner)
    assert keys.key_id(owner) == "7692c3ad"
    write(file, "two\n")
    clock.tick()
    assert not keys.is_valid(owner)
    assert keys.key_id(owner) is None, "removed keys are forgotten"
    assert keys.is_valid("")
    assert ApiKeyStore(()).is_valid(owner), "without keys every owner is known"


def namespace(keys: ApiKeyStore, key: bytes) -> str:
    owner = keys.owner_of([key])
    assert owner
    return keys.namespace_of(owner)


def test_namespace_depends_on_the_salt_and_is_the_owner_without_one(tmp_path: Path) -> None:
    write(tmp_path / "keys", "two\n")
    salt = bytes(range(32))
    both, alone = ApiKeyStore(("one", "two"), namespace_salt=salt), ApiKeyStore(("one",), namespace_salt=salt)
    from_file = ApiKeyStore(("one",), tmp_path / "keys", namespace_salt=salt, salt=bytes(32))
    assert namespace(both, b"one") == namespace(alone, b"one") == namespace(from_file, b"one")
    assert namespace(both, b"one") == "d013f1a2df7155299e301e223226eb1b", "vectors stay cached after an upgrade"
    assert namespace(both, b"two") == namespace(from_file, b"two") != namespace(both, b"one")
    assert namespace(both, b"one") not in (both.owner_of([b"one"]), alone.owner_of([b"one"]))
    assert namespace(ApiKeyStore(("one",), namespace_salt=bytes(32)), b"one") != namespace(both, b"one")
    keys = ApiKeyStore(("one", "two"))
    assert namespace(keys, b"one") == keys.owner_of([b"one"]) != namespace(keys, b"two")
    assert keys.namespace_of("") == ""


def test_changed_file_is_read_at_the_next_check(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    file, clock = tmp_path / "keys", TickingClock()
    write(file, "old-key\n")
    keys = ApiKeyStore(("given-key",), file, clock_s=clock)
    for text in ("new-key\nother-key\n", "newer-key\n"):
        write(file, text)
        assert not accepts(keys, text.split()[0])
        clock.tick()
        assert all(accepts(keys, key) for key in (*text.split(), "given-key"))
    assert not any(accepts(keys, key) for key in ("old-key", "new-key", "other-key"))
    clock.tick()
    assert accepts(keys, "newer-key")
    assert [message.rpartition(" ")[2] for message in caplog.messages] == ["3", "2"], "read after each change only"
    assert "old-key" not in caplog.text
    assert "new-key" not in caplog.text


@pytest.mark.parametrize("text", ["a-key\nb-key\n", "b-key\n"])
def test_replaced_file_of_the_same_age_is_read(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, other, clock = tmp_path / "keys", tmp_path / "other", TickingClock()
    write(file, "a-key\n")
    keys = ApiKeyStore((), file, clock_s=clock)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", None)  # an unchanged file is not read
        clock.tick()
        assert accepts(keys, "a-key")
    write(other, text)
    other.replace(file)
    clock.tick()
    assert accepts(keys, "b-key")
    assert accepts(keys, "a-key") == ("a-key" in text)


@pytest.mark.parametrize("text", [None, "", "# only this\n"])
def test_invalid_file_keeps_the_keys(text: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    file, clock = tmp_path / "keys", TickingClock()
    write(file, "a-key\n")
    keys = ApiKeyStore((), file, flag="--admin-key-file", clock_s=clock)
    if text is None:
        file.unlink()
    else:
        write(file, text)
    for _ in range(3):
        clock.tick()
        assert accepts(keys, "a-key")
    assert len(caplog.records) == 1  # not at every check
    assert caplog.text.count("--admin-key-file: ") == len(caplog.records)
    assert "the previous keys stay valid" in caplog.text
    write(file, "a-key\nb-key\n")
    os.utime(file, ns=(10**18, 10**18))
    clock.tick()
    assert accepts(keys, "b-key")
    assert "--admin-key-file: read again; valid keys: 2" in caplog.text


def test_changed_file_is_read_again_after_an_error_of_the_disk(tmp_path: Path, monkeypatch, caplog) -> None:
    file, clock = tmp_path / "keys", TickingClock()
    write(file, "a-key\n")
    keys = ApiKeyStore((), file, clock_s=clock)
    write(file, "b-key\nc-key\n")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", Mock(side_effect=OSError(24, "Too many open files")))
        for _ in range(3):
            clock.tick()
            assert accepts(keys, "a-key")
    clock.tick()
    assert not accepts(keys, "a-key")
    assert accepts(keys, "b-key")
    assert caplog.text.count("Too many open files; the previous keys stay valid") == 1


@pytest.mark.parametrize(("content", "part"), [(None, "No such file"), (b"", "no key"), (b"\xff\xfe\x80", "UTF-8")])
def test_file_without_keys_is_a_usage_error(content: bytes | None, part: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=rf"^--api-key-file: .*keys.*{part}"):
        ApiKeyStore(("given",), file)


def test_world_writable_file_is_rejected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, clock = tmp_path / "keys", TickingClock()
    write(file, "a-key\n")
    file.chmod(0o666)
    with pytest.raises(UsageError, match="keys may be written by every user of the machine; run chmod o-w on it"):
        ApiKeyStore((), file)
    file.chmod(0o664)
    keys = ApiKeyStore((), file, clock_s=clock)
    write(file, "b-key\n")
    file.chmod(0o646)
    clock.tick()
    assert accepts(keys, "a-key")
    assert not accepts(keys, "b-key")
    assert "the previous keys stay valid" in caplog.text
    file.chmod(0o644)
    clock.tick()
    assert accepts(keys, "b-key")
    assert not accepts(keys, "a-key")


async def test_more_than_two_keys_are_rejected_with_the_reason(serving, engine) -> None:
    async with serving(engine, api_key=("one", "two")) as client:
        twice = [("authorization", "Bearer wrong"), ("api-key", "two")]
        assert (await client.post("/v1/embeddings", json=BODY, headers=twice)).status_code == 200
        rejected = await client.post("/v1/embeddings", json=BODY, headers=[*twice, ("api-key", "one")])
        assert rejected.status_code == 401
        assert "more than 2 headers with an API key; send one" in rejected.json()["message"]
        wrong = [("authorization", "Bearer wrong"), ("api-key", "other")]
        rejected = await client.post("/v1/embeddings", json=BODY, headers=wrong)
        assert "The API key is missing or wrong" in rejected.json()["message"]


def test_reload_reads_an_unchanged_file_and_keeps_keys_of_a_bad_one(tmp_path: Path, caplog) -> None:
    caplog.set_level("INFO")
    file = tmp_path / "keys"
    file.write_text("a-key\n")
    keys = ApiKeyStore((), file, clock_s=Clock())
    keys.reload()
    assert caplog.messages == ["--api-key-file: read again; valid keys: 1"]
    file.unlink()
    for _ in range(2):
        keys.reload()
        assert keys.owner_of([b"a-key"]) is not None
    assert sum("the previous keys stay valid" in message for message in caplog.messages) == 2
