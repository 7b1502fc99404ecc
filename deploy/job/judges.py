"""vLLM servers that d1 starts for a recipe's LLM judges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from actors.run_log import Event
from deploy.errors import user_errors
from rewards import RewardConfig, RewardUnavailableError
from rewards.terms.judge.config import JudgeConfig
from rewards.terms.judge.server import VllmConfig, vllm_server


def wanted_servers(reward: RewardConfig) -> dict[str, tuple[str, JudgeConfig, VllmConfig]]:
    """Return the first judge term and its settings, by the address of each server that d1 is to start."""
    wanted: dict[str, tuple[str, JudgeConfig, VllmConfig]] = {}
    for name, term in reward.terms.items():
        if isinstance(term, JudgeConfig) and term.vllm is not None:
            wanted.setdefault(term.base_url, (name, term, term.vllm))
    return wanted


@contextmanager
def judge_servers(reward: RewardConfig, run_dir: Path, on_event: Callable[[Event], None]) -> Iterator[None]:
    """Run these servers during the block. Each logs to `judge-TERM.log` in the run directory.

    Raises UserError if one of them does not start.
    """
    with ExitStack() as servers:
        for address, (name, judge, vllm) in wanted_servers(reward).items():
            on_event({"event": "waiting", "what": f"starting vLLM with {judge.model} for the judge {name}"})
            log = run_dir / f"judge-{name}.log"
            with user_errors(RewardUnavailableError, prefix=f"reward.terms.{name}: "):
                servers.enter_context(vllm_server(vllm, model=judge.model, base_url=address, log=log))
        yield
