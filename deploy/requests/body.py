"""HTTP request bodies: OpenAI's completions and chat formats, with the diffusion extensions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, field_validator, model_validator

from deploy.requests.base import MAX_CHARACTERS, MAX_INT32, RequestBody, check_texts, is_id, valid_text
from deploy.requests.errors import RequestError
from deploy.requests.ignored_fields import OF_REQUESTS, OF_TOKENIZING
from deploy.requests.parameters import SAMPLING_FIELDS, Diffusion, Values
from deploy.requests.structured.fields import Structured
from deploy.requests.turns import Conversation, TemplateOptions
from learner.seeds import fold
from rollout.request import MIN_TEMPERATURE

MAX_CHOICES = 32
"""Maximum completions per request."""
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_IDS = 16


class StreamOptions(RequestBody):
    """OpenAI's `stream_options`."""

    ignored_values: ClassVar = {"continuous_usage_stats": (False,), "include_obfuscation": (False,)}
    field_prefix = "stream_options."

    include_usage: bool = False


# Fields of a union type have a `before` validator: pydantic would report an error for each type of the union and for
# each bad item. The length limits in the types are for the JSON schema.
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
_Text = Annotated[str, Field(max_length=MAX_CHARACTERS)]
_Prompt = Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)]


class CompletionBody(Structured):
    """Common fields of completion and chat requests. Unsupported fields are rejected by name."""

    ignored_values = OF_REQUESTS
    prompt_field: ClassVar[str] = "prompt"
    """Name of the field that holds the prompt."""

    model: Annotated[str, Field(max_length=200)] | None = None
    """`policy`, `policy@v000012`, `base` or the run's name. Absent or empty: `policy`."""
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    """Maximum tokens of the text. The canvas has `diffusion.gen_length` slots regardless."""
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    """Sampling temperature. Default 0, as in the held-out evaluation: the most probable token."""
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None
    """0 and -1 disable it."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Completions per prompt."""
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Must equal `n`: all sampled completions are returned."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """The same seed, request and policy version give the same text. Absent or -1: a new seed for each request."""
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)] | None = None
    """The text ends before the first of these."""
    include_stop_str_in_output: bool = False
    """Whether the text includes the stop string or id that ended it."""
    no_stop_trim: bool = False
    """SGLang's name of `include_stop_str_in_output`."""
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT32)]], Field(max_length=MAX_STOP_IDS)] = Field(
        default=[]
    )
    """Stop ids in addition to the policy's own. The text ends before the first of them."""
    ignore_eos: bool = False
    """Ignore the policy's own stop ids: the text has `max_tokens` tokens, or fills its canvas."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    diffusion: Diffusion = Diffusion()
    diffusing: bool = False
    """Mercury's name of `diffusion.stream: canvas`."""

    @field_validator("stop", mode="before")
    @classmethod
    def _stops(cls, stop: Any) -> Any:
        stops = stop if isinstance(stop, list) else [stop]
        if len(stops) > MAX_STOPS or not all(_is_text(one) and 1 <= len(one) <= MAX_STOP_LENGTH for one in stops):
            raise ValueError(f"must be at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters")
        for one in stops:
            valid_text(one)
        return stop

    @field_validator("temperature", mode="after")
    @classmethod
    def _temperature(cls, temperature: float) -> float:
        # As in vLLM: clients that want greedy decoding send values such as 1e-6.
        return max(temperature, MIN_TEMPERATURE) if temperature > 0 else temperature

    @field_validator("top_k", mode="after")
    @classmethod
    def _top_k(cls, top_k: int) -> int:
        return 0 if top_k == -1 else top_k

    @field_validator("seed", mode="after")
    @classmethod
    def _seed(cls, seed: int) -> int | None:
        return None if seed == -1 else seed % 2**63

    @model_validator(mode="after")
    def _best(self) -> Self:
        if self.best_of not in (None, self.num_choices):
            message = f"`best_of` {self.best_of} is not `n` {self.num_choices}: all sampled texts are returned"
            raise RequestError(message, "unsupported_parameter", param="best_of")
        return self

    @model_validator(mode="after")
    def _streams(self) -> Self:
        asked = {
            "stream_options": self.includes_usage,
            "diffusing": self.diffusing,
            "diffusion.stream": self.diffusion.stream == "canvas",
        }
        for field, is_asked in asked.items():
            if is_asked and not self.stream:
                message = f"`{field}` is an option of streams; set `stream: true`, or leave it out"
                raise RequestError(message, param=field)
        return self

    @model_validator(mode="after")
    def _is_structured_once(self) -> Self:
        if len(self._structures) > 1:
            fields = " and ".join(f"`{structure.field}`" for structure in self._structures)
            raise RequestError(f"{fields} both constrain the text; leave one out", param="structured_outputs")
        ends = {"stop": self.stops, "stop_token_ids": self.stop_token_ids, "ignore_eos": self.ignore_eos}
        for field, is_given in ends.items():
            if self._structures and is_given:
                message = f"`{field}` is not for `{self._structures[0].field}`: the text ends where it is complete"
                raise RequestError(message, param=field)
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_stop(self) -> bool:
        """Whether the text includes the stop string or id that ended it."""
        return self.include_stop_str_in_output or self.no_stop_trim

    @property
    def num_prompts(self) -> int:
        """Number of prompts to complete."""
        return 1

    @property
    def num_choices(self) -> int:
        """Completions per prompt."""
        return self.n or 1

    @property
    def parameter_layers(self) -> list[Values]:
        """Denoising parameters of the request, by the sampler's keys. Later layers override earlier ones."""
        found = dict(self) | dict(self.diffusion) | dict(self.diffusion.constraints)
        places = {key: place.rpartition(".")[2] for key, place in FIELD_PATHS.items() if key in _LAYERED}
        given = {key: found[name] for key, name in places.items() if found.get(name) not in (None, [])}
        # Guidance does not work with a KV cache, and a body has no field to turn the cache off.
        return [given | {"cache": "none"} if given.get("cfg_scale") else given]

    @property
    def fixed(self) -> dict[str, int]:
        """Fixed tokens inside the completion, by slot."""
        return self.diffusion.constraints.fixed

    @property
    def names(self) -> dict[str, str]:
        """The body's names of the sampler's fields, for error messages."""
        return FIELD_PATHS | {"prompt_ids": self.prompt_field} | self.grammar_name

    @property
    def grammar_name(self) -> dict[str, str]:
        """The body's name of the grammar field; empty without structured output."""
        return {} if self.structure is None else {"grammar": self.structure.field}

    def seeds(self, key: int) -> list[int]:
        """Return the seeds of all choices, prompt by prompt."""
        return [fold(key, index, choice) for index in range(self.num_prompts) for choice in range(self.num_choices)]

    @property
    def returns_logprobs(self) -> bool:
        """Whether each choice includes the log-probabilities of its tokens."""
        return False

    @property
    def shows_canvas(self) -> bool:
        """Whether a stream shows the whole canvas after every step."""
        return self.diffusing or self.diffusion.stream == "canvas"

    @property
    def most_tokens(self) -> int | None:
        """Maximum tokens of the text; None: limited by the canvas alone."""
        return self.max_tokens

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the token usage."""
        return self.stream_options is not None and self.stream_options.include_usage


FIELD_PATHS = {key: field.place for key, field in SAMPLING_FIELDS.items() if field.place is not None} | {
    "fixed_tokens": "diffusion.constraints.fixed",
    "seed": "seed",
}
"""Path of each sampler field in a body."""
# The stop ids of a body come on top of the policy's, so the planner reads them.
_LAYERED = FIELD_PATHS.keys() - {"stop_ids", "fixed_tokens", "seed"}


class CompletionRequest(CompletionBody):
    """`POST /v1/completions`."""

    logprobs: Literal[0] | None = None
    """0: return the log-probability of each token, in nats, at the step that committed it (docs/service.md). Those of
    other tokens are not recorded."""

    prompt: (
        _Prompt
        | Annotated[list[_Prompt], Field(max_length=MAX_CHOICES)]
        | list[int]
        | Annotated[list[list[int]], Field(max_length=MAX_CHOICES)]
    )
    """Text to continue, token ids, or a list of either (one prompt each). Special tokens in text are parsed as tokens.
    No chat template is applied: use `/v1/chat/completions` for conversations."""
    add_special_tokens: bool = True
    """Whether the tokenizer adds its special tokens, such as BOS, to a text prompt."""
    suffix: Annotated[str, Field(max_length=65536), AfterValidator(valid_text)] | None = None
    """Text that follows the completion (infill)."""

    @field_validator("logprobs", mode="before")
    @classmethod
    def _logprobs(cls, count: Any) -> Any:
        # In Python, False == 0.
        if type(count) is not int or count != 0:
            raise ValueError("must be 0: only the log-probability of each committed token is recorded")
        return count

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompt(cls, prompt: Any) -> Any:
        if isinstance(prompt, list) and len(prompt) > MAX_CHOICES and not is_id(prompt[0]):
            raise ValueError(f"must be at most {MAX_CHOICES} prompts")
        if not is_prompt(prompt) or prompt == "" or (isinstance(prompt, list) and "" in prompt):
            raise ValueError("must be a string, a list of strings or a list of token ids, and not empty")
        check_texts([prompt] if isinstance(prompt, str) else [text for text in prompt if isinstance(text, str)])
        return prompt

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)

    @property
    def num_prompts(self) -> int:
        """See `CompletionBody`."""
        return len(self.prompts)

    @property
    def returns_logprobs(self) -> bool:
        """See `CompletionBody`."""
        return self.logprobs is not None


class ChatRequest(CompletionBody, TemplateOptions):
    """`POST /v1/chat/completions`."""

    prompt_field = "messages"

    messages: Conversation
    logprobs: bool = False
    """Same as `logprobs: 0` in `/v1/completions`."""
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    """The newer name of `max_tokens`."""
    add_special_tokens: bool = False
    """Whether the tokenizer adds its special tokens to the prompt. Most chat templates contain them already."""

    @property
    def turns(self) -> list[dict[str, str]]:
        """Conversation in the format of a chat template."""
        return [message.turn for message in self.messages]

    @property
    def most_tokens(self) -> int | None:
        """See `CompletionBody`."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def returns_logprobs(self) -> bool:
        """See `CompletionBody`."""
        return self.logprobs


def _with(name: str, kind: str) -> dict[str, Any]:
    return {"required": [name], "properties": {name: {"type": kind}}}


class TokenizeRequest(TemplateOptions):
    """`POST /tokenize`: token ids of a text (special tokens parsed) or a conversation (chat template applied)."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [_with("prompt", "string"), _with("messages", "array")]})
    ignored_values = OF_TOKENIZING

    model: str | None = None
    prompt: Annotated[_Text, AfterValidator(valid_text)] | None = None
    messages: Conversation | None = None
    add_special_tokens: bool | None = None
    """Default as in completions and chats: true for a prompt, false for a conversation."""

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("must have `prompt` or `messages`, and not both")
        return self


class DetokenizeRequest(RequestBody):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[int], Field(max_length=65536)]


def is_prompt(value: Any) -> bool:
    """Return whether the value is a text, token ids, or a list of either."""
    kinds = (_is_text, is_id, _is_ids)
    return _is_text(value) or (
        isinstance(value, list) and bool(value) and any(all(map(is_one, value)) for is_one in kinds)
    )


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_ids(value: Any) -> bool:
    return type(value) is list and bool(value) and all(map(is_id, value))
