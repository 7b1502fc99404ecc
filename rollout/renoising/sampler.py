"""Entropy-bounded sampling with renoising (DiffusionGemma): requests in, completions out.

`row.py` has the steps. What is returned was never drawn, so it has no log-probability. What was kept was: slots are
chosen by their entropies, before the draw, so the sum over steps of the log-probabilities of the kept draws is the
exact log-likelihood of the trajectory (`learner/estimators/renoised.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from learner.model.renoising.policy import RenoisingPolicy
from rollout.renoising.draws import Draws
from rollout.renoising.request import RenoisedCompletion, RenoisingRequest, check_renoising_request
from rollout.renoising.row import Row, Watch
from rollout.request import Completion, Progress

_MOST_ROWS = 8


class RenoisingSampler:
    """Samples completions from one policy version, one request after the other, or in turns (`open`)."""

    def __init__(self, policy: RenoisingPolicy, policy_version: int) -> None:
        """Sample from `policy`, which stays where it is and as it is."""
        self.policy, self.policy_version = policy, policy_version

    def generate(self, requests: Sequence[RenoisingRequest], watch: Watch | None = None) -> list[RenoisedCompletion]:
        """Completions of `requests`, in their order.

        Raises:
            ValueError: a request that the policy cannot serve; the sentence has its index and field.
            FloatingPointError: the policy's weights are bad: it predicts what is no number.
        """
        for index, request in enumerate(requests):
            try:
                check_renoising_request(request, self.policy.config)
            except ValueError as error:
                raise ValueError(f"request {index}: {error}") from error
        return [self.complete(request, watch=watch) for request in requests]

    @torch.inference_mode()
    def complete(
        self, request: RenoisingRequest, draws: Draws | None = None, watch: Watch | None = None
    ) -> RenoisedCompletion:
        """The completion of one request, by its own draws or by others."""
        row = Row(self.policy, request, draws, watch)
        while not row.is_done:
            row.step()
        return row.completion(self.policy_version)

    def open(self, most_rows: int = _MOST_ROWS) -> RenoisingBatch:
        """A batch that is stepped by hand: its rows can be watched, and more requests can come."""
        return RenoisingBatch(self, most_rows)


class RenoisingBatch:
    """Rows that are denoised in turns, and requests that wait for one: to who steps it, what `SlotBatch` is.

    A step is a forward for each row. One forward of several would not be exact: rows have prefixes of their own
    lengths, and the last bits of a logit change with the batch. Each row holds the logits of a whole canvas, a quarter
    of a gigabyte in DiffusionGemma's vocabulary, so there are few.
    """

    def __init__(self, sampler: RenoisingSampler, most_rows: int) -> None:
        """Without rows; `RenoisingSampler.open` does."""
        self._policy, self._policy_version, self._most_rows = sampler.policy, sampler.policy_version, most_rows
        self._waiting = deque[tuple[int, RenoisingRequest]]()
        self._running: dict[int, Row] = {}
        self._num_submitted = 0

    def submit(self, request: RenoisingRequest) -> int:
        """Let a request wait for a row. Returns its index: 0, 1, 2, ...

        Raises ValueError, naming the field, when the policy cannot serve it.
        """
        check_renoising_request(request, self._policy.config)
        self._waiting.append((self._num_submitted, request))
        self._num_submitted += 1
        return self._num_submitted - 1

    @property
    def num_running(self) -> int:
        """Rows that are being denoised."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self._waiting)

    def cancel(self, index: int) -> None:
        """Forget a request; the next step gives its row to another. One that is done or unknown is left alone."""
        self._waiting = deque(item for item in self._waiting if item[0] != index)
        self._running.pop(index, None)

    def num_committed(self) -> dict[int, int]:
        """Slots of the finished canvases of each request with a row."""
        return {index: row.num_committed for index, row in self._running.items()}

    @torch.inference_mode()
    def progress(self, indices: Sequence[int]) -> dict[int, Progress]:
        """How some requests stand; those without a row are left out."""
        return {index: self._running[index].progress() for index in indices if index in self._running}

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Completion]]:
        """Fill the free rows, denoise each for a step, and return what is done with its index."""
        while self._waiting and len(self._running) < self._most_rows:
            index, request = self._waiting.popleft()
            self._running[index] = Row(self._policy, request)
        for row in self._running.values():
            row.step()
        done = [index for index, row in self._running.items() if row.is_done]
        return [(index, self._completion(self._running.pop(index))) for index in done]

    def _completion(self, row: Row) -> Completion:
        """As other families' are: the tokens as at temperature 0, since they were never drawn, and no padding."""
        completion, committed = row.completion(self._policy_version), row.committed()
        return Completion(
            token_ids=committed.token_ids,
            num_tokens=completion.num_tokens,
            step_map=committed.step_map,
            commit_logp=committed.commit_logp,
            commit_logp_raw=committed.commit_logp_raw,
            commit_entropy=committed.commit_entropy,
            commit_law_entropy=committed.commit_law_entropy,
            fallback=committed.fallback,
            num_forwards=row.num_steps,
            exact=False,
            logp_exact=True,
            finish_reason=completion.finish_reason,
            policy_version=self._policy_version,
        )
