"""Incremental detokenization: the text of a choice from its finished blocks, and its canvas."""

from __future__ import annotations

from dataclasses import fields
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from deploy.requests.families import AnyRequest
from deploy.requests.planner import RequestPlan
from deploy.requests.stopping import BROKEN, stop_text
from deploy.service.api.replies import ChatLogprobs, Slot, StepMap, TextLogprobs, TokenLogprob
from deploy.service.api.text_codec import MASKED, TextCodec
from deploy.service.contract import BlocksDone, Done
from rollout.request import Committed, Progress, Request


class ChoiceText:
    """Text of one choice, which only grows."""

    def __init__(self, codec: TextCodec, plan: RequestPlan, index: int) -> None:
        self._codec, self._plan, self._index = codec, plan, index
        self._record: dict[str, Any] = {}
        self._is_whole = False
        self.text = ""
        """Text so far, without what the next block may still change."""
        self.num_tokens = 0
        """Tokens of the text so far, including an end-of-text token."""
        self.finish_reason: Literal["stop", "length"] | None = None
        """Finish reason; None while the text continues."""
        self.num_forwards = 0
        """Forwards so far."""

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete, even if the engine continues."""
        return self.finish_reason is not None

    @property
    def num_blocks(self) -> int:
        """Blocks that were denoised so far."""
        return self._plan.num_blocks(self._index, len(self._record.get("token_ids", ())))

    def take(self, event: BlocksDone | Done) -> str:
        """Add finished blocks, or the completion. Returns the new text."""
        if isinstance(event, Done):
            completion = event.completion
            self._record = {name: getattr(completion, name) for name in _COLUMNS}
            self._is_whole, self.num_forwards = True, completion.num_forwards
        else:
            new = {name: getattr(event.slots, name) for name in _COLUMNS}
            old = {name: self._record.get(name, values[:0])[: event.start] for name, values in new.items()}
            self._record = {name: np.concatenate((old[name], values)) for name, values in new.items()}
            num_steps = int(self._record["step_map"].max(initial=-1)) + 1
            self.num_forwards = num_steps * self._plan.num_forwards_of_step
        before = len(self.text)
        if not self.is_finished:
            self._read()
        return self.text[before:]

    def step_map(self) -> StepMap:
        """Return the step and the confidence of each token of the text."""
        kept = {name: values[: self.num_tokens] for name, values in self._record.items()}
        ids = kept["token_ids"].tolist()
        return StepMap(
            step_map=kept["step_map"].tolist(),
            token_ids=ids,
            confidence=[round(float(p), 4) for p in np.exp(kept["commit_logp_raw"])],
            tokens=[self._codec.token_text(token) for token in ids],
        )

    def text_logprobs(self) -> TextLogprobs:
        """Return the log-probability of each token of a completion, at the step that committed it."""
        ids, texts, logprobs = self._tokens()
        # The tokens include special ones, the text does not.
        shown = self._codec.slot_texts(ids, spells_special=False)
        ends = accumulate((len(text) for text in shown), initial=0)
        offsets = [min(end, len(self.text)) for end, _ in zip(ends, texts, strict=False)]
        return TextLogprobs(tokens=texts, token_logprobs=logprobs, top_logprobs=None, text_offset=offsets)

    def chat_logprobs(self) -> ChatLogprobs:
        """Return the log-probability of each token of a reply, at the step that committed it."""
        _, texts, logprobs = self._tokens()
        content = [
            TokenLogprob(token=text, logprob=logprob, bytes=list(text.encode()), top_logprobs=[])
            for text, logprob in zip(texts, logprobs, strict=True)
        ]
        return ChatLogprobs(content=content, refusal=None)

    def _tokens(self) -> tuple[list[int], list[str], list[float]]:
        """Return ids, texts and log-probabilities of the text's tokens."""
        ids = self._record["token_ids"][: self.num_tokens].tolist()
        logprobs = [round(float(logp), 6) for logp in self._record["commit_logp_raw"][: self.num_tokens]]
        return ids, self._codec.slot_texts(ids), logprobs

    def canvas(self) -> list[Slot]:
        """Return all denoised slots, for the last frame of a canvas stream."""
        record = {name: values[: self._plan.num_slots] for name, values in self._record.items()}
        return slots_of(self._codec, record, np.zeros(len(record["token_ids"]), dtype=bool))

    def _read(self) -> None:
        codec = self._codec
        ends = codec.config.stop_ids
        ending = stop_text(self._plan, self._record["token_ids"], codec.decode, ends, is_complete=self._is_whole)
        self.num_tokens = ending.num_tokens
        if ending.reason is not None:
            self.text, self.finish_reason = ending.text, "length" if ending.reason == "length" else "stop"
            return
        certain = self._without_tail(ending.text)
        # A decoder may change its earlier output, but text that was sent stays.
        self.text = certain if certain.startswith(self.text) else self.text

    def _without_tail(self, text: str) -> str:
        """Remove what the next block may still change: an incomplete character, or the start of a stop string."""
        text = text.rstrip(BROKEN)
        begun = (stop[:length] for stop in self._plan.body.stops for length in range(1, len(stop)))
        longest = max((len(start) for start in begun if text.endswith(start)), default=0)
        return text[: len(text) - longest]


def canvas_of(codec: TextCodec, progress: Progress, num_slots: int) -> list[Slot]:
    """Return the slots of a choice that is being denoised, without the surplus of its last block."""
    record = {name: getattr(progress.slots, name)[:num_slots] for name in _COLUMNS}
    return slots_of(codec, record, progress.masked[:num_slots])


def canvas_before(codec: TextCodec, request: AnyRequest) -> list[Slot]:
    """Return the slots of a choice before the first step: all masked, except fixed tokens."""
    num_slots = request.params.gen_length
    record = {"token_ids": np.zeros(num_slots, dtype=np.int64), "commit_logp_raw": np.zeros(num_slots)}
    masked = np.ones(num_slots, dtype=bool)
    given = request.fixed_tokens if isinstance(request, Request) else {}
    for slot, token in given.items():
        record["token_ids"][slot], masked[slot] = token, False
    return slots_of(codec, record | {"step_map": np.full(num_slots, -1)}, masked)


def slots_of(codec: TextCodec, record: dict[str, Any], masked: np.ndarray) -> list[Slot]:
    """Create slots from the record of a choice."""
    slots = zip(record["token_ids"].tolist(), masked.tolist(), strict=True)
    rows = zip(
        codec.slot_texts(None if is_masked else token for token, is_masked in slots),
        record["step_map"].tolist(),
        np.exp(record["commit_logp_raw"]).tolist(),
        masked.tolist(),
        strict=True,
    )
    return [
        Slot(text="", masked=True, step=-1, confidence=None)
        if is_masked
        else Slot(text=text, masked=False, step=step, confidence=round(confidence, 4))
        for text, step, confidence, is_masked in rows
    ]


def text_of_canvas(slots: list[Slot]) -> str:
    """Return a canvas as text, with a placeholder for each masked slot."""
    return "".join(MASKED if slot.masked else slot.text for slot in slots)


_COLUMNS = tuple(column.name for column in fields(Committed))
