"""Weights between machines: what leaves the machine that has them first."""

from __future__ import annotations

import json

import pytest

from benchmarks.weights.broadcast import parsed, run_on_machines


@pytest.mark.ray
@pytest.mark.nightly
def test_machines_pass_weights_on_and_fetch_them_once() -> None:
    arguments = parsed(["--megabytes", "64", "--samplers", "8", "--rounds", "2"])
    lines = run_on_machines(arguments, 4).splitlines()
    sent = {found["form"]: found["megabytes"] for found in map(json.loads, lines)}
    assert all(megabytes[0] == pytest.approx(3 * 64, rel=0.1) for megabytes in sent["whole"])
    for form, first in (("adapter", 0), ("shards", 1)):
        # Two samplers on each machine, and three machines that have to get it.
        assert all(sum(megabytes) == pytest.approx(3 * 64, rel=0.1) for megabytes in sent[form])
        assert sum(megabytes[first] for megabytes in sent[form]) < 0.85 * 2 * 3 * 64
