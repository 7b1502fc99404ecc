"""Weights between learner, samplers and service: offered by ranks, held by a store, fetched, verified on arrival."""
