"""Reference implementation of the sampler: one row at a time in plain Python, the head on every slot."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from learner.counter import uniform
from learner.model.transformer import Transformer
from rollout.request import Request, SamplingOrder, SamplingParams, Schedule

LOTTERY_KEY = 1


@dataclass
class Slow:
    """The expected completion over the whole canvas, without stopping early."""

    tokens: list[int]
    step_map: list[int]
    logp: list[float]
    logp_raw: list[float]
    entropy: list[float]
    distribution_entropy: list[float]
    fallback: list[bool]
    num_steps: int = 0
    blocks: list[int] = field(default_factory=list)
    """Number of steps of each block."""
    writes: list[tuple[int, int, int, float, float]] = field(default_factory=list)
    """Step, slot, token and log-probabilities of every write."""
    num_idle: int = 0
    """Number of steps that wrote nothing."""


@torch.no_grad()
def sample(policy: Transformer, request: Request) -> Slow:
    """Sample the completion of one request."""
    params, mask_id = request.params, policy.config.mask_token_id
    # A block-causal policy's blocks are counted from the first column, and its canvas ends with a whole block.
    tail = len(request.prompt_ids) % params.block_length if policy.config.is_block_causal else 0
    n = math.ceil((tail + params.gen_length) / params.block_length) * params.block_length - tail
    tokens = [request.fixed_tokens.get(slot, mask_id) for slot in range(n)]
    slow = Slow(tokens, [-1] * n, [0.0] * n, [0.0] * n, [0.0] * n, [0.0] * n, [False] * n)
    is_open = [slot not in request.fixed_tokens for slot in range(n)]
    for begin in range(-tail, n, params.block_length):
        block = range(max(0, begin), begin + params.block_length)
        num_masked = params.block_length if policy.config.is_block_causal else sum(is_open[slot] for slot in block)
        in_block = num_post = 0
        is_settled = not params.edits or not any(is_open[slot] for slot in block)
        while any(is_open[slot] for slot in block) or not is_settled:
            slots = [slot for slot in block if is_open[slot]]
            written = [slot for slot in block if params.edits and not is_open[slot] and slow.step_map[slot] >= 0]
            logits = _logits(policy, request, slow.tokens)
            share = num_masked // max(1, params.num_block_steps) + (
                in_block < num_masked % max(1, params.num_block_steps)
            )
            drawn = {slot: _draw(logits[slot], request, slow.num_steps, slot) for slot in [*slots, *written]}
            chosen = _choose(params, request, slow.num_steps, logits, drawn, slots, share) if slots else []
            chosen += [(slot, False) for slot in written if _is_edited(params, logits[slot], slow.tokens[slot])]
            for slot, is_fallback in chosen:
                token, logp, slow.distribution_entropy[slot] = drawn[slot]
                distribution = logits[slot].double().softmax(-1)
                slow.tokens[slot], slow.step_map[slot], slow.logp[slot] = token, slow.num_steps, logp
                slow.logp_raw[slot] = distribution[token].log().item()
                slow.entropy[slot] = torch.special.entr(distribution).sum().item()
                slow.fallback[slot] = is_fallback
                is_open[slot] = False
            slow.writes += [
                (slow.num_steps, slot, slow.tokens[slot], slow.logp[slot], slow.logp_raw[slot])
                for slot in sorted(slot for slot, _ in chosen)
            ]
            num_post += not slots
            is_settled = not params.edits or not chosen or num_post >= params.max_post_steps
            slow.num_steps += bool(chosen)
            slow.num_idle += not chosen
            in_block += 1
        slow.blocks.append(in_block)
    return slow


def _logits(policy: Transformer, request: Request, tokens: list[int]) -> Tensor:
    start, mask_id = len(request.prompt_ids), policy.config.mask_token_id
    is_block_causal = policy.config.is_block_causal
    blocks = {"block_lengths_B": torch.tensor([request.params.block_length])} if is_block_causal else {}
    logits = policy(torch.tensor([[*request.prompt_ids, *tokens]]), **blocks)[0, start:]
    if request.params.cfg_scale:
        blind = policy(torch.tensor([[*[mask_id] * start, *tokens]]), **blocks)[0, start:]
        logits = blind + (request.params.cfg_scale + 1) * (logits - blind)
    logits[:, [mask_id, *request.params.forbidden_ids]] = -torch.inf
    return logits


def _draw_key(request: Request, step: int) -> int:
    """Return the key of a step's draws: of the seed of its level in a rollout tree."""
    num_levels = len(request.node_seeds) + 1
    num_steps = request.params.num_block_steps * request.params.num_blocks
    return request.draw_keys[min(step * num_levels // num_steps, num_levels - 1)]


def _draw(logits: Tensor, request: Request, step: int, slot: int) -> tuple[int, float, float]:
    """Sample a token; return it, its log-probability, and the entropy of the distribution it was sampled from."""
    params = request.params
    if params.temperature == 0:
        return int(logits.argmax()), 0.0, 0.0
    distribution = (logits / params.temperature).double().softmax(-1)
    order = distribution.argsort(descending=True, stable=True).tolist()
    kept, mass = [], 0.0
    for rank, token in enumerate(order):
        if (params.top_k and rank >= params.top_k) or mass >= params.top_p:
            break
        kept.append(token)
        mass += distribution[token].item()
    distribution = torch.zeros_like(distribution).index_copy(0, torch.tensor(kept), distribution[kept])
    distribution /= distribution.sum()
    u = uniform(torch.tensor(_draw_key(request, step)), step, slot).double().item()
    token = int((distribution.cumsum(0) <= u).sum())
    return token, distribution[token].log().item(), torch.special.entr(distribution).sum().item()


def _choose(
    params: SamplingParams,
    request: Request,
    step: int,
    logits: Tensor,
    drawn: dict[int, tuple[int, float, float]],
    slots: list[int],
    share: int,
) -> list[tuple[int, bool]]:
    """Choose the slots to commit, and flag those committed only to reach the minimum number."""
    distribution = {slot: logits[slot].double().softmax(-1) for slot in slots}
    confidence = {slot: distribution[slot].max().item() for slot in slots}
    if params.drawing is SamplingOrder.SAMPLE_THEN_SELECT:
        confidence = {slot: distribution[slot][drawn[slot][0]].item() for slot in slots}
    ranked = sorted(slots, key=lambda slot: (-confidence[slot], slot))
    if params.threshold is not None:
        passed = [slot for slot in slots if confidence[slot] > params.threshold]
        leftmost = params.schedule is Schedule.LEFT_TO_RIGHT
        least = 1 if leftmost or params.steps_per_block is None else max(1, share)
        more = slots[:1] if leftmost and not passed else ranked[len(passed) : least]
        return [(slot, False) for slot in passed] + [(slot, True) for slot in more]
    match params.schedule:
        case Schedule.QUOTA:
            return [(slot, False) for slot in ranked[:share]]
        case Schedule.FACTOR:
            count = 0
            while count < len(ranked) and confidence[ranked[count]] >= 1 - params.factor / (count + 2):
                count += 1
            return [(slot, count == 0) for slot in ranked[: max(1, count)]]
        case Schedule.ENTROPY_BOUND:
            return [(slot, False) for slot in _within_entropy_bound(params.entropy_bound, distribution, slots)]
        case Schedule.RANDOM:
            ticket = {
                slot: uniform(torch.tensor(_draw_key(request, step)), step, slot, LOTTERY_KEY).item() for slot in slots
            }
            return [(slot, False) for slot in sorted(slots, key=lambda slot: -ticket[slot])[:share]]
        case _:
            return [(slot, False) for slot in slots[:share]]


def _is_edited(params: SamplingParams, logits: Tensor, token: int) -> bool:
    assert params.editing_threshold is not None
    distribution = logits.double().softmax(-1)
    return int(distribution.argmax()) != token and distribution.max().item() > params.editing_threshold


def _within_entropy_bound(bound: float, distribution: dict[int, Tensor], slots: list[int]) -> list[int]:
    entropy = {slot: torch.special.entr(distribution[slot]).sum().item() for slot in slots}
    ranked = sorted(slots, key=lambda slot: (entropy[slot], slot))
    count = 1
    while count < len(ranked) and math.fsum(entropy[slot] for slot in ranked[:count]) <= bound:
        count += 1
    return ranked[:count]
