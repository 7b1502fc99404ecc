"""The planner of the service: makes a job for an engine of the body of a request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from structlog.contextvars import get_contextvars

from actors.registry.records import BASE, BEST, POLICY
from deploy.requests import planner
from deploy.requests.body import CompletionBody
from deploy.requests.defaults import Defaults
from deploy.requests.families import AnyRequest, num_slots_of
from deploy.requests.planner import RequestPlan
from deploy.requests.renoising import RenoisingDefaults
from deploy.service.api.text_codec import TextCodec
from deploy.service.contract import Job
from deploy.service.errors import ServiceError
from rollout.request import Request

_VERSION = re.compile(r"policy@v(\d{1,9})")

LAST = "last"
"""What the command line calls the newest: here `policy`."""


class ServicePlanner(planner.Planner):
    """Makes the plans and the jobs of one service."""

    def __init__(
        self,
        codec: TextCodec,
        defaults: Defaults | RenoisingDefaults,
        name: str,
        timeout_s: float = 120.0,
        served_names: Sequence[str] = (),
    ) -> None:
        """Plan for a service.

        Args:
            codec: how its policy reads.
            defaults: what requests leave out.
            name: the run's; another name of `policy`, unless a version is called so.
            timeout_s: time that a job may take, in seconds.
            served_names: more of them.
        """
        super().__init__(codec, defaults)
        self.name, self._timeout_s = name, timeout_s
        # A run may be called `base`: that still means what its rounds began from.
        self.aliases = tuple(one for one in dict.fromkeys((LAST, name, *served_names)) if one not in (BASE, BEST))
        """All other names of `policy`."""

    def wanted(self, model: str | None) -> str | int:
        """The alias or the version that a model's name means. Raises ServiceError."""
        # Empty as left out, as vLLM has it.
        if not model or model in (POLICY, *self.aliases):
            return POLICY
        if model in (BASE, BEST):
            return model
        match = _VERSION.fullmatch(str(model))
        if match is None:
            names = f"{', '.join((POLICY, BASE, BEST, 'policy@vNNNNNN', *self.aliases[1:-1]))} and {self.aliases[-1]}"
            message = f"This service has the models {names}."
            raise ServiceError(404, message, "model_not_found", param="model")
        return int(match[1])

    def plan(self, ask: CompletionBody, names: Mapping[str, str] | None = None) -> RequestPlan:
        """What a body asks for. Raises RequestError or ServiceError."""
        self.wanted(ask.model)
        try:
            return super().plan(ask, names)
        except ServiceError as error:
            # Of a prompt that is too long; the body has its own name for it.
            error.param = error.param or ask.prompt_field
            raise

    def job(self, ask: CompletionBody, plan: RequestPlan) -> Job:
        """What the engines do for a body."""
        return Job(
            requests=tuple(
                replace(request, grammar=None) if isinstance(request, Request) else request for request in plan.requests
            ),
            wanted=self.wanted(ask.model),
            grammar=plan.grammar,
            shows_canvas=plan.shows_canvas,
            # Who waits for the whole answer needs them only where it may end early.
            tells_blocks=bool(ask.stream or plan.stops or plan.most_tokens < plan.num_slots),
            timeout_s=self._timeout_s,
            request_id=str(get_contextvars().get("request_id", "")),
        )

    def check(self, request: AnyRequest) -> None:
        """As of the planner; a client that trims its prompts knows the code of one that is too long."""
        config = self._codec.config
        num_tokens, room = len(request.prompt_ids), config.max_sequence_length - num_slots_of(request, config)
        if num_tokens > room:
            message = f"The prompt has {num_tokens} tokens; this policy reads at most {room}."
            raise ServiceError(400, message, "context_length_exceeded")
        super().check(request)
