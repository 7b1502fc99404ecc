"""Adapter for lm-evaluation-harness: model `d1`, a checkpoint with our sampler in this process.

Needs the extra `d1[lm-eval]`. Only `d1 lm-eval` and user scripts import it.
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
from deploy.offline.evaluation.harness_arguments import HarnessArguments
from deploy.offline.policy import open_policy
from deploy.offline.sample.prepare import make_planner
from deploy.requests.errors import RequestError
from deploy.requests.families import Defaults
from deploy.requests.line import read_line
from deploy.requests.planner import RequestPlan
from deploy.requests.stopping import stop_text
from learner.likelihood import evidence_lower_bound
from learner.model.tokenizer import ChatTokenizer
from learner.seeds import fold, key_of
from rollout.config import EngineConfig
from rollout.request import Completion, Request, SamplingParams
from rollout.sampler import Sampler

_LOG = logging.getLogger("d1")
_SCORE_KEY = 61
_BLOCK = 32


@register_model("d1")
class DiffusionLM(LM):
    """Policy of a checkpoint, as a model of the harness."""

    def __init__(self, checkpoint: str, **given: Any) -> None:
        """Load the policy; `given` are the other fields of `HarnessArguments`, and arguments that the harness adds.

        Raises UserError if the checkpoint or an argument does not exist.
        """
        super().__init__()
        arguments = HarnessArguments.of({"checkpoint": checkpoint, **given})
        engine = EngineConfig(num_slots=arguments.slots, dtype=arguments.dtype)
        # The harness passes cuda:0 on machines without a GPU, too.
        device: Literal["cpu"] | None = "cpu" if arguments.device == "cpu" else None
        self._policy = open_policy(arguments.checkpoint, device, engine, Path(arguments.runs_dir))
        sampler, defaults = self._policy.sampler, self._policy.defaults
        if not isinstance(sampler, Sampler) or not isinstance(defaults, Defaults):
            raise UserError(f"{checkpoint} has no mask token; the harness is for policies that fill masked slots")
        self._sampler, self._is_of_run = sampler, defaults.max_canvas_tokens is None
        self._draws, self._slots, self._given = arguments.draws, arguments.slots, arguments.sampling
        if self._policy.tokenizer is None:
            raise UserError(f"{checkpoint} has no tokenizer, and the harness asks in texts")
        self._tokenizer: ChatTokenizer = self._policy.tokenizer
        # The harness passes rendered templates, whose special tokens must be parsed as tokens.
        self._planner = make_planner(self._policy, {})

    # Requests of the harness.

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Generate completions, each up to the first of its stop strings.

        Raises UserError, before any sampling, if a prompt leaves no room for a completion.
        """
        plans = [self._plan(*instance.args) for instance in requests]

        def text_of(index: int, completion: Completion) -> str:
            ids, ends = completion.token_ids, self._sampler.model.config.stop_ids
            return stop_text(plans[index], ids, self._tokenizer.decode, ends, is_complete=True).text

        def keep(index: int, text: str) -> None:
            self.cache_hook.add_partial("generate_until", requests[index].args, text)

        return self._generated([plan.masked_requests[0] for plan in plans], text_of, keep)

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Return the evidence lower bound of each continuation, and whether it is the greedy completion.

        The bound is estimated from random masks, so the likelier of two continuations may have the smaller bound. For
        a single token it is the exact log-probability.
        """
        _LOG.warning(
            "loglikelihood is a lower bound from %d masks each: a diffusion policy has no exact one", self._draws
        )
        pairs = [self._pair(*instance.args) for instance in requests]
        # One token per step: the closest to greedy decoding of a diffusion policy.
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
        """Raise UserError: not supported."""
        raise UserError(
            "a perplexity of whole documents (loglikelihood_rolling) is none that a masked diffusion policy has; take "
            "tasks that generate, or that choose between continuations"
        )

    # Chat templates and identity of the model.

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation to text. Its special tokens are parsed as tokens later."""
        return self._tokenizer.chat_text(chat_history, add_generation_prompt=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str:  # noqa: ARG002 - the harness' own
        """Return the source of the chat template."""
        return self._tokenizer.chat_template

    @property
    def tokenizer_name(self) -> str:
        """Cache key of this policy."""
        return self._policy.name.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Return model information for the results file."""
        return {"d1_checkpoint": self._policy.name, "d1_loglikelihood": f"evidence lower bound, {self._draws} masks"}

    def _plan(self, context: str, kwargs: Mapping[str, Any]) -> RequestPlan:
        wanted = dict(normalize_gen_kwargs(dict(kwargs)))
        stops, most = wanted.pop("until"), wanted.pop("max_gen_toks")
        del wanted["do_sample"]  # Already reflected in the temperature.
        values = self._given | {"temperature": 0.0, "max_tokens": most} | wanted
        if not self._is_of_run and "gen_length" not in values:
            # A checkpoint without a run: the task sets the length.
            block = values.setdefault("block_length", _BLOCK)
            values["gen_length"] = -(-most // block) * block
        try:
            plan = self._planner.plan(read_line({"prompt": context} | values))
        except RequestError as error:
            raise UserError(f"{error} (a prompt that begins {context[:60]!r})") from error
        # Not checked: a task may have more stop strings than a request.
        body = plan.body.model_copy(update={"stop": [stop for stop in stops if stop]})
        return replace(plan, body=body)

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
            self._sampler.generate(requests, done)
        return [values[index] for index in range(len(requests))]

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokenize context and continuation. A token may span them. White space between belongs to the continuation."""
        stripped = context.rstrip()
        whole = self._tokenizer.encode_plain(context + continuation)
        prompt = self._tokenizer.encode_plain(stripped)
        if not prompt:
            prompt, whole = [self._sampler.model.config.eos_token_id], [self._sampler.model.config.eos_token_id, *whole]
        text = whole[len(prompt) :]
        most = self._sampler.model.config.max_sequence_length
        if len(whole) > most:
            raise UserError(
                f"a context and its continuation have {len(whole)} tokens; this policy reads at most {most}"
            )
        return prompt, text

    def _bound(self, prompt: Sequence[int], text: Sequence[int]) -> float:
        seed = fold(_SCORE_KEY, key_of(" ".join(map(str, (*prompt, *text)))))
        model = self._sampler.model
        return evidence_lower_bound(model, prompt, text, num_draws=self._draws, max_rows=self._slots, seed=seed)


def _greedy(length: int) -> SamplingParams:
    return SamplingParams(
        gen_length=length, block_length=length, num_denoise_steps=length, temperature=0.0, stop_ids=()
    )
