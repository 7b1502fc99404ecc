"""The bodies of requests: OpenAI's completions and chat formats, and what a diffusion policy adds to them."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, field_validator, model_validator

from deploy.requests.base import LARGEST, Body, is_id, is_whole, whole
from deploy.requests.diffusion import Constraints, Diffusion
from deploy.requests.parameters import ALL_KEYS, Values
from deploy.requests.refusals import RequestError
from deploy.requests.structured.fields import ResponseFormat, StructuredOutputs
from deploy.requests.structured.structure import Structure
from learner.keys import fold

MAX_CHOICES = 32
"""Completions of one request."""
MAX_STOPS = 4
MAX_STOP_LENGTH = 256
MAX_CHARACTERS = 2**18
"""Characters of all prompts or messages of a request: half a second of a core to tokenize them, and a body has room for
four times as many."""
MAX_MESSAGES = 256
MAX_PARTS = 256
"""Parts of one message."""
MAX_STOP_IDS = 16
MAX_VARIABLES = 16
"""Variables that a chat template is given."""
MAX_VARIABLE_LENGTH = 256

# OpenAI's and vLLM's fields that this service cannot serve, with the values beside null that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "metadata": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_cache_key": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
# What a turn of OpenAI's has beside its text, as a client that replays it sends it.
_UNSUPPORTED_OF_MESSAGES: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
    "tool_calls": ([],),
}
_UNSUPPORTED_PARTS = ("file", "image_url", "input_audio", "refusal")


def check_texts(texts: list[str]) -> None:
    """Raise ValueError for what is too long to be tokenized, or no text."""
    if sum(map(len, texts)) > MAX_CHARACTERS:
        raise ValueError(f"must have at most {MAX_CHARACTERS} characters in all")
    for text in texts:
        whole(text)


class StreamOptions(Body):
    """OpenAI's."""

    unsupported: ClassVar = {"include_obfuscation": (False,)}
    place = "stream_options."

    include_usage: bool = False


# Where a field is one thing or another, a validator looks first: pydantic would name each type, and each item that is
# wrong. The lengths are in the types for the schema.
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
_Text = Annotated[str, Field(max_length=MAX_CHARACTERS)]
_Prompt = Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)]


