"""The Ray side: pools, coordinator, learner group, weights and registry."""

NAMESPACE = "d1"
"""The Ray namespace of all named actors."""


def actor_name(run: str, name: str) -> str:
    """What Ray calls an actor of a run, by its name among the run's: `tiny-sampler-1` is `sampler 1` of `tiny`."""
    return f"{run}-{name.replace(' ', '-')}"
