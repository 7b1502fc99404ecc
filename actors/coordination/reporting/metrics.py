"""Ray metrics of a run: on the dashboard, and on each node's Prometheus endpoint as `ray_d1_*`."""

from __future__ import annotations

import math

from actors.run_log import Event

_GAUGES = {
    "reward": "Mean reward of the newest round",
    "correct": "Share of right completions in the newest round",
    "policy_version": "Newest published policy version",
    "tokens_per_s": "Completion tokens trained on per second of the newest round",
    "sampling_s": "Seconds the learner waited for the newest round's completions",
    "training_s": "Seconds the learner trained on the newest round",
    "num_failed_groups": "Groups of the newest round that failed",
    "num_sampled_groups": "Groups sampled for the newest round, with those that replace others",
    "frac_reward_zero_std": "Share of the newest round's groups whose rewards are all equal",
}
_POOL_GAUGES = {
    "pool_away": "Actors of the pool that did not answer at the end of the newest round",
    "pool_busy": "Share of the pool's time that it was at work in the newest round",
}


class RunGauges:
    """One gauge for each number, labelled with the run's name."""

    def __init__(self, run: str) -> None:
        from ray.util.metrics import Gauge

        self._gauges = {name: Gauge(f"d1_{name}", text, ("run",)) for name, text in _GAUGES.items()}
        for gauge in self._gauges.values():
            gauge.set_default_tags({"run": run})
        self._pools = {name: Gauge(f"d1_{name}", text, ("run", "pool")) for name, text in _POOL_GAUGES.items()}
        for gauge in self._pools.values():
            gauge.set_default_tags({"run": run})

    def show(self, event: Event) -> None:
        """Set every gauge from a `round` event."""
        for name, gauge in self._gauges.items():
            # A round without training has no metrics of the learner.
            gauge.set(float(event.get(name, math.nan)))
        for pool, use in event["pools"].items():
            for name, gauge in self._pools.items():
                gauge.set(float(use[name.removeprefix("pool_")]), {"pool": pool})
