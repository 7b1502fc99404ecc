"""lm-evaluation-harness on a checkpoint in this process: the harness' model `d1`, over our sampler.

Needs the extra `d1[lm-eval]`. Nothing but `d1 lm-eval`, and a user's own script, imports it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from deploy.errors import UserError
from deploy.evaluation.harness_arguments import HarnessArguments
from deploy.requests.ending import ending_of
from deploy.requests.line import read_line
from deploy.requests.planner import RequestPlan
from deploy.requests.refusals import RequestError
from deploy.sampling.policy import open_policy
from deploy.sampling.prepare import Options
from learner.keys import fold, key_of
from learner.likelihood import evidence_lower_bound
from learner.model.tokenizer import ChatTokenizer
from rollout.config import EngineConfig
from rollout.request import Completion, Request, SamplingParams

_LOG = logging.getLogger("d1")
_SCORE_KEY = 61
_BLOCK = 32


@register_model("d1")
class DiffusionLM(LM):
    """A checkpoint's policy, as the harness asks a model."""

    def __init__(self, checkpoint: str, **given: Any) -> None:
        """Load the policy.

        Args:
            checkpoint: a run or checkpoint, as every command of d1 names them.
            given: the other fields of `HarnessArguments`, and what the harness says of its own accord.

        Raises:
            UserError: there is no such checkpoint, or no such argument.
        """
        super().__init__()
        arguments = HarnessArguments.of({"checkpoint": checkpoint, **given})
        engine = EngineConfig(num_slots=arguments.slots, dtype=arguments.dtype)
        # It says cuda:0 on machines without a GPU too.
        device: Literal["cpu"] | None = "cpu" if arguments.device == "cpu" else None
        self._policy = open_policy(arguments.checkpoint, device, engine, Path(arguments.runs_dir))
        self._draws, self._slots, self._given = arguments.draws, arguments.slots, arguments.shape
        if self._policy.tokenizer is None:
            raise UserError(f"{checkpoint} has no tokenizer, and the harness asks in texts")
        self._tokenizer: ChatTokenizer = self._policy.tokenizer
        # The harness writes templates out, whose special tokens are read as such.
        self._planner = Options(values={}, keep_after_eos=False).planner(self._policy)

    # What the harness asks.

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Completions, each up to the first of its stops.

        Raises UserError for a prompt that leaves no room, before anything is denoised.
        """
        plans = [self._plan(*instance.args) for instance in requests]

        def text_of(index: int, completion: Completion) -> str:
            ids, ends = completion.token_ids, self._policy.config.stop_ids
            return ending_of(plans[index], ids, self._tokenizer.decode, ends, is_whole=True).text

        def keep(index: int, text: str) -> None:
            self.cache_hook.add_partial("generate_until", requests[index].args, text)

        return self._generated([plan.masked_requests[0] for plan in plans], text_of, keep)

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """The evidence lower bound of each continuation, and whether it is what the policy answers at temperature 0.

        A lower bound, and up to the noise of its masks: of two continuations the likelier one need not have the greater
        bound. For a single token it is the log-probability.
        """
        _LOG.warning(
            "loglikelihood is a lower bound from %d masks each: a diffusion policy has no exact one", self._draws
        )
        pairs = [self._pair(*instance.args) for instance in requests]
        # One token a step: as greedy as a diffusion policy decodes.
        greedy = self._generated(
            [Request(prompt_ids=tuple(prompt), params=_greedy(len(text)), seed=0) for prompt, text in pairs],
            lambda index, completion: completion.token_ids.tolist() == pairs[index][1],
        )
        found = []
        for instance, (prompt, text), is_greedy in zip(tqdm(requests, desc="d1: bounds"), pairs, greedy, strict=True):
            answer = self._bound(prompt, text), is_greedy
            self.cache_hook.add_partial("loglikelihood", instance.args, answer)
            found.append(answer)
        return found

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:  # noqa: ARG002 - the harness' own
        """Not offered. Raises UserError."""
        raise UserError(
            "a perplexity of whole documents (loglikelihood_rolling) is none that a masked diffusion policy has; take "
            "tasks that generate, or that choose between continuations"
        )

    # How it writes.

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, whose special tokens are read as such again."""
        return self._tokenizer.chat_text(chat_history, add_generation_prompt=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str:  # noqa: ARG002 - the harness' own
        """The template's own text."""
        return self._tokenizer.chat_template

    @property
    def tokenizer_name(self) -> str:
        """What tells apart what is cached of several policies."""
        return self._policy.name.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What a file of results says of the model."""
        return {"d1_checkpoint": self._policy.name, "d1_loglikelihood": f"evidence lower bound, {self._draws} masks"}

    def _plan(self, context: str, kwargs: Mapping[str, Any]) -> RequestPlan:
        wanted = dict(normalize_gen_kwargs(dict(kwargs)))
        stops, most = wanted.pop("until"), wanted.pop("max_gen_toks")
        del wanted["do_sample"]  # What it comes to is in the temperature.
        values = self._given | {"temperature": 0.0, "max_tokens": most} | wanted
        if self._policy.defaults.room is not None and "gen_length" not in values:
            # Of no run: as long as the task asks for.
            block = values.setdefault("block_length", _BLOCK)
            values["gen_length"] = -(-most // block) * block
        try:
            plan = self._planner.plan(read_line({"prompt": context} | values))
        except RequestError as error:
            raise UserError(f"{error} (a prompt that begins {context[:60]!r})") from error
        return replace(plan, stops=tuple(stop for stop in stops if stop))

    def _generated(
        self,
        requests: Sequence[Request],
        value_of: Callable[[int, Completion], Any],
        keep: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        values: dict[int, Any] = {}

        def done(index: int, completion: Completion) -> None:
            values[index] = value_of(index, completion)
            if keep is not None:
                keep(index, values[index])
            bar.update()

        with tqdm(total=len(requests), desc="d1: completions") as bar:
            self._policy.sampler.generate(requests, done)
        return [values[index] for index in range(len(requests))]

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The ids of both. A token may span the boundary; white space there belongs to the continuation."""
        stripped = context.rstrip()
        whole = self._tokenizer.encode_completion(context + continuation)
        prompt = self._tokenizer.encode_completion(stripped)
        if not prompt:
            prompt, whole = [self._policy.config.eos_token_id], [self._policy.config.eos_token_id, *whole]
        text = whole[len(prompt) :]
        most = self._policy.config.max_sequence_length
        if len(whole) > most:
            raise UserError(
                f"a context and its continuation have {len(whole)} tokens; this policy reads at most {most}"
            )
        return prompt, text

    def _bound(self, prompt: Sequence[int], text: Sequence[int]) -> float:
        seed = fold(_SCORE_KEY, key_of(" ".join(map(str, (*prompt, *text)))))
        model = self._policy.sampler.model
        return evidence_lower_bound(model, prompt, text, num_draws=self._draws, most_rows=self._slots, seed=seed)


def _greedy(length: int) -> SamplingParams:
    return SamplingParams(
        gen_length=length, block_length=length, num_denoise_steps=length, temperature=0.0, stop_ids=()
    )
