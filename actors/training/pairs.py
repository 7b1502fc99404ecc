"""Stored preference pairs as the batches of a run's rounds: they replace completions that are sampled and graded."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from actors.plan import EpochOrder
from actors.spec import RunSpec
from actors.training.sft.data import encode_prompt
from learner.batch import CompletionBatch, RolloutBatch, pad_rows
from learner.estimators import SamplerFacts
from learner.model.config import TransformerConfig
from learner.model.deferred import torch
from learner.model.tokenizer import ChatTokenizer
from learner.seeds import fold
from rewards.data.pairs import PreferencePair, read_pairs

_MASK_KEY = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedPair:
    """A pair in tokens, as arrays of C integers: there may be many pairs."""

    prompt: array[int]
    """The prompt."""
    completions: tuple[array[int], array[int]]
    """The chosen and the rejected completion, without an end of text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairData:
    """The pairs of a run."""

    pairs: tuple[EncodedPair, ...]
    """Those with a prompt that fits the canvas, in the order of the file."""
    num_overlong: int
    """Pairs whose prompt is longer than `rollout.max_prompt_tokens`: left out, or cut if the recipe says so."""

    @property
    def facts(self) -> dict[str, Any]:
        """Fields of the run log's `pairs` event."""
        chosen, rejected = zip(*(pair.completions for pair in self.pairs), strict=True)
        return {
            "num_pairs": len(self.pairs),
            "num_overlong": self.num_overlong,
            "mean_chosen_tokens": round(fmean(map(len, chosen)), 1),
            "mean_rejected_tokens": round(fmean(map(len, rejected)), 1),
        }


def load_pairs(spec: RunSpec, tokenizer: ChatTokenizer) -> PairData:
    """Load and encode the recipe's preference pairs.

    Raises ValueError, in one sentence, if `learner.pairs` has an invalid line, a completion that is longer than the
    canvas, or fewer pairs than a round takes.
    """
    try:
        return _load(spec, tokenizer)
    except ValueError as error:
        raise ValueError(f"learner.pairs: {error}") from error


def _load(spec: RunSpec, tokenizer: ChatTokenizer) -> PairData:
    path, rollout = spec.learner.pairs, spec.rollout
    assert path is not None, "the recipe has pairs"
    limit, pairs, num_overlong, too_long = rollout.max_prompt_tokens, list[EncodedPair](), 0, list[tuple[str, int]]()
    for pair in read_pairs(path):
        encoded = _encode(pair, tokenizer)
        named = zip(("chosen", "rejected"), encoded.completions, strict=True)
        # The end of text may be missing, as in SFT.
        lengths = [(f"{pair.place}: {name}", len(ids)) for name, ids in named]
        too_long += [found for found in lengths if found[1] > rollout.sampling.gen_length]
        if len(encoded.prompt) > limit:
            num_overlong += 1
            if rollout.overlong_prompts == "drop":
                continue
        pairs.append(replace(encoded, prompt=encoded.prompt[-limit:]))
    _check_lengths(too_long, rollout.sampling.gen_length)
    if len(pairs) < spec.learner.groups_per_round:
        dropped = f" with prompts of at most rollout.max_prompt_tokens {limit}" if num_overlong else ""
        raise ValueError(
            f"{path} has {len(pairs)} pairs{dropped}, and a round takes "
            f"learner.groups_per_round {spec.learner.groups_per_round}, each once; take fewer of them, or more pairs"
        )
    return PairData(pairs=tuple(pairs), num_overlong=num_overlong)


def _encode(pair: PreferencePair, tokenizer: ChatTokenizer) -> EncodedPair:
    chosen, rejected = (array("i", tokenizer.encode_plain(text)) for text in (pair.chosen, pair.rejected))
    prompt = array("i", encode_prompt(pair.messages, pair.place, tokenizer))
    return EncodedPair(prompt=prompt, completions=(chosen, rejected))


def _check_lengths(too_long: Sequence[tuple[str, int]], limit: int) -> None:
    """Raise ValueError if there are completions above the limit, given the place and length of each."""
    if not too_long:
        return
    (place, length), most = too_long[0], max(length for _, length in too_long)
    fix = "leave that pair out" if len(too_long) == 1 else f"leave out the pairs of {len(too_long)} such completions"
    raise ValueError(
        f"{place} has {length} tokens, and rollout.sampling.gen_length is {limit}; take at least {most}, or {fix}"
    )


class PairBatches:
    """Batches of stored pairs: a pure function of pairs, seed and round."""

    def __init__(self, spec: RunSpec, data: PairData, policy: TransformerConfig, sampler: SamplerFacts) -> None:
        """Make the batches of a run of `policy`; `sampler` says which blocks its canvases have."""
        self._spec, self._pairs, self._sampler = spec, data.pairs, sampler
        self._order = EpochOrder(len(data.pairs), spec.seed)
        self._num_slots = spec.rollout.sampling.max_slots(is_block_causal=policy.is_block_causal)
        self._eos_id, self._stop_ids = policy.eos_token_id, torch.tensor(policy.stop_ids)

    def of_round(self, round_index: int) -> RolloutBatch:
        """Make the batch of a round: a group of two for each pair, with reward 1 for the chosen completion.

        Whole blocks count as denoised, up to the one in which the text ends, as in a sampled completion.
        """
        count = self._spec.learner.groups_per_round
        items = [self._order.item_at(round_index * count + group) for group in range(count)]
        texts = self._texts([(index, epoch, side) for index, epoch in items for side in (0, 1)])
        block_BL = self._sampler.blocks(texts)
        last_B1 = block_BL.gather(1, texts.completion_lengths[:, None] - 1)
        is_chosen = torch.tensor([True, False]).repeat(count)
        unrecorded = torch.zeros(texts.num_rows, self._num_slots)
        return RolloutBatch(
            **texts.given(),
            rewards=is_chosen.float(),
            reward_parts=torch.zeros(texts.num_rows, 0),
            correct=is_chosen,
            truncated=texts.completion_ids.gather(1, texts.completion_lengths[:, None] - 1)[:, 0] != self._eos_id,
            is_stop=torch.isin(texts.completion_ids, self._stop_ids),
            group_ids=torch.arange(count).repeat_interleave(2),
            step_map=torch.where(block_BL <= last_B1, 0, -1),
            commit_logp=unrecorded,
            commit_entropy=unrecorded.clone(),
            commit_law_entropy=unrecorded.clone(),
            fallback=unrecorded.bool(),
            num_forwards=torch.zeros(texts.num_rows, dtype=torch.int64),
            policy_versions=torch.zeros(texts.num_rows, dtype=torch.int64),
        )

    def _texts(self, rows: Sequence[tuple[int, int, int]]) -> CompletionBatch:
        """Collate completions, given their pair's index and epoch, and their side of it."""
        prompts = [self._pairs[index].prompt for index, _, _ in rows]
        texts = [self._pairs[index].completions[side] for index, _, side in rows]
        most = self._spec.rollout.sampling.gen_length
        return CompletionBatch(
            prompt_ids=pad_rows(prompts, self._eos_id),
            prompt_lengths=torch.tensor([len(prompt) for prompt in prompts]),
            completion_ids=pad_rows(texts, self._eos_id, self._num_slots),
            completion_lengths=torch.tensor([min(len(text) + 1, most) for text in texts]),
            sample_keys=torch.tensor([fold(self._spec.seed, _MASK_KEY, *row) for row in rows]),
        )
