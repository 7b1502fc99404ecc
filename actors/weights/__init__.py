"""Weight sync between learner, samplers and service: offered, stored, fetched and verified."""
