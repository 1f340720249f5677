"""Measures the quality of each dtype: nDCG@10 on SciFact and accuracy on Banking77, in process.

    python benchmarks/quality/compare_types.py FOLDER [FOLDER ...] --data path/to/both

The data folder holds `scifact` and `banking77`; see docs/quality.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.engine import EngineError
from penstock.engine.llm import LLM
from penstock.server.quality.tasks import ClassificationTask, RetrievalTask

TYPES = ("float32", "bfloat16", "int8")


def main() -> None:
    """Measures, prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="folders or hub ids")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--types", nargs="+", default=list(TYPES), choices=TYPES)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    scifact = RetrievalTask.read(args.data / "scifact")
    banking = ClassificationTask.read(args.data / "banking77")
    report: dict[str, dict[str, dict[str, float | str]]] = {}
    print(f"{'model':24} {'type':10} {'SciFact nDCG@10':>16} {'Banking77 accuracy':>20}   kernels")
    for model in args.models:
        for dtype in args.types:
            try:
                found = measure(model, dtype, scifact, banking)
            except EngineError as error:  # a type that this machine has not
                print(f"{model}: {error}")
                continue
            report.setdefault(Path(model).name, {})[dtype] = found
            figures = f"{found['ndcg_at_10']:16.4f} {found['accuracy']:20.4f}"
            print(f"{Path(model).name:24} {dtype:10} {figures}   {found['kernels']}", flush=True)
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


def measure(model: str, dtype: str, scifact: RetrievalTask, banking: ClassificationTask) -> dict[str, float | str]:
    """Returns both scores of a model in a dtype, and the executor that ran it.

    Raises:
        ModelLoadError: It cannot be loaded, or not in this type.
    """
    with LLM(model, dtype=dtype) as llm:

        def embed(texts: Sequence[str], _input_type: str) -> NDArray[np.float32]:
            outputs = llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False)
            return np.stack([output.outputs.embedding for output in outputs])

        return {
            "ndcg_at_10": round(scifact.scores(scifact.search(embed))["ndcg_at_10"], 5),
            "accuracy": round(banking.scores(embed)["accuracy"], 5),
            "kernels": llm.info.kernels,
        }


if __name__ == "__main__":
    main()
