"""Answers of `d1 sample`: JSON objects and one-line summaries of completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deploy.offline.item import AnyCompletion, Item
from deploy.offline.policy import ReadyPolicy
from deploy.printing import counted
from deploy.requests.stopping import StoppedText, stop_text
from learner.model.renoising.record import DenoisedCanvas
from rollout.request import Completion, Writes


def work_summary(num_tokens: int, num_forwards: int) -> str:
    """Format the work of a completion: `24 tokens, 12 forwards, 2.0 tokens a forward`."""
    rate = f"{num_tokens / max(1, num_forwards):.1f} tokens a forward"
    return f"{counted(num_tokens, 'token')}, {counted(num_forwards, 'forward')}, {rate}"


def stopped_text(item: Item, completion: AnyCompletion, policy: ReadyPolicy) -> StoppedText:
    """Return the text of a completion up to its end; empty without a tokenizer."""
    assert item.plan is not None, "it was served"
    decode = (lambda _: "") if policy.tokenizer is None else policy.tokenizer.decode
    return stop_text(item.plan, completion.token_ids, decode, policy.config.stop_ids, is_complete=True)


def answer(item: Item, completion: AnyCompletion, policy: ReadyPolicy) -> dict[str, Any]:
    """Return the JSON answer to a completed request."""
    ended = stopped_text(item, completion, policy)
    exactness = (
        {"exact": completion.exact, "logp_exact": completion.logp_exact} if isinstance(completion, Completion) else {}
    )
    return _head(item) | {
        "token_ids": completion.token_ids[: ended.num_tokens].tolist(),
        "text": None if policy.tokenizer is None else ended.text,
        "num_tokens": ended.num_tokens,
        **_trajectory(completion, ended.num_tokens),
        "num_forwards": completion.num_forwards,
        "finish_reason": ended.reason,
        **exactness,
        "policy_version": completion.policy_version,
    }


def _trajectory(completion: AnyCompletion, end: int) -> dict[str, Any]:
    """Return how the tokens were written: when and how probably each was committed, or the record of each canvas."""
    if not isinstance(completion, Completion):
        return {"canvases": list(map(_canvas, completion.canvases))}
    return {
        "step_map": completion.step_map[:end].tolist(),
        "commit_logp": shortest_floats(completion.commit_logp[:end]),
        "commit_logp_raw": shortest_floats(completion.commit_logp_raw[:end]),
        "commit_entropy": shortest_floats(completion.commit_entropy[:end]),
        "fallback": completion.fallback[:end].tolist(),
        "tail": {"token_ids": completion.token_ids[end:].tolist(), "step_map": completion.step_map[end:].tolist()},
        **({} if completion.writes is None else {"writes": _writes(completion.writes)}),
    }


def _canvas(canvas: DenoisedCanvas) -> dict[str, Any]:
    """Return the record of a renoised canvas, from which its likelihood is computed."""
    return {
        "seen": canvas.seen.tolist(),
        "drawn": canvas.drawn.tolist(),
        "drawn_logp": [shortest_floats(step) for step in canvas.drawn_logp],
        "accepted": canvas.accepted.tolist(),
        "argmax": canvas.argmax.tolist(),
        "mean_entropy": shortest_floats(canvas.mean_entropy),
    }


def _writes(writes: Writes) -> dict[str, list[Any]]:
    """Return all writes of token editing as JSON, including the surplus of the last block. Keys as in `Writes`."""
    return {
        "steps": writes.steps.tolist(),
        "slots": writes.slots.tolist(),
        "token_ids": writes.token_ids.tolist(),
        "logp": shortest_floats(writes.logp),
        "logp_raw": shortest_floats(writes.logp_raw),
    }


def error_answer(item: Item) -> dict[str, Any]:
    """Return the JSON answer to a rejected request."""
    return _head(item) | {"error": item.error}


def _head(item: Item) -> dict[str, Any]:
    named = {"id": item.id, "choice": item.sample if item.num_samples > 1 else None}
    return {"index": item.index} | {key: value for key, value in named.items() if value is not None}


def shortest_floats(values: NDArray[np.float32]) -> Sequence[float]:
    """Convert to floats with the fewest digits that identify each float32."""
    return [float(str(value)) for value in values]
