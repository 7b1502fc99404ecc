"""Reference implementation of every algorithm's objective: plain loops in float64.

Only the random masks are taken from the learner. Canvases are built here, one at a time. Each formula is written out
separately, with the tokens that it scores and their weights. Slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from learner.batch import GroupedBatch
from learner.estimators import Corruption
from learner.model.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Draw:
    """One canvas: its masked slots, and the likelihoods of their tokens under three policies."""

    number: int
    part: int
    masked: list[int]
    scored: list[int]
    new: dict[int, Tensor]
    old: dict[int, Tensor]
    reference: dict[int, Tensor]
    new_logits: Tensor
    old_logits: Tensor


@dataclass(frozen=True, slots=True)
class Row:
    """One completion."""

    group: int
    reward: float
    parts: list[float]
    correct: bool
    length: int
    width: int
    denoised: int
    steps: list[int]
    fallback: list[bool]
    draws: list[Draw]
    sampled: list[float]
    tokens: list[int]
    entropy: list[float]
    law_entropy: list[float]
    says_something: list[bool]
    """Whether each slot's token is not an end of text."""
    step_rewards: list[float]
    """Rewards of the completions of the states before the steps."""
    nodes: list[int]
    """Keys of the nodes of a rollout tree that the completion passed through, one per level."""


def rows_of(
    policies: tuple[Transformer, Transformer, Transformer],
    batch: GroupedBatch,
    corruption: Corruption,
    temperature: float | None = None,
) -> list[Row]:
    """Build all completions with their canvases, except canvases without masks. The policies are new, old and
    reference, in float64. With a temperature, tokens are scored as sampled: at that temperature and without the mask
    id."""
    rows = []
    for row in range(batch.num_rows):
        draws = []
        for number, canvas in enumerate((corruption.rows == row).nonzero()[:, 0].tolist()):
            masked = corruption.masked[canvas].nonzero()[:, 0].tolist()
            if not masked:
                continue
            scored = corruption.scored[canvas].nonzero()[:, 0].tolist()
            prompt = batch.prompt_ids[row, : batch.prompt_lengths[row]].clone()
            mask_id = policies[0].config.mask_token_id
            if corruption.prompt_masked is not None:
                prompt[corruption.prompt_masked[canvas, : len(prompt)]] = mask_id
            completion = batch.completion_ids[row].clone()
            completion[masked] = mask_id
            part = 0 if corruption.parts is None else int(corruption.parts[canvas])
            targets = batch.completion_ids[row]
            if corruption.targets is not None:
                assert batch.step_answers is not None
                targets = batch.step_answers[row, part].long()
            ids = torch.cat((prompt, completion))[None]
            values: list[dict[int, Tensor]] = []
            raw = [policy(ids)[0, len(prompt) :] for policy in policies]
            for of_policy in raw:
                logits = of_policy
                if temperature is not None:
                    logits = logits / temperature
                    logits[:, mask_id] = -torch.inf
                logps = logits.log_softmax(-1)
                values.append({slot: logps[slot, targets[slot]] for slot in masked})
            new, old, reference = values
            detached = [{slot: value.detach() for slot, value in some.items()} for some in (old, reference)]
            draws.append(Draw(number, part, masked, scored, new, *detached, raw[0], raw[1].detach()))
        rows.append(
            Row(
                group=int(batch.group_index[row]),
                reward=float(batch.rewards[row]),
                parts=batch.reward_parts[row].tolist(),
                correct=bool(batch.correct[row]),
                length=int(batch.completion_lengths[row]),
                width=batch.num_slots,
                denoised=sum(step >= 0 for step in batch.step_map[row].tolist()),
                steps=batch.step_map[row].tolist(),
                fallback=batch.fallback[row].tolist(),
                draws=draws,
                sampled=batch.commit_logp[row].tolist(),
                tokens=batch.completion_ids[row].tolist(),
                entropy=batch.commit_entropy[row].tolist(),
                law_entropy=batch.commit_law_entropy[row].tolist(),
                says_something=(~batch.is_stop[row]).tolist(),
                step_rewards=[] if batch.step_rewards is None else batch.step_rewards[row].tolist(),
                nodes=[] if batch.node_keys is None else batch.node_keys[row].tolist(),
            )
        )
    return rows


# Advantages, one group at a time.


def groups_of(rows: list[Row]) -> Iterator[list[Row]]:
    for _, members in groupby(rows, key=lambda row: row.group):
        yield list(members)


def group_mean(rows: list[Row]) -> list[float]:
    return [row.reward - sum(r.reward for r in group) / len(group) for group in groups_of(rows) for row in group]


def group_z(rows: list[Row]) -> list[float]:
    advantages = []
    for group in groups_of(rows):
        mean = sum(row.reward for row in group) / len(group)
        std = math.sqrt(sum((row.reward - mean) ** 2 for row in group) / len(group))
        advantages += [(row.reward - mean) / (std + 1e-4) for row in group]
    return advantages


def leave_one_out(rows: list[Row]) -> list[float]:
    advantages = []
    for group in groups_of(rows):
        for row in group:
            others = [other.reward for other in group if other is not row]
            advantages.append(row.reward - sum(others) / len(others))
    return advantages


# Shared by several algorithms.


