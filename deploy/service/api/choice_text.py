"""Incremental detokenization: from finished blocks to the text of a choice, which only grows."""

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
    """The text of one choice."""

    def __init__(self, codec: TextCodec, plan: RequestPlan, index: int) -> None:
        self._codec, self._plan, self._index = codec, plan, index
        self._record: dict[str, Any] = {}
        self._is_whole = False
        self._num_forwards = 0
        self.text = ""
        """What is sure of the text: it only grows."""
        self.num_tokens = 0
        """Tokens of the text so far, an end of text included."""
        self.finish_reason: Literal["stop", "length"] | None = None
        """Why the text ended; None while it goes on."""

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete, whatever the engine goes on to do."""
        return self.finish_reason is not None

    @property
    def num_forwards(self) -> int:
        """Forwards that it took so far."""
        return self._num_forwards

    @property
    def num_blocks(self) -> int:
        """Blocks that were denoised."""
        return self._plan.num_blocks(self._index, len(self._record.get("token_ids", ())))

    def take(self, event: BlocksDone | Done) -> str:
        """Let it grow. Returns what is new of the text."""
        if isinstance(event, Done):
            completion = event.completion
            self._record = {name: getattr(completion, name) for name in _COLUMNS}
            self._is_whole, self._num_forwards = True, completion.num_forwards
        else:
            new = {name: getattr(event.slots, name) for name in _COLUMNS}
            old = {name: self._record.get(name, values[:0])[: event.start] for name, values in new.items()}
            self._record = {name: np.concatenate((old[name], values)) for name, values in new.items()}
            num_steps = int(self._record["step_map"].max(initial=-1)) + 1
            self._num_forwards = num_steps * self._plan.num_forwards_of_step
        before = len(self.text)
        if not self.is_finished:
            self._read()
        return self.text[before:]

    def step_map(self) -> StepMap:
        """Step and confidence of each token of the text."""
        kept = {name: values[: self.num_tokens] for name, values in self._record.items()}
        ids = kept["token_ids"].tolist()
        return StepMap(
            step_map=kept["step_map"].tolist(),
            token_ids=ids,
            confidence=[round(float(p), 4) for p in np.exp(kept["commit_logp_raw"])],
            tokens=[self._codec.token_text(token) for token in ids],
        )

    def text_logprobs(self) -> TextLogprobs:
        """Of each token of the text, its log-probability when it was committed."""
        texts, logprobs = self._texts(), self._logprobs()
        # Special tokens are spelled here, and left out of the text.
        shown = self._codec.slot_texts(self._ids(), spells_special=False)
        ends = accumulate((len(text) for text in shown), initial=0)
        offsets = [min(end, len(self.text)) for end, _ in zip(ends, texts, strict=False)]
        return TextLogprobs(tokens=texts, token_logprobs=logprobs, top_logprobs=None, text_offset=offsets)

    def chat_logprobs(self) -> ChatLogprobs:
        """The same of a reply."""
        return ChatLogprobs(
            content=[
                TokenLogprob(token=text, logprob=logprob, bytes=list(text.encode()), top_logprobs=[])
                for text, logprob in zip(self._texts(), self._logprobs(), strict=True)
            ],
            refusal=None,
        )

    def _ids(self) -> list[int]:
        ids: list[int] = self._record["token_ids"][: self.num_tokens].tolist()
        return ids

    def _texts(self) -> list[str]:
        return self._codec.slot_texts(self._ids())

    def _logprobs(self) -> list[float]:
        return [round(float(logp), 6) for logp in self._record["commit_logp_raw"][: self.num_tokens]]

    def canvas(self) -> list[Slot]:
        """All slots that were denoised, as the last frame of a stream of canvases shows them."""
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
        sure = self._held_back(ending.text)
        # A decoder may still change what it wrote; what was sent is never taken back.
        self.text = sure if sure.startswith(self.text) else self.text

    def _held_back(self, text: str) -> str:
        """Without what the next block may still change: half of a character, or of a stop string."""
        text = text.rstrip(BROKEN)
        longest = 0
        for stop in self._plan.stops:
            for length in range(min(len(stop) - 1, len(text)), 0, -1):
                if text.endswith(stop[:length]):
                    longest = max(longest, length)
                    break
        return text[: len(text) - longest]


def canvas_of(codec: TextCodec, progress: Progress, num_slots: int) -> list[Slot]:
    """The slots of a choice that is being denoised, without what a last block has beyond the completion."""
    record = {name: getattr(progress.slots, name)[:num_slots] for name in _COLUMNS}
    return slots_of(codec, record, progress.masked[:num_slots])


def canvas_before(codec: TextCodec, request: AnyRequest) -> list[Slot]:
    """The slots of a choice that is yet to be denoised: masked, but for the tokens that are given. The random ids that
    a renoised canvas begins as are no tokens of the policy's."""
    num_slots = request.params.gen_length
    record = {"token_ids": np.zeros(num_slots, dtype=np.int64), "commit_logp_raw": np.zeros(num_slots)}
    masked = np.ones(num_slots, dtype=bool)
    given = request.fixed_tokens if isinstance(request, Request) else {}
    for slot, token in given.items():
        record["token_ids"][slot], masked[slot] = token, False
    return slots_of(codec, record | {"step_map": np.full(num_slots, -1)}, masked)


def slots_of(codec: TextCodec, record: dict[str, Any], masked: np.ndarray) -> list[Slot]:
    """Slots as a page shows them."""
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
    """A canvas as text, with a sign for each masked slot."""
    return "".join(MASKED if slot.masked else slot.text for slot in slots)


_COLUMNS = tuple(column.name for column in fields(Committed))
