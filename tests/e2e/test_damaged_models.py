"""Models with damaged files: alone they end the server with a documented code; beside others they get 503."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

Damage = Callable[[Path], object]


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1_000_000])


def empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def change_shapes(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))


def remove_tokenizer(folder: Path) -> None:
    for file in ("tokenizer.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / file).unlink(missing_ok=True)


def damage_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n")


def empty_config(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"")


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder)


EVERY_DAMAGE = (
    truncate,
    empty,
    remove_weights,
    change_shapes,
    remove_tokenizer,
    damage_tokenizer,
    empty_config,
    remove_folder,
)


@pytest.fixture
def damaged(default_model: Path, tmp_path: Path) -> Callable[[Damage], Path]:
    def copy(damage: Damage) -> Path:
        folder = tmp_path / "damaged"
        shutil.copytree(default_model, folder)
        damage(folder)
        return folder

    return copy


@pytest.mark.slow
@pytest.mark.parametrize("damage", EVERY_DAMAGE)
def test_serve_of_a_damaged_folder_ends_with_code_2(damage: Damage, damaged, run) -> None:
    done = run("serve", str(damaged(damage)), "--port", "0", "--device", "cpu")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("damage", [truncate, empty, empty_config, remove_folder])
def test_info_of_a_damaged_folder_ends_with_code_2(damage: Damage, damaged, run) -> None:
    done = run("info", str(damaged(damage)))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_missing_folder_below_a_local_folder_ends_with_code_2(run, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "mods").mkdir()
    monkeypatch.chdir(tmp_path)
    done = run("serve", "mods/nosuch", "--port", "0")
    assert done.returncode == 2
    assert "There is no folder 'nosuch' in the folder 'mods'" in done.stderr


@pytest.mark.parametrize(("damage", "preload"), [(empty, "true"), (empty_config, "false")])
def test_damaged_model_gets_503_and_others_serve(
    damage: Damage, preload: str, damaged, default_model: Path, launch, tmp_path: Path
) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text(
        f'[[models]]\nmodel = "{damaged(damage)}"\nname = "bad"\npreload = {preload}\n'
        f'[[models]]\nmodel = "{default_model}"\nname = "good"\n'
    )
    server = launch("--config", str(config), "--dtype", "float32")
    answers = [
        httpx.post(f"{server.url}/v1/embeddings", json={"model": name, "input": "A dam."}, timeout=60).status_code
        for name in ("bad", "good", "bad")
    ]
    for path in ("/v1/models", "/metrics", "/health", "/api/tags"):
        assert httpx.get(server.url + path, timeout=60).status_code == 200, path
    server.stop()
    assert answers == [503, 200, 503]
    assert "Traceback" not in server.log.read_text()
