"""OpenAPI schema: responses to valid and invalid requests conform to it (schemathesis)."""

import math
import sys
from collections import Counter

import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis import checks as general
from schemathesis.specs.openapi import checks as openapi

from tests.deploy.service.fuzzing import NUM_CASES, SEED, each_case

TOKEN = "a-token-of-this-test"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
# An endless stream; test_policy_events.py tests it.
ENDLESS = "/v1/policy/events"
OPEN = {"/health", "/health/ready", "/ping"}
# Percent of the cases. Operations without inputs are requested once in addition.
SHARES = {
    "/v1/completions": 34,
    "/v1/chat/completions": 35,
    "/tokenize": 8,
    "/detokenize": 8,
    "/v1/models/{name}": 3,
    "/v1/policy/{version}": 12,
}
CHECKS = [
    general.not_a_server_error,
    openapi.status_code_conformance,
    openapi.content_type_conformance,
    openapi.response_headers_conformance,
    openapi.response_schema_conformance,
]


@pytest.fixture
def operations(app, listen):
    """The operations of the schema by path."""
    schema = schemathesis.openapi.from_url(listen(app, TOKEN) + "/openapi.json", headers=BEARER)
    return {operation.path: operation for operation in (found.ok() for found in schema.get_all_operations())}


@pytest.mark.timeout(120 + NUM_CASES // 2)
@pytest.mark.parametrize("seed", [SEED])
def test_every_answer_matches_the_openapi_schema(operations, seed):
    statuses = Counter()

    def ask(case):
        # Invalid cases may add their own authorization header, and a request with two keys has none.
        case.headers = dict(BEARER)
        response = case.call(timeout=60)
        statuses[case.operation.path, response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    assert set(SHARES) <= set(operations)
    for path, operation in operations.items():
        if path == ENDLESS:
            continue
        if path not in SHARES:
            each_case(operation, GenerationMode.POSITIVE, 1, seed, ask)
            continue
        num_cases = math.ceil(NUM_CASES * SHARES[path] / 100)
        each_case(operation, GenerationMode.POSITIVE, math.ceil(num_cases / 2), seed, ask)
        each_case(operation, GenerationMode.NEGATIVE, math.ceil(num_cases / 2), seed, ask)
    sys.stdout.write(f"\nseed {seed}: {statuses.total()} cases\n")
    sys.stdout.writelines(f"  {status} {path}: {count}\n" for (path, status), count in sorted(statuses.items()))
    assert statuses.total() >= NUM_CASES
    # The test would prove nothing if everything were refused.
    for path, share in SHARES.items():
        assert path == "/v1/policy/{version}" or statuses[path, 200] >= NUM_CASES * share / 1000, statuses
    assert sum(count for (_, status), count in statuses.items() if status == 400) >= NUM_CASES / 10


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer a-key-that-nobody-has"}])
def test_routes_without_security_in_the_schema_are_the_only_open_ones(operations, headers):
    for path, operation in operations.items():
        is_open = path in OPEN
        assert ("security" in operation.definition.raw) != is_open, path

        def ask(case, is_open=is_open):
            response = case.call(headers=headers, timeout=60)
            assert response.status_code == (200 if is_open else 401)
            case.validate_response(response, checks=CHECKS)

        each_case(operation, GenerationMode.POSITIVE, 3, SEED, ask)
