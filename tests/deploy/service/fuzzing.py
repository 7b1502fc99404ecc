"""Fuzzing by the OpenAPI schema: some hundred fixed cases, or 10,000 others with `make fuzz`."""

import os

import hypothesis
from hypothesis import HealthCheck, strategies

NUM_CASES = int(os.environ.get("D1_FUZZ_CASES", "300"))
SEED = int(os.environ.get("D1_FUZZ_SEED", "0"))


def settings(num_cases):
    return hypothesis.settings(max_examples=num_cases, database=None, suppress_health_check=list(HealthCheck))


def each_case(operation, mode, num_cases, seed, ask):
    """Run `ask` on `num_cases` generated cases of an operation."""

    # Random model names and token ids rarely exist, so half of the cases use ones that do.
    @hypothesis.seed(seed)
    @settings(num_cases)
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode), is_known=strategies.booleans())
    def run(case, is_known):
        if is_known and isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "policy"
        if is_known and isinstance(case.body, dict) and case.body.get("stop_token_ids"):
            case.body["stop_token_ids"] = [7]
        if is_known and "name" in case.path_parameters:
            case.path_parameters["name"] = "policy"
        ask(case)

    run()
