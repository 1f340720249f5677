"""Rules that the settings of all commands follow."""

import re

import pytest

from penstock.engine.protocol.setting import parse_size, shown_size
from penstock.server.cluster.ray_settings import RayEmbedSettings, RayServeSettings
from penstock.server.settings import (
    BenchSettings,
    EvalSettings,
    ModelSettings,
    ServerSettings,
    UsageError,
    declared_settings,
    environment_variable,
    flag_of,
    load_settings,
    public_values,
)

COMMANDS = [RayServeSettings, RayEmbedSettings, ModelSettings, EvalSettings, BenchSettings]
"""They declare or inherit all settings."""
ZERO_IS_PLAIN = {"load_wait_s", "warm_up", "ttl", "upscale_delay_s", "downscale_delay_s", "replica_gpus"}
"""Numbers that may be 0 although their help text does not explain it."""
MAXIMA = {"PORT": 65_535, "SHARE": 1, "api_workers": 256, "concurrency": 256, "num_threads": 1024}
MAXIMA["max_image_pixels"] = 89_478_485  # Pillow's own limit


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {name for kind in COMMANDS for name in declared_settings(kind)}:
        monkeypatch.delenv(environment_variable(name), raising=False)


@pytest.mark.parametrize("kind", COMMANDS)
def test_numbers_just_outside_their_range_are_rejected(kind: type) -> None:
    for name, declared in declared_settings(kind).items():
        if declared.kind not in (int, float):
            continue
        is_whole, metavar = declared.kind is int, declared.metavar
        step = 1 if is_whole else 1e-9
        lowest = 0 if "0: " in declared.setting.help or name in ZERO_IS_PLAIN else step
        limit = "at least 0" if lowest == 0 else "at least 1" if is_whole and metavar != "SIZE" else "above 0"
        wrong = {lowest - step: limit}
        if (highest := MAXIMA.get(name, MAXIMA.get(metavar))) is not None:
            wrong[highest + step] = f"at most {highest}"
        elif name == "max_queue_s":
            highest = float("inf")
        elif not is_whole:
            wrong |= {float("inf"): "a finite number"}
        for value in (lowest, 10**15 if highest is None else highest):
            load_settings(kind, {"output": "vectors.npy", name: value})
        for value, rule in wrong.items():
            message = rf"^{flag_of(name)}: must be {rule} \(got {re.escape(repr(value))}\)$"
            with pytest.raises(UsageError, match=message):
                load_settings(kind, {"output": "vectors.npy", name: value})


NUMBERS = "must be {}numbers above 0 and below 1000000, such as 1,4,16"
HOSTS = "must be host names; {!r} is none: write cdn.example.org, *.example.org or cdn.example.org:8443"
PATH, URL = "must begin with / and not end with /", "must begin with http:// or https:// and name a host"


@pytest.mark.parametrize(
    ("kind", "name", "rule", "right", "wrong"),
    [
        (BenchSettings, "connections", NUMBERS.format("whole "), ("1", "999999,2"), ("", "0", "1000000", "1.5", "1,x")),
        (BenchSettings, "rate", NUMBERS.format(""), ("0.5", "999999.5,2.5"), (",", "0", "1e6", "1,nan", "x")),
        (RayServeSettings, "allowed_media_domains", HOSTS, ("a.org:1", "*.a.org:65535"), ("a.org:65536", "a.org:x")),
        (RayServeSettings, "root_path", PATH, ("/a", "/a-b/c.~_9"), ("a", "/", "/a/", "//a", "/ä")),
        (RayServeSettings, "otlp_traces_endpoint", URL, ("http://a", "https://a:1/b"), ("a", "http://", "ftp://a")),
    ],
)
def test_texts_follow_the_rule_of_their_setting(
    kind: type, name: str, rule: str, right: tuple[str, ...], wrong: tuple[str, ...]
) -> None:
    for text in right:
        value = public_values(load_settings(kind, {name: text}))[name]
        assert (value if isinstance(value, str) else ",".join(map(str, value))) == text
    for text in wrong:
        with pytest.raises(UsageError) as rejected:
            load_settings(kind, {name: text})
        assert str(rejected.value) == f"{flag_of(name)}: {rule.format(text)} (got {text!r})"


@pytest.mark.parametrize("kind", COMMANDS)
def test_keys_are_never_empty_or_shown(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = declared_settings(kind)
    names = [name for name in declared if re.search("(key|token|secret|password)$", name)]
    assert names == [name for name in declared if declared[name].is_secret]
    for name in names:
        settings = load_settings(kind, {name: "sk-1,sk-2"})
        assert getattr(settings, name) == ("sk-1", "sk-2")
        assert "sk-" not in f"{settings}{public_values(settings)}"
        for value in (["sk-1", 2], b"sk-1", 21):
            with pytest.raises(UsageError, match=f"^penstock.toml: {name}: must be a list of texts$"):
                load_settings(kind, {}, file={name: value}, file_location="penstock.toml: ")
        for text in ("", " ", " , "):
            with pytest.raises(UsageError, match=f"^{flag_of(name)}: has no key"):
                load_settings(kind, {name: [text]})
            monkeypatch.setenv(environment_variable(name), text)
            with pytest.raises(UsageError, match=f"^{environment_variable(name)}: has no key"):
                load_settings(kind, {})
        monkeypatch.delenv(environment_variable(name))


def test_settings_of_python_callers_are_checked() -> None:
    for kind, value in ((ServerSettings, {"max_files": 0}), (EvalSettings, {"texts_per_request": 0})):
        (name,) = value
        with pytest.raises(ValueError, match=rf"^{name} is 0; it must be at least 1\.$"):
            kind(**value)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("2GiB", 2 << 30), ("500MB", 500_000_000), ("1.5k", 1500), ("7", 7), ("8 kib", 8192), ("3b", 3), ("1TB", 10**12)],
)
def test_size_is_parsed_and_shown(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes
    assert parse_size(shown_size(num_bytes)) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 apples", "1e9", "nan"])
def test_invalid_size_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="must be a size such as"):
        parse_size(text)
