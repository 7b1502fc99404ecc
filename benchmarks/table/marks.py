"""Generated parts of documents: the text between two marks."""

from __future__ import annotations

from pathlib import Path


def write_between_marks(path: Path, name: str, text: str) -> None:
    """Replace the text between a document's marks of a name. Raises ValueError if it has none."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, found, rest = path.read_text(encoding="utf-8").partition(begin)
    _, also_found, after = rest.partition(end)
    if not (found and also_found):
        raise ValueError(f"{path} has no line {begin} with {end} after it")
    path.write_text(f"{before}{begin}\n\n{text}\n{end}{after}", encoding="utf-8")
