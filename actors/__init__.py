"""Ray actors of a run: coordinator, sampler and grader pools, learner, weight store and registry."""

NAMESPACE = "d1"
"""The Ray namespace of all named actors."""


def actor_name(run: str, name: str) -> str:
    """Return the Ray name of a run's actor: `sampler 1` of run `tiny` is `tiny-sampler-1`."""
    return f"{run}-{name.replace(' ', '-')}"
