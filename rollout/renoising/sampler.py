"""Entropy-bounded sampling with renoising (DiffusionGemma): requests in, completions out.

`row.py` has the steps. The returned tokens are the most probable ones, not samples, so they have no log-probability.
The tokens that a step keeps are samples: slots are chosen by their entropies, before sampling. So the sum over steps of
the kept tokens' log-probabilities is the exact log-likelihood of the trajectory (`learner/estimators/renoised.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from learner.model.renoising.policy import RenoisingPolicy
from rollout.renoising.random_source import RandomSource
from rollout.renoising.request import RenoisedCompletion, RenoisingRequest, check_renoising_request
from rollout.renoising.row import RenoisingRow, StepCallback
from rollout.request import Completion, Progress
from rollout.sampler import Sampler

_MAX_ROWS = 8


class RenoisingSampler:
    """Samples completions from one policy version, one request after another, or interleaved (`open`)."""

    def __init__(self, policy: RenoisingPolicy, policy_version: int) -> None:
        """Sample from `policy`, on its device. Its weights must not change."""
        self.model, self.policy_version = policy, policy_version

    def generate(
        self,
        requests: Sequence[RenoisingRequest],
        on_completion: Callable[[int, RenoisedCompletion], None] | None = None,
    ) -> list[RenoisedCompletion]:
        """Sample completions of `requests`, in their order.

        `on_completion` is called with each request's index and completion as soon as it is done.

        Raises:
            ValueError: the policy cannot serve a request; the message has its index and field.
            FloatingPointError: a prediction is not finite: the policy's weights are bad.
        """
        for index, request in enumerate(requests):
            try:
                check_renoising_request(request, self.model.config)
            except ValueError as error:
                raise ValueError(f"request {index}: {error}") from error
        completions = []
        for index, request in enumerate(requests):
            completions.append(self.complete(request))
            if on_completion is not None:
                on_completion(index, completions[-1])
        return completions

    @torch.inference_mode()
    def complete(
        self, request: RenoisingRequest, random_source: RandomSource | None = None, on_step: StepCallback | None = None
    ) -> RenoisedCompletion:
        """Sample the completion of one request. `random_source` replaces the random draws keyed by its seed."""
        row = RenoisingRow(self.model, request, random_source, on_step)
        while not row.is_done:
            row.step()
        return row.completion(self.policy_version)

    def open(self, max_rows: int = _MAX_ROWS) -> RenoisingBatch:
        """Open a batch that the caller steps: its progress can be read, and more requests can be submitted."""
        return RenoisingBatch(self, max_rows)


class RenoisingBatch:
    """Rows that are denoised in turns, and requests that wait for one, with the interface of `SlotBatch`.

    A step runs one forward for each row. One forward of several rows would not be exact: their prefixes differ in
    length, and the last bits of a logit change with the batch. Each row holds the logits of a whole canvas, a quarter
    of a gigabyte with DiffusionGemma's vocabulary, so there are few.
    """

    def __init__(self, sampler: RenoisingSampler, max_rows: int) -> None:
        """Make an empty batch. Call `RenoisingSampler.open` instead."""
        self._policy, self._policy_version, self._max_rows = sampler.model, sampler.policy_version, max_rows
        self._waiting = deque[tuple[int, RenoisingRequest]]()
        self._running: dict[int, RenoisingRow] = {}
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
        while self._waiting and len(self._running) < self._max_rows:
            index, request = self._waiting.popleft()
            self._running[index] = RenoisingRow(self._policy, request)
        for row in self._running.values():
            row.step()
        done = [index for index, row in self._running.items() if row.is_done]
        return [(index, self._completion(self._running.pop(index))) for index in done]

    def _completion(self, row: RenoisingRow) -> Completion:
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


AnySampler = Sampler | RenoisingSampler
"""Sampler of a masked policy, or of a renoising one."""
