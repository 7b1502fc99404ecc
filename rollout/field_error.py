"""Error about request fields whose names depend on their source: recipe, request body or option."""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter


class FieldError(ValueError):
    """One-sentence error about fields of a request; the names of the fields can be replaced."""

    def __init__(self, sentence: str, **values: object) -> None:
        """Make the error.

        Args:
            sentence: a format string. A name in braces is a field's, unless it is a key of `values`.
            values: other values to insert.
        """
        self._sentence, self._values = sentence, values
        parts = [name for _, name, _, _ in Formatter().parse(sentence) if name is not None]
        self.fields = [name for name in parts if name not in values]
        """Names of the fields, in the order of the sentence."""
        super().__init__(self.named({}))

    def named(self, names: Mapping[str, str]) -> str:
        """Return the sentence with these names for its fields; a field without an entry keeps its name."""
        spelled = {name: names.get(name, name) for name in self.fields}
        return self._sentence.format(**spelled, **self._values)
