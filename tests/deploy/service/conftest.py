"""Fixtures of the service: a run directory with a tiny random checkpoint, and further versions."""

import secrets
import shutil
import threading
import time
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import pytest
import ray
import uvicorn
import yaml
from starlette.testclient import TestClient

from actors.registry.records import PolicyVersion
from actors.registry.registry import Registry
from actors.registry.server import ValkeyServer
from actors.registry.server import free_port as find_free_port
from benchmarks.service.deployment import forget_serve
from deploy.ray_session import MAX_STARTS, connect_with_retries
from deploy.requests.families import Defaults
from deploy.runs.checkpoints import read_recipe
from deploy.service.api.app import Service, create_app, guarded
from deploy.service.api.inference import ServicePlanner
from deploy.service.api.text_codec import TextCodec
from deploy.service.checkpoints import Checkpoints, latest_checkpoint
from deploy.service.contract import BlocksDone, EngineLostError
from deploy.service.engine.engine import Engine
from deploy.service.engine.engine_host import EngineHost
from deploy.service.engine.loading import VersionLoader
from deploy.service.engine.versions import Versions
from deploy.service.gateway.keys import ApiKeys, RateLimits
from learner.model.checkpoint import save_checkpoint
from learner.model.tokenizer import ChatTokenizer, make_tokenizer
from learner.model.transformer import Transformer, init_weights
from rollout.config import EngineConfig
from rollout.sampler import Sampler
from tests.deploy.service.asking import TOKEN
from tests.ray_processes import shut_down_ray
from tests.tiny_policy import config_of

RECIPE = {
    "name": "tiny",
    "task": {"name": "sums"},
    "sft": {"num_labels": 8, "num_steps": 1},
    "learner": {"num_rounds": 1},
    "num_train_problems": 32,
    "rollout": {"sampling": {"gen_length": 16, "block_length": 8, "num_denoise_steps": 8}},
}


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(["What is 1 + 2?", "The sum is 3."], directory, 320)
    return directory


@pytest.fixture(scope="session")
def tiny_config(tokenizer_dir):
    tokenizer = ChatTokenizer(tokenizer_dir)
    return config_of(tokenizer, max_sequence_length=64, mlp_hidden_size=32)


@pytest.fixture(scope="session")
def make_model(tiny_config):
    """Create the weights of a version: random, and different for each."""

    def make(version):
        model = Transformer(tiny_config)
        init_weights(model, seed=version)
        return model

    return make


@pytest.fixture(scope="session")
def make_sampler(make_model):
    return lambda version: Sampler(make_model(version), version)


@pytest.fixture(scope="session")
def add_checkpoint(tiny_config, tokenizer_dir, make_model):
    def add(run_dir, version, phase="rl", round_index=0):
        directory = run_dir / "checkpoints" / f"{phase}-{version}"
        state = {"phase": phase, "round": round_index, "policy_version": version, "rl_seconds": 0.0}
        weights = make_model(version).state_dict()
        save_checkpoint(directory, tiny_config, weights, tokenizer_dir, trainer_state=state)
        return directory

    return add


