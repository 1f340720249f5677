"""The tree in README.md: one line a module, its comment the beginning of the module's docstring.

`python tests/readme_tree.py` (make tree) writes it anew; tests/test_readme.py fails while it is out of date.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- tree: written by `make tree` -->\n", "<!-- end of tree -->\n"
LAYERS = ("server", "engine", "kernels")
COLUMN = 34


def comment(path: Path) -> str:
    """The first sentence of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    first = " ".join(docstring.split("\n\n")[0].split())
    return first.split(". ")[0].rstrip(".")


def tree() -> str:
    """The tree as a block of code."""
    lines = []
    for layer in LAYERS:
        for folder in sorted({p.parent for p in (ROOT / layer).rglob("*.py")}):
            depth = len(folder.relative_to(ROOT).parts) - 1
            lines.append(f"{'    ' * depth}{folder.name + '/':{COLUMN - 4 * depth}}{comment(folder / '__init__.py')}")
            for path in sorted(folder.glob("*.py")):
                if path.name != "__init__.py":
                    name = f"{'    ' * (depth + 1)}{path.name}"
                    lines.append(f"{name:{COLUMN}}{comment(path)}")
    return BEGIN + "```\n" + "\n".join(lines) + "\n```\n" + END


def written(readme: str) -> str:
    """The README with the tree of today."""
    before, _, rest = readme.partition(BEGIN)
    return before + tree() + rest.partition(END)[2]


if __name__ == "__main__":
    README.write_text(written(README.read_text("utf-8")), "utf-8")
