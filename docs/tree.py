"""Generator of docs/tree.md: all files of the project with the first line of docstring or comment."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tree.md"
FOLDERS = ("rewards", "learner", "rollout", "actors", "deploy", "recipes", "benchmarks", "docs", "tests")
_HEAD = """# The tree

Made by `make docs` from the first lines of the files. Who may import whom is drawn in
[architecture.md](architecture.md), and held by `tests/test_arrows.py`.

"""
_COMMENTS = {".yaml": "# ", ".yml": "# ", ".md": "# ", ".js": "// ", ".css": "/* "}
_WIDTH = 30


def page() -> str:
    """Generate the page from the current files."""
    return _HEAD + "\n".join(f"```\n{chr(10).join(_lines(ROOT / folder, 0))}\n```\n" for folder in FOLDERS)


def _lines(path: Path, depth: int) -> Iterator[str]:
    """Generate the lines of a folder, its files, then its subfolders."""
    inside = sorted(one for one in path.iterdir() if _is_ours(one))
    yield _line(depth, f"{path.name}/", _first_line(path / "__init__.py"))
    for file in inside:
        if file.is_file() and file.name != "__init__.py":
            yield _line(depth + 1, file.name, _first_line(file))
    for folder in inside:
        if folder.is_dir():
            yield from _lines(folder, depth + 1)


def _is_ours(path: Path) -> bool:
    """Whether a path is a project file, or a folder with one. Folders of moved files may still hold bytecode."""
    # `make demo` writes the token.
    if path.name.startswith((".", "__pycache__")) or path.name == "service.token":
        return False
    return path.is_file() or any(map(_is_ours, path.iterdir()))


def _line(depth: int, name: str, says: str) -> str:
    return f"{'  ' * depth + name:{_WIDTH}} {says}".rstrip()


def _first_line(path: Path) -> str:
    if not path.is_file() or path.suffix not in {".py", *_COMMENTS}:
        return ""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0].rstrip(".")
    first = text.partition("\n")[0]
    mark = _COMMENTS[path.suffix]
    return first.removeprefix(mark).removesuffix("*/").strip().rstrip(".") if first.startswith(mark) else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
