"""The Ray side: pools, coordinator, learner group, weights and registry."""

NAMESPACE = "d1"
"""The Ray namespace of all named actors."""
