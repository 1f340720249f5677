"""Kubernetes: renders the Helm chart with kubernetes_values.yaml, as `helm template` does, and lists its objects."""

from pathlib import Path

import helm_python
import yaml

HERE = Path(__file__).parent
values = yaml.safe_load((HERE / "kubernetes_values.yaml").read_text())
with helm_python.Chart.load(str(HERE.parent / "docker" / "chart")) as chart:
    files = chart.render(values, name="search", namespace="default")
documents = [
    each for name, text in files.items() if name.endswith(".yaml") for each in yaml.safe_load_all(text) if each
]
objects = {(each["kind"], each["metadata"]["name"]): each for each in documents}
for kind, name in sorted(objects):
    print(f"{kind:22} {name}")

assert objects["Deployment", "search-minilm"]["spec"]["replicas"] == 2
assert {("Service", "search-reranker"), ("ScaledObject", "search-reranker")} <= objects.keys()