class Ask(Body):
    """What completions and chat have in common. What this service cannot do is refused by name."""

    unsupported = _UNSUPPORTED

    model: Annotated[str, Field(max_length=200)] | None = None
    """`policy`, `policy@v000012`, `base` or the run's name; left out: `policy`."""
    max_tokens: Annotated[int, Field(ge=1, le=LARGEST)] | None = None
    """The text has at most so many tokens. The canvas has `diffusion.gen_length` slots whatever is asked here."""
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    """Of the law that tokens are drawn from. By default 0, as in the held-out evaluation: the most probable token."""
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0, le=LARGEST)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Completions of each prompt."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Same seed, request and policy version: same text. By default a new one for each request."""
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)] | None = None
    """The text ends before the first of these."""
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, le=LARGEST)]], Field(max_length=MAX_STOP_IDS)] = Field(
        default=[]
    )
    """Ids that end the text besides the policy's own; it ends with the first of them."""
    ignore_eos: bool = False
    """The policy's own ends end nothing: the text has `max_tokens` tokens, or all of its canvas."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    """Taken and not used."""
    response_format: ResponseFormat | None = None
    """JSON that a schema allows, or any object of JSON; the text is one, whatever the schedule."""
    structured_outputs: StructuredOutputs | None = None
    """vLLM's word for it, with regular expressions and choices too."""
    diffusion: Diffusion = Diffusion()
    diffusing: bool = False
    """Mercury's word for a stream of canvases."""

    @field_validator("stop", mode="before")
    @classmethod
    def _stops(cls, stop: Any) -> Any:
        stops = stop if isinstance(stop, list) else [stop]
        if len(stops) > MAX_STOPS or not all(_is_text(one) and 1 <= len(one) <= MAX_STOP_LENGTH for one in stops):
            raise ValueError(f"must be at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters")
        for one in stops:
            whole(one)
        return stop

    @model_validator(mode="after")
    def _streams(self) -> Self:
        asked = {
            "stream_options": self.stream_options is not None,
            "diffusing": self.diffusing,
            "diffusion.stream": self.diffusion.stream == "canvas",
        }
        for field, is_asked in asked.items():
            if is_asked and not self.stream:
                message = f"`{field}` says what a stream shows; ask for one with `stream: true`, or leave it out"
                raise RequestError(message, param=field)
        return self

    @model_validator(mode="after")
    def _is_structured_once(self) -> Self:
        if len(self._structures) > 1:
            fields = " and ".join(f"`{structure.field}`" for structure in self._structures)
            raise RequestError(f"{fields} both say what the text must be; leave one out", param="structured_outputs")
        ends = {"stop": self.stops, "stop_token_ids": self.stop_token_ids, "ignore_eos": self.ignore_eos}
        for field, is_given in ends.items():
            if self._structures and is_given:
                message = f"`{field}` is not for `{self._structures[0].field}`: the text ends where it is complete"
                raise RequestError(message, param=field)
        return self

    @cached_property
    def _structures(self) -> list[Structure]:
        said = (self.response_format, self.structured_outputs)
        return [one.structure for one in said if one is not None and one.structure is not None]

    @property
    def structure(self) -> Structure | None:
        """What the text must be; None for any text."""
        return next(iter(self._structures), None)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_prompts(self) -> int:
        """Prompts that are to be completed."""
        return 1

    @property
    def num_choices(self) -> int:
        """Completions of each prompt."""
        return self.n or 1

    @property
    def layers(self) -> list[Values]:
        """What it says of how to denoise, by the sampler's keys; of two layers the later counts."""
        diffusion = self.diffusion
        found = dict(self) | dict(diffusion) | dict(diffusion.constraints) | {"schedule": diffusion.remasking}
        given = {key: found[key] for key in PLACES if key in ALL_KEYS and found.get(key) not in (None, [])}
        # Guidance has no cached forward, and a body has no word for caches.
        return [given | {"cache": "none"} if diffusion.cfg_scale else given]

    @property
    def fixed(self) -> dict[str, int]:
        """Tokens that are given inside the completion, by slot."""
        return self.diffusion.constraints.fixed

    @property
    def names(self) -> dict[str, str]:
        """What the author calls the sampler's fields."""
        return PLACES | self.grammar_name

    @property
    def grammar_name(self) -> dict[str, str]:
        """What the author calls its grammar, if it has one."""
        return {} if self.structure is None else {"grammar": self.structure.field}

    def seeds(self, key: int) -> list[int]:
        """The seeds of all choices, prompt by prompt."""
        return [fold(key, index, choice) for index in range(self.num_prompts) for choice in range(self.num_choices)]

    @property
    def returns_logprobs(self) -> bool:
        """Whether each choice comes with the log-probabilities of its tokens."""
        return False

    @property
    def shows_canvas(self) -> bool:
        """Whether the stream is of canvases."""
        return self.diffusing or self.diffusion.stream == "canvas"

    @property
    def most_tokens(self) -> int | None:
        """Tokens that the text has at most; None where only the canvas limits it."""
        return self.max_tokens

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


def _places() -> dict[str, str]:
    models: dict[str, type[Body]] = {"": Ask, "diffusion.": Diffusion, "diffusion.constraints.": Constraints}
    places = {name: f"{place}{name}" for place, model in models.items() for name in model.model_fields}
    places |= {"schedule": places["remasking"], "fixed_tokens": places["fixed"], "prompt_ids": "prompt"}
    places["stop_ids"] = places["stop_token_ids"]
    return {key: place for key, place in places.items() if key in (*ALL_KEYS, "fixed_tokens", "prompt_ids", "seed")}


PLACES = _places()
"""Where a body has the sampler's fields."""


class CompletionRequest(Ask):
    """`POST /v1/completions`."""

    logprobs: Literal[0] | None = None
    """0: with the log-probability of each token of the text, in nats, when it was committed, with the tokens that were
    there then, as docs/service.md has it. Others are not recorded."""

    prompt: (
        _Prompt
        | Annotated[list[_Prompt], Field(max_length=MAX_CHOICES)]
        | list[int]
        | Annotated[list[list[int]], Field(max_length=MAX_CHOICES)]
    )
    """A string is text that the policy goes on from, special tokens as tokens; conversations are for
    `/v1/chat/completions`, which applies the chat template. A list of token ids is the prompt itself. A list of either
    is as many prompts."""
    add_special_tokens: bool = True
    """Whether a string begins as the tokenizer begins every text."""
    suffix: Annotated[str, Field(max_length=65536), AfterValidator(whole)] | None = None
    """What follows the completion (infill)."""

    @field_validator("logprobs", mode="before")
    @classmethod
    def _logprobs(cls, count: Any) -> Any:
        # To Python False is 0.
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
        """As of `Ask`."""
        return len(self.prompts)

    @property
    def returns_logprobs(self) -> bool:
        """As of `Ask`."""
        return self.logprobs is not None