def ppo(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def k3(new: Tensor, against: Tensor) -> Tensor:
    return (against - new).exp() - (against - new) - 1


def masked_text(row: Row) -> Iterator[tuple[int, Draw]]:
    """Yield the tokens of the text at the slots that a canvas masks."""
    for draw in row.draws:
        for slot in draw.masked:
            if slot < row.length:
                yield slot, draw


def prompt_only(row: Row) -> Iterator[tuple[int, Draw]]:
    """Yield all tokens of the text, on one canvas with everything masked."""
    assert [draw.masked for draw in row.draws] == [list(range(row.width))]
    return masked_text(row)


def by_segments(row: Row, begins: list[int]) -> Iterator[tuple[list[int], Draw]]:
    """Yield the text tokens that each segment of denoise steps committed, on the canvas at the segment's start.
    Segments without such tokens have no canvas."""
    wanted = []
    for begin, end in zip(begins, [*begins[1:], row.width], strict=True):
        text = [slot for slot in range(row.length) if begin <= row.steps[slot] < end]
        wanted += [(begin, text)] if text else []
    for (begin, text), draw in zip(wanted, row.draws, strict=True):
        assert draw.masked == [slot for slot, step in enumerate(row.steps) if step < 0 or step >= begin]
        yield text, draw


def by_steps(row: Row) -> Iterator[tuple[list[int], Draw]]:
    """Yield the same with every step as a segment."""
    return by_segments(row, list(range(max(row.steps) + 1)))


# The algorithms.


def _diffu_grpo(rows: list[Row], tokens: Callable[[Row], Iterator[tuple[int, Draw]]]) -> Tensor:
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row, advantage in zip(rows, group_mean(rows), strict=True):
        for slot, draw in tokens(row):
            ratio = (draw.new[slot] - draw.old[slot]).exp()
            total = total + ppo(ratio, advantage, 0.5, 0.5) + 0.04 * k3(draw.new[slot], draw.reference[slot])
            count += 1
    return total / count


def diffu_grpo(rows: list[Row]) -> Tensor:
    return _diffu_grpo(rows, prompt_only)


def diffu_grpo_parity(rows: list[Row]) -> Tensor:
    """The token mean of each group (a worker's micro-batch), averaged."""
    losses, advantages = [], iter(group_mean(rows))
    for group in groups_of(rows):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for row in group:
            advantage = next(advantages)
            for slot, draw in prompt_only(row):
                ratio = (draw.new[slot] - draw.old[slot]).exp()
                total = total + ppo(ratio, advantage, 0.5, 0.5) + 0.04 * k3(draw.new[slot], draw.reference[slot])
                count += 1
        losses.append(total / count)
    return torch.stack(losses).mean()


def wd1(rows: list[Row]) -> Tensor:
    losses, advantages = [], iter(group_mean(rows))
    for group in groups_of(rows):
        own = torch.tensor([next(advantages) for _ in group], dtype=torch.float64)
        weights = own.softmax(0) - (-own).softmax(0)
        losses.append(
            sum(
                -weight * sum(draw.new[slot] for slot, draw in prompt_only(row))
                for row, weight in zip(group, weights, strict=True)
            )
        )
    return torch.stack(losses).mean()


def coupled_grpo(rows: list[Row]) -> Tensor:
    """Half the fully masked value, plus half of 1 / t or 1 / (1 - t) times the one under the mask or its complement."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    t = MASK_RATIO["value"]
    weights = [1.0, 1 / t, 1 / (1 - t)]
    for row, advantage in zip(rows, leave_one_out(rows), strict=True):
        for slot in range(row.length):
            hiding = [(weights[draw.number] / 2, draw) for draw in row.draws if slot in draw.masked]
            assert len(hiding) == 2, "once fully masked, once in the mask or its complement"
            new = sum(weight * draw.new[slot] for weight, draw in hiding)
            old = sum(weight * draw.old[slot] for weight, draw in hiding)
            reference = sum(weight * draw.reference[slot] for weight, draw in hiding)
            total = total + ppo((new - old).exp(), advantage, 0.5, 0.5) + 0.01 * k3(new, reference)
            count += 1
    return total / count


MASK_RATIO = {"value": 0.5}
"""Input of `coupled_grpo`: the sampled t."""


def unigrpo(rows: list[Row]) -> Tensor:
    losses = []
    for row, advantage in zip(rows, group_z(rows), strict=True):
        values = [
            ppo((draw.new[slot] - draw.old[slot]).exp(), advantage, 0.2, 0.2)
            + 0.04 * k3(draw.new[slot], draw.reference[slot])
            for slot, draw in masked_text(row)
        ]
        losses.append(torch.stack(values).mean() if values else None)
    return sum(loss for loss in losses if loss is not None) / len(rows)


def _lower(row: Row, name: str = "new") -> Tensor:
    """The mean over draws of the mean log-probability of a masked token of the text."""
    values = [torch.stack([getattr(draw, name)[slot] for slot in _in_text(row, draw)]).mean() for draw in row.draws]
    assert len(values) == NUM_DRAWS["value"], "every draw masks some of the text"
    return torch.stack(values).mean()


def _in_text(row: Row, draw: Draw) -> list[int]:
    return [slot for slot in draw.masked if slot < row.length]


def _upper(row: Row, beta: float) -> Tensor:
    """1 / beta times the mean over tokens of log mean over draws of p^beta / t where masked."""
    logs = []
    for slot in range(row.length):
        powers = [
            (beta * draw.new[slot]).exp() / (len(_in_text(row, draw)) / row.length)
            for draw in row.draws
            if slot in draw.masked
        ]
        if powers:
            logs.append((sum(powers) / NUM_DRAWS["value"]).log())
    return torch.stack(logs).mean() / beta


NUM_DRAWS = {"value": 2}
"""Input of the restatements: the configured number of draws per completion."""


def _spg(rows: list[Row], mix: float) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for row, advantage in zip(rows, group_mean(rows), strict=True):
        bound = _lower(row) if advantage > 0 else mix * _upper(row, 1.5) + (1 - mix) * _lower(row)
        total = total - row.length * advantage * bound
    return total / sum(row.length for row in rows)


def spg(rows: list[Row]) -> Tensor:
    return _spg(rows, 0.5)


def spg_eubo(rows: list[Row]) -> Tensor:
    return _spg(rows, 1.0)


def stabledrl(rows: list[Row]) -> Tensor:
    losses, advantages = [], iter(group_mean(rows))
    for group in groups_of(rows):
        log_weights = torch.stack([_lower(row).detach() - _lower(row, "old") for row in group])
        weights = log_weights.clamp(max=math.log(5)).softmax(0)
        total = torch.zeros((), dtype=torch.float64)
        for row, weight in zip(group, weights, strict=True):
            advantage = next(advantages)
            bound = _lower(row) if advantage > 0 else 0.5 * _upper(row, 1.5) + 0.5 * _lower(row)
            total = total - weight * advantage * bound
        losses.append(total)
    return torch.stack(losses).mean()


def sides(row: Row) -> list[Draw]:
    """Return canvases whose draws cover each denoised slot once, in a mask or in its complement; empty ones are
    omitted."""
    denoised = [slot for slot, step in enumerate(row.steps) if step >= 0]
    for number in range(NUM_DRAWS["value"]):
        both = [slot for draw in row.draws if draw.number // 2 == number for slot in draw.masked]
        assert sorted(both) == denoised
    return row.draws


def draws_of(row: Row) -> list[Draw]:
    """Return canvases whose draws each mask some of the denoised slots and no others."""
    assert len(row.draws) == NUM_DRAWS["value"]
    assert all(row.steps[slot] >= 0 for draw in row.draws for slot in draw.masked)
    return row.draws


def _espo_value(row: Row, name: str) -> Tensor:
    """Half of (L + 1) / x times the sum over the mask, plus half of the same over its complement, averaged over
    draws."""
    L = row.denoised
    total = torch.zeros((), dtype=torch.float64)
    for draw in sides(row):
        # The complement masks the rest; an empty one adds nothing.
        total = total + (L + 1) / len(draw.masked) * sum(getattr(draw, name)[slot] for slot in draw.masked) / 2
    return total / 2


def espo(rows: list[Row]) -> Tensor:
    losses = []
    for row, advantage in zip(rows, leave_one_out(rows), strict=True):
        new, old, reference = (_espo_value(row, name) for name in ("new", "old", "reference"))
        ratio = ((new - old) / row.denoised).exp()
        losses.append(ppo(ratio, advantage, 0.2, 0.2) + 1e-3 * (new - reference) ** 2 / 2 / row.denoised)
    return torch.stack(losses).mean()


def gdpo(rows: list[Row]) -> Tensor:
    nodes = [0.5 - math.sqrt(1 / 3) / 2, 0.5 + math.sqrt(1 / 3) / 2]
    weights = [1 / 2, 1 / 2]
    losses = []
    for row, advantage in zip(rows, group_z(rows), strict=True):
        values = []
        for name in ("new", "old"):
            value = torch.zeros((), dtype=torch.float64)
            for node, weight in zip(nodes, weights, strict=True):
                count = math.floor(node * row.denoised)
                draws = [draw for draw in row.draws if len(draw.masked) == count]
                assert len(draws) == (count > 0), "a node that masks nothing adds nothing"
                for draw in draws:
                    value = value + weight / node * sum(getattr(draw, name)[slot] for slot in draw.masked)
            values.append(value)
        losses.append(ppo(((values[0] - values[1]) / row.denoised).exp(), advantage, 0.5, 0.5))
    return torch.stack(losses).mean()


def stepmerge(rows: list[Row]) -> Tensor:
    """The same sum as diffu-GRPO's on other canvases: one for each of N segments of the steps. The number of steps is
    extrapolated from the denoised slots to the whole canvas."""
    num_segments = NUM_SEGMENTS["value"]

    def tokens(row: Row) -> Iterator[tuple[int, Draw]]:
        num_steps = (max(row.steps) + 1) * row.width // row.denoised
        for slots, draw in by_segments(row, [number * num_steps // num_segments for number in range(num_segments)]):
            yield from ((slot, draw) for slot in slots)

    return _diffu_grpo(rows, tokens)


NUM_SEGMENTS = {"value": 8}
"""Input of `stepmerge`: N, reduced to fit the fixture's few steps."""


def _slice_gain(draw: Draw, advantage: float) -> Tensor:
    return torch.stack(
        [ppo((draw.new[slot] - draw.old[slot]).exp(), advantage, 0.2, 0.2) for slot in draw.scored]
    ).mean()


def _correct_z(rows: list[Row]) -> list[float]:
    z_scores = []
    for group in groups_of(rows):
        accuracy = sum(row.correct for row in group) / len(group)
        std = math.sqrt(sum((row.correct - accuracy) ** 2 for row in group) / len(group))
        z_scores += [(row.correct - accuracy) / (std + 1e-4) for row in group]
    return z_scores


def _of_minibatch(rows: list[Row]) -> range:
    begin, end = (math.ceil(len(rows) * (minibatch["index"] + past) / minibatch["count"]) for past in (0, 1))
    return range(begin, end)


def tracerl(rows: list[Row]) -> Tensor:
    """The loss of one optimizer step, on its share of the rows. Each row is still compared with its whole group."""
    z_scores = _correct_z(rows)
    slices = [
        _slice_gain(draw, z_scores[index]) + 0.01 * sum(k3(draw.new[slot], draw.old[slot]) for slot in draw.scored)
        for index in _of_minibatch(rows)
        for draw in rows[index].draws
    ]
    return torch.stack(slices).mean()


def tracerl_value(rows: list[Row]) -> Tensor:
    """The loss of one optimizer step on its share of the rows, with the step-level advantages of VALUES."""
    z_scores, tokens = _correct_z(rows), []
    for index in _of_minibatch(rows):
        draws = sorted(rows[index].draws, key=lambda draw: draw.part)
        reward, later_value, later_advantage = z_scores[index], 0.0, 0.0
        for draw in reversed(draws):
            values = [VALUES[index][draw.part][slot] for slot in draw.scored]
            behind = GAMMA_LAM["gamma"] * (later_value + GAMMA_LAM["lam"] * later_advantage)
            for slot, value in zip(draw.scored, values, strict=True):
                gain = ppo((draw.new[slot] - draw.old[slot]).exp(), reward - value + behind, 0.2, 0.2)
                tokens.append(gain + 0.01 * k3(draw.new[slot], draw.old[slot]))
            later_value = sum(values) / len(values)
            later_advantage = reward - later_value + behind
            reward = 0.0
    return torch.stack(tokens).mean()


VALUES: list[dict[int, list[float]]] = []
"""Input of `tracerl_value`: the value of each slot of each row, by the part of its canvas."""
GAMMA_LAM = {"gamma": 1.0, "lam": 1.0}
minibatch = {"index": 0, "count": 1}
"""Input of both: the index of the step in a sweep, and their number."""


def cj_grpo(rows: list[Row]) -> Tensor:
    """The mean over all steps of the mean over what the step committed."""
    steps = []
    for row, advantage in zip(rows, group_z(rows), strict=True):
        for slots, draw in by_steps(row):
            values = [ppo((draw.new[slot] - draw.old[slot]).exp(), advantage, 0.2, 0.2) for slot in slots]
            steps.append(torch.stack(values).mean())
    return torch.stack(steps).mean()


def bgpo(rows: list[Row]) -> Tensor:
    losses = []
    for row, advantage in zip(rows, group_z(rows), strict=True):
        for draw in draws_of(row):
            scale = row.denoised / len(draw.masked)
            d = scale * sum(draw.new[slot] - draw.old[slot] for slot in draw.masked) / row.denoised
            losses.append(-(1 + d) * advantage if advantage >= 0 else -d.exp() * advantage)
    return torch.stack(losses).mean()


def ebpo(rows: list[Row]) -> Tensor:
    """For a bidirectional policy: its text is one block, and the ratio is of whole bounds, not of per-slot bounds."""
    losses = []
    for row, advantage in zip(rows, group_z(rows), strict=True):
        bounds = {}
        for name in ("new", "old"):
            draws = draws_of(row)
            sums = [sum(getattr(draw, name)[slot] for slot in draw.masked) / len(draw.masked) for draw in draws]
            bounds[name] = row.length * torch.stack(sums).mean()
        losses.append(ppo((bounds["new"] - bounds["old"]).exp(), advantage, 0.2, 0.2))
    return torch.stack(losses).mean()


def rho(rows: list[Row]) -> list[Tensor]:
    """Return the reference's ELBO of each completion minus the old policy's."""
    return [(_ratio_elbo(row, "reference") - _ratio_elbo(row, "old")).detach() for row in rows]


def dmpo(rows: list[Row]) -> Tensor:
    losses, of_rows = [], iter(rhos)
    for group in groups_of(rows):
        rewards = torch.tensor([row.reward for row in group], dtype=torch.float64)
        tilt = torch.stack([next(of_rows) for _ in group])
        weights = (tilt + rewards / 0.04).softmax(0) - (tilt - rewards / 0.04).softmax(0)
        total = torch.zeros((), dtype=torch.float64)
        for row, weight in zip(group, weights, strict=True):
            # Four canvases: two draws with their complements; an empty one adds nothing.
            mean = sum(sum(draw.new[slot] for slot in draw.masked) / len(draw.masked) for draw in sides(row)) / 4
            total = total - weight * mean
        losses.append(total)
    return torch.stack(losses).mean()


rhos: list[Tensor] = []
"""Input of `dmpo`: `rho` of each completion, computed once for all updates, under separate masks."""


def _ratio_elbo(row: Row, name: str) -> Tensor:
    return sum(
        row.denoised / len(draw.masked) * sum(getattr(draw, name)[slot] for slot in draw.masked) for draw in sides(row)
    ) / torch.tensor(4.0, dtype=torch.float64)


def _denoised_by_steps(row: Row) -> list[list[int]]:
    """Return the slots that each step committed, up to the last step that commits anything but ends of text."""
    said = [step for step, says in zip(row.steps, row.says_something, strict=True) if says and step >= 0]
    return [[slot for slot in range(row.width) if row.steps[slot] == step] for step in range(max(said, default=-1) + 1)]


def agrpo(rows: list[Row]) -> Tensor:
    """The mean over a completion's steps of the sum over each step's committed tokens. It is estimated from steps
    sampled where the cumulative share of entropy passes (start + 0), (start + 1), ... of the draws. Old likelihoods are
    the sampler's."""
    total = torch.zeros((), dtype=torch.float64)
    for row, advantage, start in zip(rows, group_mean(rows), starts, strict=True):
        of_steps = _denoised_by_steps(row)
        num_steps = len(of_steps)
        entropies = [1e-2 + sum(row.law_entropy[slot] for slot in slots) for slots in of_steps]
        drawn, passed = {}, 0.0
        for step, entropy in enumerate(entropies):
            before, passed = passed, passed + entropy / sum(entropies) * num_drawn["value"]
            count = sum(before <= start + draw < passed for draw in range(num_drawn["value"]))
            if count:
                drawn[step] = count / num_drawn["value"] / (entropy / sum(entropies)) / num_steps
        assert [draw.part for draw in row.draws] == list(drawn)
        for draw in row.draws:
            assert draw.scored == of_steps[draw.part]
            for slot in draw.scored:
                ratio = (draw.new[slot] - row.sampled[slot]).exp()
                total = total + drawn[draw.part] * ppo(ratio, advantage, 0.2, 0.2)
    return total / len(rows)


starts: list[float] = []
"""Input of `agrpo`: the uniform number of each row."""
num_drawn = {"value": 0}
"""Input of `agrpo`: the number of sampled steps."""


def _by_entropy(row: Row) -> list[int]:
    """Return the steps up to the last that commits anything but ends of text, the highest mean entropy first."""
    of_steps = _denoised_by_steps(row)
    means = [sum(row.entropy[slot] for slot in slots) / len(slots) for slots in of_steps]
    return sorted(range(len(of_steps)), key=lambda step: -means[step])


def _egspo(rows: list[Row], advantages: list[list[float]]) -> Tensor:
    """Each update takes the two steps of highest mean entropy that earlier updates have not taken. `advantages` are of
    each row's steps in that order."""
    values = []
    for row, of_row in zip(rows, advantages, strict=True):
        of_steps, ranked = _denoised_by_steps(row), _by_entropy(row)
        first = 2 * update_index["value"]
        assert [draw.part for draw in row.draws] == sorted(ranked[first : first + 2])
        for draw in row.draws:
            assert draw.scored == of_steps[draw.part]
            advantage = of_row[ranked.index(draw.part)]
            new, old, reference = (
                torch.stack([of_policy[slot] for slot in draw.scored]).sum()
                for of_policy in (draw.new, draw.old, draw.reference)
            )
            values.append(ppo((new - old).exp(), advantage, 0.2, 0.5) + 0.04 * k3(new, reference))
    return torch.stack(values).mean()


def egspo(rows: list[Row]) -> Tensor:
    return _egspo(rows, [[advantage] * row.width for row, advantage in zip(rows, group_mean(rows), strict=True)])


def egspo_sa(rows: list[Row]) -> Tensor:
    """The return of a step is the reward plus half of its gain over the step's answer, over 1.5. Its baseline is the
    mean over the steps of the group's completions that have the same place in the order of entropies."""
    advantages = []
    for group in groups_of(rows):
        returns = [
            [(row.reward + 0.5 * (row.reward - row.step_rewards[step])) / 1.5 for step in _by_entropy(row)]
            for row in group
        ]
        for of_row in returns:
            alike = [[other[place] for other in returns if len(other) > place] for place in range(len(of_row))]
            advantages.append([value - sum(some) / len(some) for value, some in zip(of_row, alike, strict=True)])
    return _egspo(rows, advantages)


WHOLE_CANVAS = 6
"""Denoise steps of a whole canvas, of which the completions here have fewer."""


def mdpo(rows: list[Row]) -> Tensor:
    """The return of a step is its gain over the step before, plus the mean of the later steps' rewards. Its z-score
    over the group's same steps, by n - 1, is its advantage. The two largest of each completion are trained, in either
    direction, with all tokens that the step predicted. Their weights are their probabilities."""
    losses = []
    for group in groups_of(rows):
        returns = []
        for row in group:
            known = row.step_rewards + [row.reward] * (WHOLE_CANVAS - len(row.step_rewards))
            of_row = []
            for step, reward in enumerate(known):
                later = known[step + 1 :] or [reward]
                of_row.append(reward - (known[step - 1] if step else 0.0) + sum(later) / len(later))
            returns.append(of_row)
        for row, of_row in zip(group, returns, strict=True):
            advantages = []
            for step in range(len(row.step_rewards)):
                others = [other[step] for other in returns]
                mean = sum(others) / len(others)
                std = math.sqrt(sum((value - mean) ** 2 for value in others) / (len(others) - 1))
                advantages.append((of_row[step] - mean) / (std + 1e-4))
            chosen = sorted(range(len(advantages)), key=lambda step: -abs(advantages[step]))[:2]
            assert [draw.part for draw in row.draws] == sorted(chosen)
            for draw in row.draws:
                slots = [slot for slot, step in enumerate(row.steps) if step < 0 or step >= draw.part]
                assert draw.masked == draw.scored == slots
                share = len(slots) / row.width
                loss = torch.zeros((), dtype=torch.float64)
                for slot in slots:
                    surrogate = ppo((draw.new[slot] - draw.old[slot]).exp(), advantages[draw.part], 0.2, 0.2)
                    kl = (draw.reference[slot] - draw.new[slot]) ** 2 / 2
                    loss = loss + draw.old[slot].exp() * (surrogate / share + 0.02 * kl)
                losses.append(loss / len(slots))
    return torch.stack(losses).mean()


def _value(leaves: list[Row], level: int) -> float:
    """Return the mean reward of a node at the end of a level, over its children, each the mean over its own."""
    if level == 1:
        assert len(leaves) == 1
        return leaves[0].reward
    children = [[leaf for leaf in leaves if leaf.nodes[1] == key] for key in {leaf.nodes[1] for leaf in leaves}]
    return sum(_value(child, 1) for child in children) / len(children)


def _text_of_level(row: Row, level: int) -> list[int]:
    """Return the slots that a level of two steps committed, up to the first end of text of the canvas at its end."""
    last = 2 * level + 1
    ends = [slot for slot, step in enumerate(row.steps) if 0 <= step <= last and not row.says_something[slot]]
    inside = [slot for slot, step in enumerate(row.steps) if last - 1 <= step <= last]
    return [slot for slot in inside if slot <= min(ends, default=row.width)]


def d_treerpo(rows: list[Row]) -> Tensor:
    """The mean over the nodes of all trees, each of two levels of two steps, of the mean over the tokens between the
    parent's canvas and the node's. Its first leaf stands for a node. The consistency loss is at half of the rounds."""
    losses, divergences = [], []
    coef = 0.5 * (math.exp(2.0 * 0.5) - 1) / (math.exp(2.0) - 1)
    temperature = 2.0 * (1 - 0.5) ** 0.7
    for group in groups_of(rows):
        parents = [(0, group)]
        nodes = dict.fromkeys(row.nodes[0] for row in group)
        parents += [(1, [row for row in group if row.nodes[0] == key]) for key in nodes]
        for level, leaves in parents:
            keys = list(dict.fromkeys(row.nodes[level] for row in leaves))
            children = [[row for row in leaves if row.nodes[level] == key] for key in keys]
            values = [_value(child, level) for child in children]
            better: list[tuple[float, dict[int, Tensor], Row]] = []
            for child, value in zip(children, values, strict=True):
                others = [other for place, other in enumerate(values) if children[place] is not child]
                advantage, row = value - sum(others) / len(others) if others else 0.0, child[0]
                slots = _text_of_level(row, level)
                draws = [draw for draw in row.draws if draw.part == level]
                if not slots:
                    assert not draws
                    continue
                (draw,) = draws
                assert draw.masked == [slot for slot, step in enumerate(row.steps) if step < 0 or step >= 2 * level]
                assert draw.scored == slots
                of_tokens = [
                    ppo((draw.new[slot] - draw.old[slot]).exp(), advantage, 0.4, 0.4)
                    + 0.01 * k3(draw.new[slot], draw.reference[slot])
                    for slot in slots
                ]
                losses.append(torch.stack(of_tokens).mean())
                if advantage > 0:
                    better.append((advantage, {slot: draw.new[slot] for slot in slots}, row))
            powers = [math.exp(advantage / temperature) for advantage, _, _ in better]
            for slot in range(group[0].width):
                here = [
                    (power, some[slot], row.tokens[slot])
                    for power, (_, some, row) in zip(powers, better, strict=True)
                    if slot in some
                ]
                whole = sum(power for power, _, _ in here)
                target = dict.fromkeys((token for _, _, token in here), 0.0)
                for power, _, token in here:
                    target[token] += power / whole
                if here:
                    logps = {token: logp for _, logp, token in here}
                    divergences.append(sum(share * (math.log(share) - logps[token]) for token, share in target.items()))
    return torch.stack(losses).mean() + coef * torch.stack(divergences).mean()


update_index = {"value": 0}
"""Input of `egspo`: the index of the inner update."""


def justgrpo(rows: list[Row]) -> Tensor:
    """Score each token given all tokens to its left; average over all tokens."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row, advantage in zip(rows, group_z(rows), strict=True):
        for slots, draw in by_steps(row):
            for slot in slots:
                total = total + ppo((draw.new[slot] - draw.old[slot]).exp(), advantage, 0.2, 0.2)
                count += 1
    return total / count


def forkgrpo(rows: list[Row]) -> Tensor:
    """JustGRPO's loss on the tokens that a step committed only to commit at least one."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row, advantage in zip(rows, group_z(rows), strict=True):
        forced = [slot for slot in range(row.length) if row.fallback[slot]]
        begins = sorted({row.steps[slot] for slot in forced})
        for begin, draw in zip(begins, row.draws, strict=True):
            assert draw.masked == [slot for slot, step in enumerate(row.steps) if step < 0 or step >= begin]
            for slot in forced:
                if row.steps[slot] == begin:
                    total = total + ppo((draw.new[slot] - draw.old[slot]).exp(), advantage, 0.2, 0.2)
                    count += 1
    return total / count


def vrpo(rows: list[Row]) -> Tensor:
    losses = []
    for group in groups_of(rows):
        gains = []
        for row in group:
            gain = torch.zeros((), dtype=torch.float64)
            for draw in draws_of(row):
                scale = row.denoised / len(draw.masked) / 8
                gain = gain + scale * sum(draw.new[slot] - draw.reference[slot] for slot in draw.masked)
            gains.append(gain)
        pairs = [
            -torch.nn.functional.logsigmoid(0.2 * (gains[better] - gains[worse]))
            for better in range(len(group))
            for worse in range(len(group))
            if group[better].reward > group[worse].reward
        ]
        losses.append(torch.stack(pairs).mean())
    return torch.stack(losses).mean()


def _before_rivals(row: Row, slot: int, rivals: list[int], logits: Tensor) -> Tensor:
    """Return the log-softmax of a committed token's logit against the highest logit of each slot committed later."""
    own = logits[slot, row.tokens[slot]]
    return own - torch.stack([own, *(logits[rival].max() for rival in rivals)]).logsumexp(0)


def mapg(rows: list[Row]) -> Tensor:
    """As in its code: the four steps of the whole canvas form two segments, (0, 2] and (2, 4], one of which is drawn.
    One loss is of the drawn tokens and one of their order, each with a ratio of means."""
    losses = []
    for row, advantage in zip(rows, leave_one_out(rows), strict=True):
        ends = {part: 2 * part + 2 for part in (0, 1)}
        inside = {part: [s for s, step in enumerate(row.steps) if end - 2 < step <= end] for part, end in ends.items()}
        valid = [part for part in (0, 1) if any(slot < row.length for slot in inside[part])]
        assert len(row.draws) == min(1, len(valid)), "one of those with a token of the text"
        for draw in row.draws:
            later = [s for s, step in enumerate(row.steps) if step > ends[draw.part] or step == -1]
            assert draw.masked == sorted(inside[draw.part] + later)
            assert draw.scored == [slot for slot in inside[draw.part] if slot < row.length]
            tokens = sum(draw.new[slot] - draw.old[slot] for slot in draw.scored) / len(draw.scored)
            orders = sum(
                _before_rivals(row, slot, later, draw.new_logits) - _before_rivals(row, slot, later, draw.old_logits)
                for slot in draw.scored
            ) / len(draw.scored)
            losses += [ppo(mean.exp(), advantage, 3e-4, 4e-4) for mean in (tokens, orders)]
    return torch.stack(losses).sum() / len(rows)


def _round_part_z(rows: list[Row]) -> list[float]:
    """Sum each part's z-score within its group; divide by the root mean square of these sums over the round."""
    sums = []
    for group in groups_of(rows):
        for row in group:
            total = 0.0
            for part in range(len(row.parts)):
                values = [other.parts[part] for other in group]
                mean = sum(values) / len(values)
                std = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
                total += (row.parts[part] - mean) / (std + 1e-4)
            sums.append(total)
    scale = math.sqrt(sum(total**2 for total in sums) / len(sums))
    return [total / (scale + 1e-4) for total in sums]


def lightningrl(rows: list[Row]) -> Tensor:
    losses, likelihoods = [], []
    for row, advantage in zip(rows, _round_part_z(rows), strict=True):
        values, logps = [], []
        for begin, draw in zip(range(0, row.length, 4), row.draws, strict=True):
            assert draw.masked == list(range(begin, row.width)), "shown before the block, masked from it on"
            for slot in range(begin, min(begin + 4, row.length)):
                ratio = (draw.new[slot] - draw.old[slot]).exp()
                values.append(ppo(ratio, advantage, 0.2, 0.2) + 0.01 * k3(draw.new[slot], draw.reference[slot]))
                logps.append(draw.new[slot])
        losses.append(torch.stack(values).mean())
        likelihoods += [torch.stack(logps).mean()] if row.correct else []
    return torch.stack(losses).mean() - 0.1 * torch.stack(likelihoods).mean()


def tba(rows: list[Row]) -> Tensor:
    """The squared residual of log Z + log policy - log reference - reward / beta, with the group's estimate of
    log Z."""
    losses = []
    for group in groups_of(rows):
        log_ratios = [
            sum(draw.new[slot] - draw.reference[slot] for slots, draw in by_steps(row) for slot in slots)
            for row in group
        ]
        wanted = [row.reward / 0.014 for row in group]
        estimates = [want - log_ratio for want, log_ratio in zip(wanted, log_ratios, strict=True)]
        log_z = torch.stack(estimates).mean().detach()
        losses += [(log_z + ours - want) ** 2 for ours, want in zip(log_ratios, wanted, strict=True)]
    return torch.stack(losses).mean()


TEACHER: list[Tensor] = []
"""For each row, the log-probabilities [V] of every slot, by an autoregressive model that reads the completed text."""


def rldf(rows: list[Row]) -> Tensor:
    """The mean over two drawn states of each completion of the mean over tokens: likely ones, and the state's own."""
    values = []
    for row, advantage in zip(rows, group_z(rows), strict=True):
        assert [draw.part for draw in row.draws] == [0, 1]
        for draw in row.draws:
            own = min(row.steps[slot] for slot in draw.masked if row.steps[slot] >= 0)
            assert draw.scored == [slot for slot in range(row.length) if row.steps[slot] >= own]
            likely = [
                slot
                for slot in draw.scored
                if row.steps[slot] == own or float(draw.old[slot].exp()) >= MIN_PROBABILITY["value"]
            ]
            tokens = [
                ppo((draw.new[slot] - draw.old[slot]).exp(), advantage, 0.2, 0.2)
                + 0.01 * k3(draw.new[slot], draw.reference[slot])
                for slot in likely
            ]
            values.append(torch.stack(tokens).mean())
    return torch.stack(values).mean()


MIN_PROBABILITY = {"value": 0.0}
"""Input of `rldf`: the probability below which other tokens than the state's own are left out."""


def opdlm(rows: list[Row]) -> Tensor:
    """The mean over completions of the mean KL(teacher || policy) of a slot masked in its block's state. The token that
    ends a text is not scored."""
    losses = []
    for row, teacher in zip(rows, TEACHER, strict=True):
        values = []
        for draw in row.draws:
            block = range(4 * draw.part, 4 * draw.part + 4)
            masked = [slot for slot in block if slot in draw.masked]
            # A state of the trajectory: the tokens committed from some step on are masked.
            first = min(row.steps[slot] for slot in masked)
            assert masked == [slot for slot in block if row.steps[slot] >= first]
            for slot in masked:
                if slot < row.length and row.says_something[slot]:
                    ours, theirs = draw.new_logits[slot].log_softmax(-1), teacher[slot]
                    terms = [theirs[token].exp() * (theirs[token] - ours[token]) for token in range(len(ours))]
                    values.append(torch.stack(terms).sum())
        losses.append(torch.stack(values).mean() if values else torch.zeros(()))
    return torch.stack(losses).mean()


FUTURES: list[dict[int, tuple[int, Tensor]]] = []
"""For each row, by denoise step: how many slots it committed, and the logits [L, V] of the reference, which sees some
tokens of later blocks."""


def self_taught(
    reference: Transformer, batch: GroupedBatch, corruption: Corruption, shown: Tensor
) -> list[dict[int, tuple[int, Tensor]]]:
    """Run the reference on each canvas with the slots `shown` [R, L] filled in too."""
    found: list[dict[int, tuple[int, Tensor]]] = [{} for _ in range(batch.num_rows)]
    assert corruption.parts is not None
    for canvas, (row, step) in enumerate(zip(corruption.rows.tolist(), corruption.parts.tolist(), strict=True)):
        prompt, completion = batch.prompt_ids[row, : batch.prompt_lengths[row]], batch.completion_ids[row].clone()
        for slot, is_masked in enumerate(corruption.masked[canvas].tolist()):
            if is_masked and not shown[canvas, slot]:
                completion[slot] = reference.config.mask_token_id
        logits = reference(torch.cat((prompt, completion))[None])[0, len(prompt) :].detach()
        found[row][step] = (batch.step_map[row].tolist().count(step), logits)
    return found


def d_opsd(rows: list[Row]) -> Tensor:
    """The mean over completions of the mean over states of the sum over slots of KL(policy || teacher) among the
    teacher's 20 most likely tokens, each token's term at most 0.05. Of the block's masked slots those count where the
    teacher's highest logit is greatest, as many as the step committed."""
    losses = []
    for row, futures in zip(rows, FUTURES, strict=True):
        values = []
        for draw in row.draws:
            count, logits = futures[draw.part]
            (block,) = {slot // 4 for slot, step in enumerate(row.steps) if step == draw.part}
            assert block == 0, "no state of the last block"
            assert draw.masked == [slot for slot, step in enumerate(row.steps) if step < 0 or step >= draw.part]
            waiting = [slot for slot in draw.masked if slot // 4 == block]
            taken = sorted(waiting, key=lambda slot: -float(logits[slot].max()))[:count]
            value = torch.zeros((), dtype=torch.float64)
            for slot in taken:
                best = sorted(range(logits.shape[1]), key=lambda token: -float(logits[slot, token]))[:20]
                ours, theirs = draw.new_logits[slot, best].log_softmax(-1), logits[slot, best].log_softmax(-1)
                for our, their in zip(ours, theirs, strict=True):
                    term = our.exp() * (our - their)
                    value = value + torch.minimum(term, torch.tensor(0.05))
            values.append(value)
        losses.append(torch.stack(values).mean() if values else torch.zeros(()))
    return torch.stack(losses).mean()


SLOW: dict[str, Callable[[list[Row]], Tensor]] = {
    "diffu-grpo": diffu_grpo,
    "diffu-grpo-parity": diffu_grpo_parity,
    "wd1": wd1,
    "coupled-grpo": coupled_grpo,
    "unigrpo": unigrpo,
    "spg": spg,
    "spg-eubo": spg_eubo,
    "espo": espo,
    "gdpo": gdpo,
    "stepmerge": stepmerge,
    "tracerl": tracerl,
    "tracerl-value": tracerl_value,
    "cj-grpo": cj_grpo,
    "mapg": mapg,
    "bgpo": bgpo,
    "ebpo": ebpo,
    "stabledrl": stabledrl,
    "dmpo": dmpo,
    "agrpo": agrpo,
    "egspo": egspo,
    "egspo-sa": egspo_sa,
    "mdpo": mdpo,
    "d-treerpo": d_treerpo,
    "justgrpo": justgrpo,
    "forkgrpo": forkgrpo,
    "vrpo": vrpo,
    "lightningrl": lightningrl,
    "tba": tba,
    "opdlm": opdlm,
    "d-opsd": d_opsd,
    "rldf": rldf,
}
