"""Language models that read images: results of the engine equal transformers, in every batch."""

import base64
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb

from penstock.engine import LLM
from penstock.engine.async_engine import AsyncEngine, RequestOptions
from penstock.engine.executors.torch.transformers import model as transformers_model
from penstock.engine.images.decoding import decode
from penstock.engine.images.image_file import ImageLimits, read_image_file
from penstock.engine.images.values import file_of
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import InvalidRequestError, RequestTooLongError
from penstock.engine.protocol.images import ImageInput, MixedInput
from penstock.engine.protocol.params import PoolingParams, TextOrImage
from penstock.engine.protocol.tasks import PoolingTask

from ..random_models import PAGE_MODELS, save_embedding_gemma2_model, save_page_model, save_qwen3_vl_model
from .images.pictures import encoded, picture

pytestmark = pytest.mark.filterwarnings("ignore")
TOLERANCE = 1e-4
PARAMS = PoolingParams()
IMAGE_TEXT = "<|vision_start|><|image_pad|><|vision_end|>"
NUMBERS = np.random.default_rng(0)
IMAGES = [Image.fromarray(NUMBERS.integers(0, 255, (*size, 3), dtype=np.uint8)) for size in ((30, 21), (61, 17))]


def sent(image: Image.Image) -> ImageInput:
    return ImageInput(encoded(image, "PNG"))


async def start(folder: Path, **fields: Any) -> AsyncEngine:
    return await AsyncEngine.start(
        EngineConfig(model=str(folder), in_process=True, num_threads=1, dtype="float32", device="cpu", **fields)
    )


async def test_qwen3_vl_reranker_equals_transformers(default_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-VL-Reranker-tiny"
    model, arguments = save_qwen3_vl_model(folder, default_model)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    no, yes = words.convert_tokens_to_ids(["no", "yes"])

    def score(query: str, document: str, *images: int, instruction: str | None = None) -> float:
        instruction = instruction or "Given a search query, retrieve relevant candidates that answer the query."
        system = (
            "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that "
            'the answer can only be "yes" or "no".'
        )
        user = f"<Instruct>: {instruction}<Query>:{query}\n<Document>:{document}"
        roles = [("system", system), ("user", user)]
        messages = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in roles]
        prompt = words.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = arguments(prompt, [IMAGES[i] for i in images], add_special_tokens=False)
        with torch.no_grad():
            logits = model(**inputs).logits[0, -1]
        return float(torch.sigmoid(logits[yes] - logits[no]))

    images = [sent(image) for image in IMAGES]
    documents: list[TextOrImage] = ["A dam.", images[0], MixedInput((images[1], "a gate")), images[1]]
    texts = [("A dam.", ()), (IMAGE_TEXT, (0,)), (f"{IMAGE_TEXT}a gate", (1,)), (IMAGE_TEXT, (1,))]
    engine = await start(folder)
    for query, query_text, own in (("What?", "What?", ()), (images[1], IMAGE_TEXT, (1,))):
        expected = [score(query_text, text, *own, *some) for text, some in texts]
        together = await engine.score([query], documents, PARAMS)
        assert np.abs(together.scores - expected).max() < TOLERANCE
        alone = [(await engine.score([query], [document], PARAMS)).scores[0] for document in documents]
        assert np.abs(np.array(alone) - expected).max() < TOLERANCE
    instructed = await engine.score(["What?"], documents[1:2], PARAMS, RequestOptions(instruction="Find dams."))
    assert abs(instructed.scores[0] - score("What?", IMAGE_TEXT, 0, instruction="Find dams.")) < TOLERANCE
    cut = PoolingParams(truncate_prompt_tokens=100)
    long = MixedInput((images[0], "word " * 200))
    assert (await engine.score(["What?"], [long], cut)).num_tokens == [100]
    with pytest.raises(RequestTooLongError):
        await engine.score(["What?"], [long], PoolingParams(truncate_prompt_tokens=100, reject_too_long=True))
    with pytest.raises(RequestTooLongError, match="input 2 has"):
        await engine.score(["What?"], [images[0], "A dam.", "word " * 9000], PARAMS)
    await engine.close()


