"""Registry of the reward terms: the config union and the factory."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rewards.terms.function_term import FunctionConfig, FunctionTerm
from rewards.terms.http_term import HttpConfig, HttpTerm
from rewards.terms.judge.config import JudgeConfig
from rewards.terms.judge.judge import Judge
from rewards.terms.shaping import LengthPenaltyConfig, SpeedConfig, length_penalty_term, speed_term
from rewards.terms.term import Term

AnyTermConfig = Annotated[
    LengthPenaltyConfig | SpeedConfig | FunctionConfig | HttpConfig | JudgeConfig, Field(discriminator="kind")
]
"""The config of any term, discriminated by its `kind`."""


def make_term(config: AnyTermConfig) -> Term:
    """Create the term of a config. Raises ValueError if it cannot work here."""
    match config:
        case LengthPenaltyConfig():
            return length_penalty_term(config)
        case SpeedConfig():
            return speed_term()
        case FunctionConfig():
            return FunctionTerm(config)
        case HttpConfig():
            return HttpTerm(config)
        case JudgeConfig():
            return Judge(config)
