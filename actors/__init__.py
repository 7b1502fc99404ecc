"""The Ray side: pools, coordinator, learner group, weights and registry."""
