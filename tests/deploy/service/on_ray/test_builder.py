"""`serve deploy deploy/serve.yaml` gets the service that `d1 serve` would deploy."""

from __future__ import annotations

import secrets
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from actors.registry.server import URL_VARIABLE, ValkeyServer, free_port
from deploy.errors import UserError
from deploy.service.source import Address, Source


@pytest.fixture
def registry_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ValkeyServer(free_port(), secrets.token_urlsafe(16))
    monkeypatch.setenv(URL_VARIABLE, server.url)
    yield server.url
    server.stop()


def _build(arguments: dict[str, Any]) -> Any:
    """As Ray does it, from the arguments of the file."""
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

    from deploy.service.on_ray.builder import application

    return call_user_app_builder_with_args_if_necessary(application, arguments)


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")  # Ray Serve's schema
def test_yaml_arguments_build_the_runs_service(run_dir: Path, registry_url: str) -> None:
    application = _build({"run_dir": str(run_dir)})
    ingress = application._bound_deployment
    assert ingress.name == "Ingress"
    engines, source = ingress.init_args[:2]
    assert engines._bound_deployment.name == "EngineReplica"
    assert engines._bound_deployment.num_replicas == 1
    assert source == Source(directory=str(run_dir), is_run=True, registry_url=registry_url)
    assert Address(host="127.0.0.1", port=8000) in ingress.init_args
    assert ingress.num_replicas == 1
    assert ingress.init_kwargs == {"is_alone": True}


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")
def test_yaml_arguments_set_address_and_number_of_ingresses(
    run_dir: Path, registry_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"run_dir": str(run_dir), "host": "0.0.0.0", "port": 8100, "num_ingresses": 2, "num_engines": 3}
    monkeypatch.delenv("D1_API_TOKEN", raising=False)
    monkeypatch.delenv("D1_API_KEYS_FILE", raising=False)
    with pytest.raises(UserError, match=r"0\.0\.0\.0 can be reached from other machines; choose the keys yourself"):
        _build(arguments)
    monkeypatch.setenv("D1_API_TOKEN", "k" * 32)
    ingress = _build(arguments)._bound_deployment
    assert Address(host="0.0.0.0", port=8100) in ingress.init_args
    assert ingress.num_replicas == 2
    assert ingress.init_args[0]._bound_deployment.num_replicas == 3
    assert ingress.init_kwargs == {"is_alone": False}


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")
def test_invalid_arguments_are_refused(tmp_path: Path, registry_url: str) -> None:
    with pytest.raises(ValidationError, match="run_dirs"):
        _build({"run_dirs": str(tmp_path)})
    with pytest.raises(UserError, match="has to be absolute"):
        _build({"run_dir": "runs/tiny"})
    with pytest.raises(UserError, match="is not a run"):
        _build({"run_dir": str(tmp_path)})


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")
def test_the_service_waits_for_a_run_that_starts_later(run_dir: Path, registry_url: str, tmp_path: Path) -> None:
    """Ray Serve would not build it again."""
    late, made = tmp_path / "late", shutil.copytree(run_dir, tmp_path / "made")
    begins = threading.Timer(1.5, made.rename, (late,))
    begins.start()
    ingress = _build({"run_dir": str(late), "wait_s": 60})._bound_deployment
    begins.join()
    assert ingress.init_args[1].directory == str(late)
    with pytest.raises(UserError, match="is not a run"):
        _build({"run_dir": str(tmp_path / "never"), "wait_s": 0.1})
