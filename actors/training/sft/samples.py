"""What the policy says in the midst of SFT: completions of held-out examples, made by the learner itself.

All ranks make the same ones: under FSDP a forward is a collective. So that none of them ends earlier than another, a
completion takes a number of forwards that does not depend on what is predicted: its canvas is filled in even shares,
end of text or not.
"""

from __future__ import annotations

from actors.spec import RunSpec
from learner.model.tokenizer import ChatTokenizer
from learner.parallel.sharding import ShardedPolicy
from learner.sft.documents import Documents
from rollout.config import EngineConfig
from rollout.request import Cache, Completion, Request, SamplingParams, Schedule, canvas_of
from rollout.sampler import Sampler

# Slots of a plain text that its continuation is asked for behind, at most.
_MOST_OF_TEXT = 32


def completed(
    policy: ShardedPolicy, held_out: Documents, spec: RunSpec, tokenizer: ChatTokenizer
) -> list[dict[str, str]]:
    """Prompts and completions of `sft.num_samples` held-out examples, where their prompts leave room. A collective.

    They are spread over the examples: neighbours may be chunks of one text, or of one prompt. Temperature is 0. Of a
    plain text the beginning is the prompt.
    """
    params, num_rows, count = _fixed(spec.evaluated_params[0]), held_out.num_rows, spec.sft.num_samples
    prompts = [_prompt(held_out, index * num_rows // count) for index in range(count)]
    asked = [Request(prompt_ids=prompt, params=params, seed=0) for prompt in prompts if prompt]
    longest = policy.config.max_sequence_length
    requests = [request for request in asked if canvas_of(request, policy.config).end <= longest]
    # A cache of finished blocks would save forwards, and need a memory beside the learner's.
    engine = EngineConfig(num_slots=max(1, len(requests)), block_cache=False)
    with policy.without_gradients():
        completions = Sampler(policy.module, 0, engine).generate(requests)
    return [
        {
            "prompt": tokenizer.decode(request.prompt_ids),
            "completion": tokenizer.decode(_ended(completion, policy.config.stop_ids)),
        }
        for request, completion in zip(requests, completions, strict=True)
    ]


def _prompt(documents: Documents, row: int) -> tuple[int, ...]:
    length, of_prompt = int(documents.lengths[row]), int(documents.prompt_lengths[row])
    return tuple(documents.ids[row, : of_prompt or min(_MOST_OF_TEXT, length // 2)].tolist())


def _fixed(params: SamplingParams) -> SamplingParams:
    """The same slots in a number of steps that is known: the recipe's, or two slots a step."""
    steps = params.num_block_steps if params.is_by_shares else max(1, params.block_length // 2)
    return SamplingParams(
        gen_length=params.gen_length,
        block_length=params.block_length,
        steps_per_block=steps,
        schedule=params.schedule if params.is_by_shares else Schedule.QUOTA,
        temperature=0.0,
        forbidden_ids=params.forbidden_ids,
        stop_ids=(),
        cache=Cache.NONE,
    )


def _ended(completion: Completion, stop_ids: tuple[int, ...]) -> list[int]:
    """The tokens before the first end of text."""
    ids: list[int] = completion.token_ids.tolist()
    return ids[: next((place for place, token in enumerate(ids) if token in stop_ids), len(ids))]
