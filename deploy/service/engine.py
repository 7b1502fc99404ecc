"""The engine: prompts to completions with the policy that is current, which can be swapped at any moment."""

from __future__ import annotations

import json
import secrets
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.registry import PolicyVersion
from learner.counter import fold
from learner.model.tokenizer import ChatTokenizer
from rollout.request import Completion, FinishReason, Request, SamplingParams
from rollout.sampler import Sampler


class InvalidPromptError(ValueError):
    """What was asked cannot be answered; the message tells the client why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedText:
    """One completion."""

    text: str
    """Its text, special tokens left out."""
    num_tokens: int
    """Tokens of the text, an end of text included."""
    is_cut: bool
    """Whether it ended for lack of room and not by an end of text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """The completions of one request."""

    policy: PolicyVersion
    """The version that made all of them."""
    texts: tuple[GeneratedText, ...]
    """The completions of the first prompt, then of the second, ..."""
    num_prompt_tokens: int
    """Tokens of all prompts, the chat template included."""


class PolicyEngine:
    """Completes prompts. Threads may call it at the same time, and swap the policy meanwhile.

    The sampler and what is known of its version are one tuple that is replaced whole. A request takes the tuple once:
    a swap cannot touch it, and its answer names the version that made it.
    """

    def __init__(self, tokenizer_dir: Path, params: SamplingParams, sampler: Sampler, policy: PolicyVersion) -> None:
        """Serve `policy` first.

        Args:
            tokenizer_dir: a checkpoint directory of the run; all its versions share the tokenizer.
            params: how the policy was trained to sample; requests may change the temperature only.
            sampler: the first policy.
            policy: its version.
        """
        self.params = params
        self._tokenizer = ChatTokenizer(tokenizer_dir)
        self._special_ids = _special_ids(tokenizer_dir)
        self._template_ids = self._count_special(self._encode_turn("x"))
        self._swap_lock = threading.Lock()
        self._current = (sampler, policy)
        self._scored = policy if policy.num_problems else None
        self._num_swaps = 0

    @property
    def policy(self) -> PolicyVersion:
        """The version that a request would get now."""
        return self._current[1]

    @property
    def scored(self) -> PolicyVersion | None:
        """The version that was last evaluated, of those heard of."""
        return self._scored

    @property
    def num_swaps(self) -> int:
        """Times that the weights were replaced."""
        return self._num_swaps

    def swap(self, sampler: Sampler, policy: PolicyVersion) -> None:
        """Requests that start from now on get this policy."""
        assert sampler.policy_version == policy.version, "a policy is announced under the version of its sampler"
        with self._swap_lock:
            self._current = (sampler, policy)
            self._num_swaps += 1
        self.learn(policy)

    def learn(self, policy: PolicyVersion) -> None:
        """Take over the facts of an announcement; the weights stay as they are."""
        with self._swap_lock:
            sampler, served = self._current
            if policy.has_same_weights(served):
                self._current = (sampler, policy)
            if policy.num_problems:
                self._scored = policy

    def complete(
        self,
        prompts: Sequence[str | list[int]],
        *,
        max_tokens: int | None,
        temperature: float | None,
        seed: int | None,
        num_choices: int,
    ) -> Generation:
        """`num_choices` completions of each prompt, by one policy version. Raises InvalidPromptError."""
        sampler, policy = self._current
        gen_length = self.params.gen_length
        if max_tokens is not None and max_tokens > gen_length:
            raise InvalidPromptError(f"max_tokens is {max_tokens}; this policy fills at most {gen_length} tokens.")
        encoded = [self._encode(prompt, sampler) for prompt in prompts]
        # Temperature 0 is what held-out accuracy is measured at, so it is what users get unless they ask otherwise.
        params = self.params.model_copy(update={"temperature": temperature or 0.0})
        key = secrets.randbits(63) if seed is None else seed
        requests = [
            Request(prompt_ids=tuple(ids), params=params, seed=fold(key, index, choice))
            for index, ids in enumerate(encoded)
            for choice in range(num_choices)
        ]
        texts = tuple(self._text(completion, max_tokens or gen_length) for completion in sampler.generate(requests))
        return Generation(policy=policy, texts=texts, num_prompt_tokens=sum(map(len, encoded)))

    def _encode(self, prompt: str | list[int], sampler: Sampler) -> list[int]:
        config = sampler.model.config
        if isinstance(prompt, str):
            ids = self._encode_turn(prompt)
            # A special token in a user's text would end their turn and speak for others, or be denoised as a slot.
            if spelled := self._count_special(ids) - self._template_ids:
                token = self._tokenizer.tokens([min(spelled)])[0]
                raise InvalidPromptError(f"The prompt spells {token}, a special token of this policy.")
        else:
            ids = prompt
            if any(not 0 <= token < config.vocab_size for token in ids):
                raise InvalidPromptError(f"Token ids of this policy lie between 0 and {config.vocab_size - 1}.")
            if config.mask_token_id in ids:
                raise InvalidPromptError(f"The prompt has the mask id {config.mask_token_id}; a prompt has no slots.")
        room = config.max_sequence_length - self.params.gen_length
        if len(ids) > room:
            raise InvalidPromptError(f"The prompt has {len(ids)} tokens; this policy reads at most {room}.")
        return ids

    def _encode_turn(self, text: str) -> list[int]:
        return self._tokenizer.encode_chat([{"role": "user", "content": text}])

    def _count_special(self, ids: Sequence[int]) -> Counter[int]:
        return Counter(token for token in ids if token in self._special_ids)

    def _text(self, completion: Completion, max_tokens: int) -> GeneratedText:
        num_tokens = min(completion.num_tokens, max_tokens)
        return GeneratedText(
            text=self._tokenizer.decode(completion.token_ids[:num_tokens].tolist()),
            num_tokens=num_tokens,
            is_cut=completion.finish_reason is FinishReason.LENGTH or num_tokens < completion.num_tokens,
        )


def _special_ids(tokenizer_dir: Path) -> frozenset[int]:
    added = json.loads((tokenizer_dir / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    return frozenset(token["id"] for token in added if token["special"])
