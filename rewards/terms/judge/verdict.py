"""Formats of a judge's verdict: its possible values, the output constraint, and the parser."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rewards.terms.term import Finite

_KEY = "verdict"
# Only a fence around JSON is removed. Anything else is rejected, since a judge that writes more may be quoting.
_FENCE = re.compile(r"\A```(?:json)?\s*(.*?)\s*```\Z", re.DOTALL)
_END_OF_THOUGHT = "</think>"


class _Verdict(BaseModel):
    """Base of both kinds: a list of words, one of which is the answer."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @abstractmethod
    def words(self) -> Mapping[str, float]:
        """Return the possible answers and the value of each."""

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON schema of an answer."""
        return {
            "type": "object",
            "properties": {_KEY: {"type": "string", "enum": list(self.words())}},
            "required": [_KEY],
            "additionalProperties": False,
        }

    def instruction(self) -> str:
        """Return the instruction on the form of the answer."""
        words = " or ".join(json.dumps({_KEY: word}) for word in self.words())
        return f"Answer with exactly one of these, and nothing else: {words}"

    def read(self, answer: str) -> float | None:
        """Return the value of an answer: one of the words, alone or in a JSON object; None for any other text."""
        text = answer.rpartition(_END_OF_THOUGHT)[2].strip()
        if fenced := _FENCE.match(text):
            text = fenced.group(1)
        word: object = text
        try:
            given = json.loads(text)
        except (ValueError, RecursionError):
            pass
        else:
            if isinstance(given, dict):
                word = given.get(_KEY) if given.keys() == {_KEY} else None
            elif isinstance(given, str):
                word = given
        # Models may write 7 although the schema requires "7".
        return self.words().get(str(word)) if isinstance(word, str | int) else None


class ChoiceVerdict(_Verdict):
    """One of a few words."""

    kind: Literal["choice"] = "choice"
    """Selects this form."""
    choices: Annotated[dict[Annotated[str, Field(min_length=1, max_length=64)], Finite], Field(min_length=2)] = {
        "yes": 1.0,
        "no": 0.0,
    }
    """The words and the value of each."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if spaced := [word for word in self.choices if word != word.strip()]:
            raise ValueError(f"the choice {spaced[0]!r} begins or ends with a space; leave it out")
        return self

    def words(self) -> Mapping[str, float]:
        """Return the choices."""
        return self.choices


class ScoreVerdict(_Verdict):
    """A whole number between two bounds."""

    kind: Literal["score"] = "score"
    """Selects this form."""
    lowest: int = 0
    """The worst score, with value 0."""
    highest: int = 10
    """The best score, with value 1; those in between are interpolated linearly. At most 100 above `lowest`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not 0 < self.highest - self.lowest <= 100:
            raise ValueError(f"highest {self.highest} should be 1 to 100 above lowest {self.lowest}")
        return self

    def words(self) -> Mapping[str, float]:
        """Return the scores in digits."""
        lowest, highest = self.lowest, self.highest
        return {str(score): (score - lowest) / (highest - lowest) for score in range(lowest, highest + 1)}


VerdictFormat = Annotated[ChoiceVerdict | ScoreVerdict, Field(discriminator="kind")]
"""The form of a verdict, discriminated by its `kind`."""