class TextPart(Body):
    """A part of a message; text is the only kind."""

    type: Literal["text"]
    text: str

    @field_validator("type", mode="before")
    @classmethod
    def _type(cls, kind: Any) -> Any:
        if kind in _UNSUPPORTED_PARTS:
            message = f"`messages.content` has a part of the type `{kind}`; this service reads text only"
            raise RequestError(message, "unsupported_parameter", param="messages.content")
        return kind


_Parts = Annotated[list[TextPart], Field(max_length=MAX_PARTS)]


class Message(Body):
    """A turn of a conversation."""

    unsupported = _UNSUPPORTED_OF_MESSAGES
    place = "messages."

    role: Literal["system", "developer", "user", "assistant"]
    content: _Parts
    name: str | None = None
    """Taken and not used."""

    @field_validator("content", mode="before", json_schema_input_type=str | _Parts)
    @classmethod
    def _content(cls, content: Any) -> Any:
        return parts_of(content, "text")

    @property
    def text(self) -> str:
        """What was said."""
        return "".join(part.text for part in self.content)

    @property
    def turn(self) -> dict[str, str]:
        """As a chat template takes it."""
        return turn_of(self.role, self.text)


def parts_of(content: Any, kind: str) -> Any:
    """The parts of a turn's content; a string is one part of that kind. Raises ValueError."""
    if not isinstance(content, str | list):
        raise ValueError("must be a string or a list of parts")
    return [{"type": kind, "text": content}] if isinstance(content, str) else content


def turn_of(role: str, text: str) -> dict[str, str]:
    """A turn as a chat template takes it: OpenAI's developer is its system."""
    return {"role": "system" if role == "developer" else role, "content": text}


def _conversation(messages: list[Message]) -> list[Message]:
    check_texts([message.text for message in messages])
    return messages


_Conversation = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), AfterValidator(_conversation)]


class ChatRequest(Ask):
    """`POST /v1/chat/completions`."""

    messages: _Conversation
    logprobs: bool = False
    """As `0` in `/v1/completions`."""
    max_completion_tokens: Annotated[int, Field(ge=1, le=LARGEST)] | None = None
    """The newer name of `max_tokens`."""
    add_special_tokens: bool = False
    """Whether the prompt begins as the tokenizer begins every text; chat templates have that already."""
    chat_template_kwargs: Annotated[dict[str, bool | int | float | str], Field(max_length=MAX_VARIABLES)] = Field(
        default={}
    )
    """Variables of the chat template's own, as `{"enable_thinking": false}`."""

    @field_validator("chat_template_kwargs", mode="before")
    @classmethod
    def _variables(cls, given: Any) -> Any:
        if not isinstance(given, dict) or len(given) > MAX_VARIABLES or not all(map(_is_variable, given.items())):
            raise ValueError(
                f"must be at most {MAX_VARIABLES} names with true, false, a number or at most {MAX_VARIABLE_LENGTH} "
                "characters each"
            )
        return given

    @property
    def turns(self) -> list[dict[str, str]]:
        """The conversation, as a chat template takes it."""
        return [message.turn for message in self.messages]

    @property
    def most_tokens(self) -> int | None:
        """As of `Ask`."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def returns_logprobs(self) -> bool:
        """As of `Ask`."""
        return self.logprobs


def _with(name: str, kind: str) -> dict[str, Any]:
    return {"required": [name], "properties": {name: {"type": kind}}}


class TokenizeRequest(Body):
    """`POST /tokenize`: text as it is, or a conversation as the policy reads it."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [_with("prompt", "string"), _with("messages", "array")]})

    model: str | None = None
    prompt: Annotated[_Text, AfterValidator(whole)] | None = None
    messages: _Conversation | None = None

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("must have `prompt` or `messages`, and not both")
        return self


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[int], Field(max_length=65536)]


def is_prompt(value: Any) -> bool:
    """Whether it is a text, token ids, or a list of either."""
    kinds = (_is_text, is_id, _is_ids)
    return _is_text(value) or (
        isinstance(value, list) and bool(value) and any(all(map(is_one, value)) for is_one in kinds)
    )


def _is_variable(item: tuple[str, Any]) -> bool:
    name, value = item
    if not name.isidentifier() or len(name) > MAX_VARIABLE_LENGTH:
        return False
    if isinstance(value, str):
        return len(value) <= MAX_VARIABLE_LENGTH and is_whole(value)
    return isinstance(value, bool) or (isinstance(value, int | float) and abs(value) <= LARGEST)


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_ids(value: Any) -> bool:
    return type(value) is list and bool(value) and all(map(is_id, value))
