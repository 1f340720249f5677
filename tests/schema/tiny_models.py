"""Tiny random models of every kind, with the embedded model's tokenizer."""

import json
import sys
from pathlib import Path

import transformers

from penstock.server.commands.model_arguments import default_model_folder

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tests.random_models import SIZES, save_random_model

LABELS = {"num_labels": 3, "id2label": {0: "praise", 1: "complaint", 2: "question"}}
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
QUERY_PROMPT = "Instruct: Find what answers the question\nQuery: "


def save(folder: Path, class_name: str, **config: object) -> Path:
    return save_random_model(folder, class_name, default_model_folder(), **config)


def write_modules(target: Path, *modules: tuple[str, dict[str, object] | None]) -> None:
    """Writes modules.json of sentence-transformers and the configs of its modules."""
    rows = []
    for i, (kind, config) in enumerate(modules):
        path = "" if config is None else f"{i}_{kind}"
        rows.append({"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"})
        if config is not None:
            (target / path).mkdir(exist_ok=True)
            (target / path / "config.json").write_text(json.dumps(config))
    (target / "modules.json").write_text(json.dumps(rows))


def save_all(root: Path) -> None:
    """Saves one model of each kind. The embedding model has a chat template and prompts."""
    embedding = save(root / "embedding", "BertModel")
    (embedding / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    prompts = {"query": QUERY_PROMPT, "document": ""}
    (embedding / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    pooling = {"word_embedding_dimension": SIZES["hidden_size"], "pooling_mode_mean_tokens": True}
    write_modules(embedding, ("Transformer", None), ("Pooling", pooling), ("Normalize", None))
    sparse = save(root / "sparse", "BertForMaskedLM")
    write_modules(sparse, ("MLMTransformer", None), ("SpladePooling", {"pooling_strategy": "max"}))
    save(root / "classifier", "BertForSequenceClassification", **LABELS)
    save(root / "token-classifier", "BertForTokenClassification", **LABELS)
    made_by = {"version": "5.0.0"}
    save(root / "cross-encoder", "BertForSequenceClassification", num_labels=1, sentence_transformers=made_by)


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    save_all(Path(sys.argv[1]))
