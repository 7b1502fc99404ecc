"""An error about fields, which have other names where they were written: in a recipe, a body, an option."""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter


class FieldError(ValueError):
    """One sentence about what is wrong with fields of a request."""

    def __init__(self, sentence: str, **values: object) -> None:
        """Keep the sentence.

        Args:
            sentence: a format string. What is in braces and no key of `values` is the name of a field.
            values: what else is put into the sentence.
        """
        self._sentence, self._values = sentence, values
        parts = [name for _, name, _, _ in Formatter().parse(sentence) if name is not None]
        self.fields = [name for name in parts if name not in values]
        """The fields, in the order of the sentence."""
        super().__init__(self.named({}))

    def named(self, names: Mapping[str, str]) -> str:
        """The sentence with these names for its fields; one without has its own."""
        spelled = {name: names.get(name, name) for name in self.fields}
        return self._sentence.format(**spelled, **self._values)
