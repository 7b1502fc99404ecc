"""The service's bodies: OpenAI's completions format, and the policy."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from actors.registry import PolicyVersion
from rollout.score import Score

MAX_CHOICES = 32
"""Completions of one request."""


class CompletionRequest(BaseModel):
    """What to complete. What this service cannot do is refused, not ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    model: str | None = None
    """The run's name, or left out."""
    prompt: str | list[str] | list[int]
    """A string is the user's turn of a conversation: the policy was trained on its chat template, so the template is
    applied. A list of strings is as many conversations. A list of token ids is the prompt itself, nothing added."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """The text is cut after so many tokens. At most, and by default, the length that the policy was trained to fill;
    it fills that length whatever is asked here."""
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    """Of the law that tokens are drawn from. By default 0, as in the held-out evaluation: the most probable token."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Same seed, request and policy version: same text. By default a new one for each request."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    """Completions of each prompt."""

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompt(cls, prompt: Any) -> Any:
        is_list = isinstance(prompt, list) and bool(prompt)
        of_one_kind = is_list and (all(type(p) is str for p in prompt) or all(type(p) is int for p in prompt))
        if not isinstance(prompt, str) and not of_one_kind:
            raise ValueError("must be a string, a list of strings or a list of token ids, and not empty")
        if any("\ud800" <= character <= "\udfff" for text in prompt if isinstance(text, str) for character in text):
            raise ValueError("has half of a surrogate pair, which is no text")
        return prompt

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [p for p in self.prompt if isinstance(p, str)] or [[p for p in self.prompt if isinstance(p, int)]]


class Choice(BaseModel):
    """One completion."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: None = None


class Usage(BaseModel):
    """Tokens of the request and of its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionResponse(BaseModel):
    """All choices of one request; one policy version made them all."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    system_fingerprint: str
    policy_version: int


class ScoreResponse(BaseModel):
    """Held-out accuracy of a policy version at temperature 0."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    policy_version: int
    """The version that was evaluated: the served one, or the last before it that was."""
    num_correct: int
    num_problems: int
    accuracy: float
    interval_95: tuple[float, float]

    @classmethod
    def of(cls, policy: PolicyVersion | None) -> ScoreResponse | None:
        """The score of an evaluated version; None without one."""
        if policy is None or policy.num_correct is None or not policy.num_problems:
            return None
        score = Score(num_correct=policy.num_correct, num_problems=policy.num_problems)
        return cls(
            policy_version=policy.version,
            num_correct=score.num_correct,
            num_problems=score.num_problems,
            accuracy=score.accuracy,
            interval_95=score.interval,
        )


class PolicyResponse(BaseModel):
    """The policy that answers now."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    run: str
    policy_version: int
    round: int
    phase: str
    score: ScoreResponse | None
    """The newest held-out score known; its own `policy_version` says of which version. None before the first."""
    num_swaps: int
    """Times that this replica took a new version."""
    last_follower_error: str | None
    """Why a new version could last not be read or loaded, if ever."""


class HealthResponse(BaseModel):
    """Whether the service answers, and whether it still hears of new versions."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    status: Literal["ok", "degraded"]
    """`degraded`: it answers, but the registry is out of reach, so the policy may be old."""
    policy_version: int
    registry_reachable: bool
    follower_errors: int
    """Failures to read the registry or to load a version, since the replica started."""


class ErrorDetail(BaseModel):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every answer that is not 200."""

    error: ErrorDetail
