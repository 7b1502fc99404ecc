"""Markdown table of results, written row by row as they are measured."""

from __future__ import annotations

from pathlib import Path

_HEAD = "| stage | what | measured | beside it |\n|---|---|---|---|\n"


class Table:
    """Appends rows to a file, and prints them."""

    def __init__(self, path: Path, title: str) -> None:
        """Append a new table with a title to the file."""
        self.path = path
        self.num_failed = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        before = "\n" if path.is_file() else ""
        self._write(f"{before}## {title}\n\n{_HEAD}")

    def add(self, stage: str, what: str, measured: str, beside: str = "") -> None:
        """Add a measurement and its comparison value, from the CPU or the plan."""
        self._write("| " + " | ".join(_cell(text) for text in (stage, what, measured, beside)) + " |\n")

    def fail(self, stage: str, why: str) -> None:
        """Add a row for a stage that failed."""
        self.num_failed += 1
        self.add(stage, "failed", why)

    def _write(self, text: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)
        print(text, end="", flush=True)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
