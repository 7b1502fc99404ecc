from dataclasses import replace

import pytest
import torch

from actors.weights import make_manifest, verify

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def test_weights_that_arrived_whole_pass() -> None:
    verify(make_manifest(3, WEIGHTS), {name: tensor.clone() for name, tensor in WEIGHTS.items()})


@pytest.mark.parametrize("change", ["value", "shape", "dtype", "missing", "extra"])
def test_any_difference_is_named(change: str) -> None:
    arrived = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    if change == "value":
        arrived["b"][2] += 1
    elif change == "shape":
        arrived["b"] = arrived["b"].view(2, 2)
    elif change == "dtype":
        arrived["b"] = arrived["b"].view(torch.float16)
    elif change == "missing":
        del arrived["b"]
    else:
        arrived["c"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"policy version 3 arrived .* (tensor b differs|an unlisted tensor c)"):
        verify(make_manifest(3, WEIGHTS), arrived)


def test_a_damaged_base_is_named_as_one() -> None:
    arrived = {**WEIGHTS, "a": WEIGHTS["a"] + 1}
    with pytest.raises(ValueError, match=r"^base 0123 arrived damaged: tensor a differs"):
        verify(make_manifest(3, WEIGHTS), arrived, "base 0123")


def test_a_manifest_lists_shape_and_dtype() -> None:
    entry = make_manifest(3, WEIGHTS).tensors[1]
    assert (entry.name, entry.shape, entry.dtype) == ("b", (4,), "torch.bfloat16")
    assert replace(entry, checksum=0) != entry


def test_a_digest_names_the_weights_in_whichever_order_they_come() -> None:
    digest = make_manifest(3, WEIGHTS).digest
    assert make_manifest(4, dict(reversed(WEIGHTS.items()))).digest == digest
    assert make_manifest(3, WEIGHTS | {"a": WEIGHTS["a"] + 1}).digest != digest


def test_tensors_may_travel_for_as_long_as_their_bytes_take() -> None:
    """At the slowest rate that is waited for: all of 8B parameters take eleven minutes."""
    manifest = make_manifest(3, WEIGHTS)
    assert [entry.num_bytes for entry in manifest.tensors] == [6 * 4, 4 * 2]
    assert manifest.travel_s(10.0) == pytest.approx(10 + 32 / 50e6)
    whole = replace(manifest, tensors=(replace(manifest.tensors[0], shape=(8_000_000_000,)),))
    assert whole.travel_s(120.0) == pytest.approx(120 + 640)
