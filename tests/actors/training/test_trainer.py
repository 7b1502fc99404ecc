"""The network interface of a learner's process groups."""

from __future__ import annotations

import os

import pytest
import ray

from actors.training.trainer import choose_interface

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@pytest.fixture(autouse=True)
def _no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (GLOO, NCCL):
        # So that what a test sets is undone: of an absent variable, monkeypatch remembers nothing.
        monkeypatch.setenv(variable, "")
        del os.environ[variable]


def _on_node(monkeypatch: pytest.MonkeyPatch, address: str) -> dict[str, str | None]:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: address)
    choose_interface()
    return {variable: os.environ.get(variable) for variable in (GLOO, NCCL)}


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_ranks_use_the_interface_of_their_ray_node(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    assert _on_node(monkeypatch, address) == {GLOO: "lo", NCCL: "=lo"}


def test_an_interface_that_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO, "eth7")
    assert _on_node(monkeypatch, "127.0.0.1") == {GLOO: "eth7", NCCL: "=lo"}


def test_no_interface_is_chosen_for_an_address_that_the_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    # 192.0.2.0/24 is reserved for documentation.
    assert _on_node(monkeypatch, "192.0.2.1") == {GLOO: None, NCCL: None}
