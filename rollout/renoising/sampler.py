"""Entropy-bounded sampling with renoising (DiffusionGemma): requests in, completions out.

`row.py` has the steps. The returned tokens are the most probable ones, not samples, so they have no log-probability.
The tokens that a step keeps are samples: slots are chosen by their entropies, before sampling. So the sum over steps of
the kept tokens' log-probabilities is the exact log-likelihood of the trajectory (`learner/estimators/renoised.py`).
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
    """Samples completions from one policy version, one request after another, or interleaved (`open`)."""

    def __init__(self, policy: RenoisingPolicy, policy_version: int) -> None:
        """Sample from `policy`, on its device. Its weights must not change."""
        self.policy, self.policy_version = policy, policy_version

    def generate(self, requests: Sequence[RenoisingRequest], watch: Watch | None = None) -> list[RenoisedCompletion]:
        """Sample completions of `requests`, in their order.

        Raises:
            ValueError: the policy cannot serve a request; the message has its index and field.
            FloatingPointError: a prediction is not finite: the policy's weights are bad.
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
        """Sample the completion of one request. `draws` replaces the random draws keyed by its seed."""
        row = Row(self.policy, request, draws, watch)
        while not row.is_done:
            row.step()
        return row.completion(self.policy_version)

    def open(self, most_rows: int = _MOST_ROWS) -> RenoisingBatch:
        """Open a batch that the caller steps: its progress can be read, and more requests can be submitted."""
        return RenoisingBatch(self, most_rows)


class RenoisingBatch:
    """Rows that are denoised in turns, and requests that wait for one, with the interface of `SlotBatch`.

    A step runs one forward for each row. One forward of several rows would not be exact: their prefixes differ in
    length, and the last bits of a logit change with the batch. Each row holds the logits of a whole canvas, a quarter
    of a gigabyte with DiffusionGemma's vocabulary, so there are few.
    """

    def __init__(self, sampler: RenoisingSampler, most_rows: int) -> None:
        """Make an empty batch. Call `RenoisingSampler.open` instead."""
        self._policy, self._policy_version, self._most_rows = sampler.policy, sampler.policy_version, most_rows
        self._waiting = deque[tuple[int, RenoisingRequest]]()
        self._running: dict[int, Row] = {}
        self._num_submitted = 0

    def submit(self, request: RenoisingRequest) -> int:
        """Queue a request for a row. Returns its index: 0, 1, 2, ...

        Raises ValueError, naming the field, if the policy cannot serve it.
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
        """Requests that wait for a row."""
        return len(self._waiting)

    def cancel(self, index: int) -> None:
        """Drop a request; the next step can start another. Does nothing if it is done or unknown."""
        self._waiting = deque(item for item in self._waiting if item[0] != index)
        self._running.pop(index, None)

    def num_committed(self) -> dict[int, int]:
        """Return the slots in finished canvases of each running request."""
        return {index: row.num_committed for index, row in self._running.items()}

    @torch.inference_mode()
    def progress(self, indices: Sequence[int]) -> dict[int, Progress]:
        """Return the progress of those requests that are running."""
        return {index: self._running[index].progress() for index in indices if index in self._running}

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Completion]]:
        """Fill the free rows, denoise each for a step, and return the completions that are done, with their indices."""
        while self._waiting and len(self._running) < self._most_rows:
            index, request = self._waiting.popleft()
            self._running[index] = Row(self._policy, request)
        for row in self._running.values():
            row.step()
        done = [index for index, row in self._running.items() if row.is_done]
        return [(index, self._completion(self._running.pop(index))) for index in done]

    def _completion(self, row: Row) -> Completion:
        """Return a `Completion` as of the other families: its tokens count as sampled at temperature 0, no padding."""
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
