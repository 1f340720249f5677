"""Classification without training: each class is shown by eight examples (a sample of Banking77, CC BY 4.0)."""

import csv
import sys
from pathlib import Path

import httpx

URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
with (Path(__file__).parent / "data" / "banking77-sample.csv").open() as file:
    ROWS = list(csv.DictReader(file))
EXAMPLES = [{"text": row["text"], "label": row["label"]} for row in ROWS if row["part"] == "train"]
TESTS = [row for row in ROWS if row["part"] == "test"]

body = {"model": "all-MiniLM-L6-v2", "inputs": [row["text"] for row in TESTS], "examples": EXAMPLES}
answer = httpx.post(f"{URL}/v1/classify", json=body).raise_for_status().json()

found = [each["prediction"] for each in answer["classifications"]]
accuracy = sum(label == row["label"] for label, row in zip(found, TESTS, strict=True)) / len(TESTS)
for row, label in list(zip(TESTS, found, strict=True))[::12]:
    print(f"{label:20} {row['text']}")
print(f"accuracy {accuracy:.3f} of {len(TESTS)} texts")

assert accuracy > 0.9