@pytest.mark.parametrize("is_packed", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k == "ColQwen2.5")) for k in PAGE_MODELS])
async def test_vectors_of_pages_and_queries_equal_transformers(
    kind: str, is_packed: bool, default_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    if not is_packed:
        monkeypatch.setattr(transformers_model, "probe_packing", lambda network, info, probes: "a test needs padding")
    model, processor = save_page_model(tmp_path, kind, default_model)
    pages = [*IMAGES, IMAGES[0].convert("L")]
    queries = ["Where is the dam?", "What?"]
    with torch.no_grad():
        colours = [page.convert("RGB") for page in pages]
        inputs = [processor.process_images(images=[page]) for page in colours]
        inputs += [processor.process_queries(text=[query]) for query in queries]
        expected = [model(**arguments).embeddings[0].numpy() for arguments in inputs]
    with caplog.at_level(logging.INFO, "penstock.engine"):
        engine = await start(tmp_path)
    assert ("runs packed" in caplog.text) == is_packed
    sides = [*map(sent, pages), *queries]
    together = await engine.token_embed(sides, PARAMS)
    alone = [(await engine.token_embed([side], PARAMS)).rows[0] for side in sides]
    assert together.num_tokens == [len(rows) for rows in expected]
    for rows, own, wanted in zip(together.rows, alone, expected, strict=True):
        assert np.abs(rows - wanted).max() < TOLERANCE
        assert np.abs(own - rows).max() < 1e-5
    found = await engine.embed_combined(sides, [PoolingTask.TOKEN_EMBED], PARAMS)
    assert found.patches is not None
    assert found.token_ids is not None
    assert [grid is None for grid in found.patches] == [False] * len(pages) + [True] * len(queries)
    for grid, ids in zip(found.patches[: len(pages)], found.token_ids, strict=False):
        assert grid is not None
        assert len(set(grid.vectors)) == len(grid.vectors) == grid.rows * grid.columns
        assert len({ids[i] for i in grid.vectors}) == 1
        assert (grid.rows, grid.columns) == (2, 2) or kind != "ColPali"
        assert grid.vectors == sorted(grid.vectors) or kind == "ColModernVBert"
    scored = await engine.score(queries[:1], sides[: len(pages)], PARAMS)
    similarities = [expected[-2] @ rows.T for rows in expected[: len(pages)]]
    assert np.abs(scored.scores - [each.max(axis=1).sum() for each in similarities]).max() < 10 * TOLERANCE
    await engine.close()


async def test_embedding_gemma2_equals_transformers(default_model: Path, tmp_path: Path, caplog: Any) -> None:
    model, arguments = save_embedding_gemma2_model(tmp_path, default_model)

    def vector(prompt: str, *images: Image.Image) -> np.ndarray:
        with torch.no_grad():
            row = model(**arguments(prompt, list(images))).last_hidden_state[0].mean(dim=0)
        return torch.nn.functional.normalize(row, dim=0).numpy()

    one, two = sent(IMAGES[0]), sent(IMAGES[1].convert("L"))
    two_rgb = IMAGES[1].convert("L").convert("RGB")
    cases: list[tuple[Any, np.ndarray]] = [
        ("A dam.", vector("A dam.")),
        (one, vector("[image]", IMAGES[0])),
        (two, vector("[image]", two_rgb)),
        (MixedInput((one, " a gate ", two)), vector("[image] a gate [image]", IMAGES[0], two_rgb)),
    ]
    with caplog.at_level(logging.INFO, "penstock.engine"):
        engine = await start(tmp_path)
    assert "runs packed" in caplog.text
    assert engine.info.embedding_size == 24
    found = (await engine.embed([item for item, _ in cases], PARAMS)).embeddings
    alone = np.concatenate([(await engine.embed([item], PARAMS)).embeddings for item, _ in cases])
    assert np.abs(found - [row for _, row in cases]).max() < 1e-5
    assert np.abs(found - alone).max() < 1e-5
    # As in sentence-transformers, a prompt precedes texts and no images.
    prompted = (await engine.embed(["A dam.", one], PARAMS, RequestOptions(prompt="task: search | query: "))).embeddings
    assert np.abs(prompted - [vector("task: search | query: A dam."), cases[1][1]]).max() < 1e-5
    await engine.close()


def test_llm_reads_images_in_every_form(default_model: Path, tmp_path: Path) -> None:
    save_qwen3_vl_model(tmp_path / "model", default_model)
    file = sent(IMAGES[0]).data
    path = tmp_path / "page.png"
    path.write_bytes(file)
    uri = "data:image/png;base64," + base64.b64encode(file).decode()
    forms = [
        file,
        path,
        IMAGES[0],
        ImageInput(file),
        *({"image": image} for image in (file, str(path), uri, IMAGES[0])),
    ]
    settings: dict[str, Any] = {"in_process": True, "num_threads": 1, "dtype": "float32", "device": "cpu"}
    with LLM(str(tmp_path / "model"), max_image_pixels=1_036, **settings) as llm:
        rows = np.stack(
            [output.outputs.embedding for output in llm.embed([*forms, *forms * 4, "a text"], use_tqdm=False)]
        )
        assert np.abs(rows[:-1] - rows[0]).max() < 1e-5
        (alone,) = llm.embed(IMAGES[0])
        assert np.abs(alone.outputs.embedding - rows[0]).max() < 1e-5
        mixed = {"image": IMAGES[0], "text": "a gate"}
        (both,), (same,) = llm.embed(mixed), llm.embed(MixedInput((ImageInput(file), "a gate")))
        assert np.abs(both.outputs.embedding - same.outputs.embedding).max() < 1e-5
        scores = [output.outputs.score for output in llm.score(mixed, [IMAGES[0], "a text"])]
        expected = rows[[0, -1]] @ both.outputs.embedding
        assert np.abs(np.array(scores) - expected).max() < 1e-4
        for wrong, message in (
            ({"image": "missing.png"}, "Input 0 has 'missing.png', which is no file"),
            ({"image": 3}, "Input 0 has no image"),
            (b"no image", "Input 0 is not an image in a supported format"),
            (IMAGES[1], "Input 0 has 17 x 61 pixels; an image may have at most 1036"),
        ):
            with pytest.raises(InvalidRequestError, match=message):
                llm.embed([wrong])
        with pytest.raises(InvalidRequestError, match="Input 8 has no image") as error:
            llm.embed(["a"] * 40 + [{"image": ""}])
        assert "begin at input 32" in error.value.__notes__[0]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F"])
def test_image_of_pillow_keeps_its_pixels(mode: str) -> None:
    image = picture(mode, 20, 15)
    exif = image.getexif()
    exif[0x0112] = 6
    decoded = decode(read_image_file(file_of(image), ImageLimits()))
    expected = convert_to_rgb(ImageOps.exif_transpose(image))
    assert decoded.size == expected.size == (15, 20)
    assert np.array_equal(np.asarray(decoded), np.asarray(expected))