@pytest.fixture(scope="session")
def run_to_copy(tmp_path_factory, add_checkpoint):
    directory = tmp_path_factory.mktemp("run")
    (directory / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    add_checkpoint(directory, 1, "sft")
    return directory


@pytest.fixture
def run_dir(tmp_path, run_to_copy):
    """A run whose newest checkpoint is version 1."""
    return shutil.copytree(run_to_copy, tmp_path / "tiny")


@pytest.fixture
def versions(run_dir, make_sampler):
    """The versions of an engine that serves version 1 of `run_dir`. Any other version loads as random weights."""
    policy = latest_checkpoint(run_dir)
    checkpoint = run_dir / "checkpoints" / "sft-1"
    return Versions(
        VersionLoader(checkpoint, EngineConfig()).load(policy),
        policy,
        load=lambda policy: make_sampler(policy.version),
        locate=Checkpoints(run_dir).locate,
    )


@pytest.fixture
def engine(versions):
    engine = Engine(versions)
    yield engine
    engine.close()


@pytest.fixture
def host(versions, engine):
    return EngineHost(versions, engine)


@pytest.fixture(scope="session")
def codec(run_to_copy):
    return TextCodec(run_to_copy / "checkpoints" / "sft-1")


@pytest.fixture
def service(run_dir, host, codec):
    """The dependencies of an application, with an engine in this process."""
    planner = ServicePlanner(codec, Defaults.of_run(read_recipe(run_dir).rollout.sampling), "tiny")
    return Service(
        backend=host,
        codec=codec,
        planner=planner,
        checkpoints=Checkpoints(run_dir),
        directory=run_dir,
        registry=None,
    )


@pytest.fixture(scope="session")
def make_policy():
    def make(version, **facts):
        values = {
            "round": version - 1,
            "phase": "rl",
            "num_correct": None,
            "num_problems": None,
            "checkpoint": None,
            "weight_store": None,
            "manifest_digest": None,
        }
        return PolicyVersion(version=version, **(values | facts))

    return make


@pytest.fixture(scope="session")
def registry_server():
    server = ValkeyServer(find_free_port(), secrets.token_urlsafe(16))
    yield server
    server.stop()


@pytest.fixture
def registry(registry_server):
    """An empty registry."""
    registry = Registry(registry_server.url, secrets.token_hex(4))
    yield registry
    registry.close()


@pytest.fixture
def unused_port():
    """Function that finds a free port."""
    return find_free_port


@pytest.fixture
def free_port():
    return find_free_port()


@pytest.fixture
def app(service):
    return create_app(service)


@pytest.fixture
def full_until(engine, monkeypatch):
    """Make the engine refuse submissions before the given try. Returns the list of tries so far."""

    def start(num):
        engine._max_pending = 0
        submit, tries = engine.submit, []

        def count(*arguments):
            tries.append(1)
            if len(tries) == num:
                engine._max_pending = 100
            return submit(*arguments)

        monkeypatch.setattr(engine, "submit", count)
        return tries

    return start


@pytest.fixture
def open_client():
    """Open clients of an application in this process, and close them at the end."""
    opened = []

    def open_one(inside, headers):
        opened.append(TestClient(inside, headers=headers, raise_server_exceptions=False))
        return opened[-1].__enter__()

    yield open_one
    for client in opened:
        client.__exit__(None, None, None)


@pytest.fixture
def listen(free_port):
    """Serve an application behind authentication and rate limits on a socket. Returns its URL."""
    stops = []

    def serve(app, token):
        inside = guarded(app, ApiKeys.of(token, "test"), RateLimits("1000000/second"))
        config = uvicorn.Config(inside, host="127.0.0.1", port=free_port, log_level="error", lifespan="on", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        stops.append((server, thread))
        deadline = time.monotonic() + 20
        while not server.started:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        return f"http://127.0.0.1:{free_port}"

    yield serve
    for server, thread in stops:
        server.should_exit = True
        thread.join(20)


@pytest.fixture
def mortal_service(service, monkeypatch):
    """A service whose engine dies for good after the first block."""

    class Mortal:
        def __init__(self, host):
            self.host, self.num_jobs = host, 0

        async def stream(self, job):
            self.num_jobs += 1
            if self.num_jobs > 1:
                raise EngineLostError("gone")
            async with aclosing(self.host.stream(job)) as stream:
                async for events in stream:
                    # Several events may come at once.
                    num = next((index for index, one in enumerate(events, 1) if isinstance(one, BlocksDone)), None)
                    yield events[:num]
                    if num is not None:
                        break
            raise EngineLostError("SIGKILL")

        async def states(self):
            return await self.host.states()

    monkeypatch.setattr("deploy.service.failover._PAUSE_S", 0)
    return replace(service, backend=Mortal(service.backend))


@pytest.fixture
def serve_cluster(monkeypatch):
    """Start a Ray owned by this process on which a service can be deployed. Returns its context."""
    for name in ("D1_REDIS_URL", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("D1_API_TOKEN", TOKEN)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    # As `ray_session` sets it.
    monkeypatch.setenv("RAY_SERVE_USE_GRPC_BY_DEFAULT", "1")
    start = partial(ray.init, address="local", num_cpus=2, include_dashboard=True, log_to_driver=False)
    yield connect_with_retries(partial(start, object_store_memory=10**8), MAX_STARTS)
    shut_down_ray()
    forget_serve()
