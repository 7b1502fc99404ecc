"""What the service takes from a run directory before anything is started."""

import gc
import json
import socket
import stat
import threading
from contextlib import nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
import yaml

from actors.weights.tensors import make_manifest
from deploy.errors import RunFailedError, UserError
from deploy.ray_session import RaySession
from deploy.recipe.recipe import ServiceSection
from deploy.service.checkpoints import latest_checkpoint, plain_checkpoint
from deploy.service.engine.loading import VersionLoader
from deploy.service.gateway.keys import ApiKeys, own_key, read_keys
from deploy.service.on_ray import launch
from deploy.service.on_ray.launch import banner, banner_of_key, serve_checkpoint, serve_run
from deploy.service.source import Address, Source
from learner.model.adapter import Adapter, read_adapter
from learner.model.checkpoint import load_policy, save_checkpoint
from learner.model.checkpoint_files import BaseCheckpoint, chain_digest
from rollout.config import EngineConfig


def test_the_highest_version_is_served_except_the_controls(run_dir, add_checkpoint):
    directory = add_checkpoint(run_dir, 4, "rl", round_index=3)
    add_checkpoint(run_dir, 5, "control")
    (run_dir / "checkpoints" / ".rl-9.partial").mkdir()
    state = {"phase": "rl", "round": 8, "policy_version": 9}
    (run_dir / "checkpoints" / ".rl-9.partial" / "trainer_state.json").write_text(json.dumps(state))
    policy = latest_checkpoint(run_dir)
    assert (policy.version, policy.round, policy.phase) == (4, 3, "rl")
    assert (policy.checkpoint, policy.num_problems) == (str(directory), None)


def test_a_checkpoint_has_its_latest_score(run_dir):
    events = [(0, 1, 10), (1, 3, 10), (1, 4, 10), (2, 9, 10)]
    lines = [
        {"event": "evaluation", "time_s": 1.0, "policy_version": version, "num_correct": right, "num_problems": asked}
        for version, right, asked in events
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert latest_checkpoint(run_dir).num_correct == 4


def test_a_large_policy_uses_the_given_threads(run_dir, monkeypatch):
    source = Source(directory=str(run_dir / "checkpoints" / "sft-1"), is_run=False, registry_url=None)
    source.versions("cpu", num_threads=2)
    assert torch.get_num_threads() == 1
    monkeypatch.setattr("learner.hardware._MIN_SHARED_PARAMETERS", 1000)
    source.versions("cpu", num_threads=2)
    assert torch.get_num_threads() == 2


def test_a_directory_that_is_not_a_run_is_refused(tmp_path, run_dir, free_port):
    with pytest.raises(UserError, match=r"is not a run: it has no recipe\.yaml"):
        serve_run(tmp_path / "nothing", "127.0.0.1", free_port)
    for checkpoint in (run_dir / "checkpoints").iterdir():
        checkpoint.rename(tmp_path / checkpoint.name)
    with pytest.raises(UserError, match="has no checkpoint to serve yet"):
        serve_run(run_dir, "127.0.0.1", free_port)
    (run_dir / "recipe.yaml").write_text("name: 3")
    with pytest.raises(UserError, match=r"recipe\.yaml: name is 3"):
        serve_run(run_dir, "127.0.0.1", free_port)


def test_weights_that_the_store_dropped_come_from_the_checkpoint(run_dir, make_policy, monkeypatch):
    class Gone:
        def version(self, version, digest):
            raise LookupError(f"the store has no {version}")

    monkeypatch.setattr("actors.weights.fetching.open_store", lambda store, timeout_s: Gone())
    checkpoint = run_dir / "checkpoints" / "sft-1"
    with pytest.raises(LookupError, match="the store has no 2"):
        VersionLoader(checkpoint, EngineConfig()).load(make_policy(2, weight_store="d1-weights-tiny"))
    policy = make_policy(1, weight_store="d1-weights-tiny", checkpoint=str(checkpoint))
    assert VersionLoader(checkpoint, EngineConfig()).load(policy).policy_version == 1
    with pytest.raises(LookupError, match="without a store or a checkpoint"):
        VersionLoader(checkpoint, EngineConfig()).load(make_policy(2))


def test_a_checkpoint_on_another_machine_is_unreachable_and_not_refused(run_dir, make_policy):
    gone = make_policy(2, checkpoint=str(run_dir / "checkpoints" / "rl-2"))
    with pytest.raises(LookupError, match="this machine has no such folder"):
        VersionLoader(run_dir / "checkpoints" / "sft-1", EngineConfig()).load(gone)


def test_weights_from_a_store_make_the_policy(run_dir, make_model, make_policy, monkeypatch):
    weights = make_model(2).state_dict()
    checkpoint = run_dir / "checkpoints" / "sft-1"

    class Store:
        def version(self, version, digest):
            return make_manifest(version, weights), weights

    monkeypatch.setattr("actors.weights.fetching.open_store", lambda store, timeout_s: Store())
    loaded = VersionLoader(checkpoint, EngineConfig()).load(make_policy(2, weight_store="s")).model.state_dict()
    assert loaded.keys() == weights.keys()
    assert all(loaded[name].equal(weights[name]) for name in weights)
    del weights["head.weight"]
    with pytest.raises(RuntimeError, match=r"head\.weight"):
        VersionLoader(checkpoint, EngineConfig()).load(make_policy(2, weight_store="s"))


def _adapter(model, seed):
    generator = torch.Generator().manual_seed(seed)
    outputs, inputs = model.blocks[0].attn.q_proj.weight.shape
    shapes = {"A": (2, inputs), "B": (outputs, 2)}
    matrices = {
        f"blocks.0.attn.q_proj.lora_{name}.weight": torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    return Adapter(rank=2, alpha=4, base="sft-1", matrices=matrices)


def test_versions_of_a_lora_run_share_base_weights(
    run_dir, make_model, make_policy, tiny_config, tokenizer_dir, monkeypatch
):
    """Of all stages, from checkpoints and from the store; each computes what its checkpoint alone would."""
    checkpoints = run_dir / "checkpoints"
    stands_on = {2: "sft-1", 3: "sft-1", 4: "rl-3"}
    adapters = {version: replace(_adapter(make_model(1), version), base=base) for version, base in stands_on.items()}
    for version, adapter in adapters.items():
        state = {"phase": "rl", "round": version, "policy_version": version, "rl_seconds": 0.0, "manifest_digest": "d"}
        directory = checkpoints / f"rl-{version}"
        save_checkpoint(directory, tiny_config, None, tokenizer_dir, adapter=adapter, trainer_state=state)

    class Store:
        def version(self, version, digest):
            name = stands_on[version]
            base = BaseCheckpoint(checkpoint=name, digest=chain_digest(checkpoints / name), scaling=2.0)
            return make_manifest(version, adapters[version].matrices, base), adapters[version].matrices

    monkeypatch.setattr("actors.weights.fetching.open_store", lambda store, timeout_s: Store())
    loader = VersionLoader(checkpoints / "sft-1", EngineConfig())
    directories = [checkpoints / name for name in ("sft-1", "rl-2", "rl-3", "rl-4", "rl-2", "sft-1")]
    from_store = make_policy(3, weight_store="s")
    announced = [
        from_store if path.name == "rl-3" else replace(plain_checkpoint(path), weight_store=None)
        for path in directories
    ]
    models = [loader.load(policy).model for policy in announced]
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        outputs = [model(ids) for model in models]
        for path, output in zip(directories, outputs, strict=True):
            assert torch.equal(output, load_policy(path)(ids)), path.name
    assert not torch.equal(outputs[1], outputs[2])
    weights = {model.embed.weight.data_ptr() for model in models}
    held = {parameter.data_ptr() for model in models for parameter in model.parameters()}
    num_adapted = len(models) - 2
    assert (len(weights), len(held)) == (1, len(list(models[0].parameters())) + 2 * num_adapted)


@pytest.fixture
def adapted(run_dir, make_model, tiny_config, tokenizer_dir):
    """A checkpoint of an adapter on `sft-1`."""
    directory = run_dir / "checkpoints" / "rl-2"
    state = {"phase": "rl", "round": 2, "policy_version": 2, "rl_seconds": 0.0}
    adapter = _adapter(make_model(1), 2)
    save_checkpoint(directory, tiny_config, None, tokenizer_dir, adapter=adapter, trainer_state=state)
    return directory


def test_unused_base_weights_are_freed(run_dir, make_model, make_policy, adapted, monkeypatch):
    """Of full fine-tuning the first checkpoint's, when the store has the next version; under LoRA all, at the end."""

    class Store:
        def version(self, version, digest):
            weights = make_model(version).state_dict()
            return make_manifest(version, weights), weights

    monkeypatch.setattr("actors.weights.fetching.open_store", lambda store, timeout_s: Store())
    loader = VersionLoader(run_dir / "checkpoints" / "sft-1", EngineConfig())
    for directory in (run_dir / "checkpoints" / "sft-1", adapted):
        weights = ref(loader.load(plain_checkpoint(directory)).model.embed.weight)
        assert loader.load(make_policy(7, weight_store="s")).policy_version == 7
        gc.collect()
        assert weights() is None


def test_a_base_on_another_machine_is_unreachable_and_not_refused(run_dir, adapted, monkeypatch):
    """An engine refuses what is damaged, for all engines; another may see it."""

    class Store:
        def version(self, version, digest):
            adapter = read_adapter(adapted)
            base = BaseCheckpoint(checkpoint="sft-9", digest="not looked at", scaling=adapter.scaling)
            return make_manifest(version, adapter.matrices, base), adapter.matrices

    monkeypatch.setattr("actors.weights.fetching.open_store", lambda store, timeout_s: Store())
    policy = replace(plain_checkpoint(adapted), weight_store="s", checkpoint=None, manifest_digest=None)
    with pytest.raises(LookupError, match=r"the base checkpoint sft-9 is not in .* on this machine"):
        VersionLoader(adapted, EngineConfig()).load(policy)


def test_a_checkpoint_of_an_adapter_can_be_served(adapted, monkeypatch):
    def reached(*_):
        raise UserError("the port is taken")

    monkeypatch.setattr(launch, "_check_port", reached)
    with pytest.raises(UserError, match="the port is taken"):
        serve_checkpoint(adapted, None, None, "float32")


@pytest.fixture
def digested(tiny_config, tokenizer_dir, make_model, run_dir):
    """A checkpoint of version 2 that says its checksum, and that checksum."""
    weights = make_model(2).state_dict()
    digest = make_manifest(2, weights).digest
    directory = run_dir / "checkpoints" / "rl-2"
    state = {"phase": "rl", "round": 1, "policy_version": 2, "rl_seconds": 0.0, "manifest_digest": digest}
    save_checkpoint(directory, tiny_config, weights, tokenizer_dir, trainer_state=state)
    return directory, digest


def test_a_checkpoint_states_the_checksum_of_its_weights(run_dir, digested):
    directory, digest = digested
    assert latest_checkpoint(run_dir).manifest_digest == plain_checkpoint(directory).manifest_digest == digest


@pytest.mark.parametrize("name", ["rl-2", "sft-1"])
def test_a_checkpoint_with_another_checksum_than_announced_is_refused(run_dir, make_model, make_policy, digested, name):
    """One that says its checksum, and one of an earlier d1, which does not."""
    directory, version = run_dir / "checkpoints" / name, int(name[-1])
    digest = make_manifest(version, make_model(version).state_dict()).digest
    policy = make_policy(version, checkpoint=str(directory), manifest_digest=digest)
    assert VersionLoader(directory, EngineConfig()).load(policy).policy_version == version
    words = (
        f"{name} holds other weights than were announced: their checksum is {digest[:12]}, and that was deaddeaddead"
    )
    with pytest.raises(ValueError, match=words):
        VersionLoader(directory, EngineConfig()).load(replace(policy, manifest_digest="dead" * 16))


def test_a_checkpoint_without_checksums_is_refused_for_an_announced_version(make_policy, digested, capsys):
    directory, digest = digested
    (directory / "manifest.json").unlink()
    announced = make_policy(2, checkpoint=str(directory), manifest_digest=digest)
    for policy in (announced, replace(announced, manifest_digest=None)):
        with pytest.raises(ValueError, match=r"has no manifest\.json"):
            VersionLoader(directory, EngineConfig()).load(policy)
    (directory / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match=r"has no manifest\.json"):
        VersionLoader(directory, EngineConfig()).load(announced)
    # Of another tool, which writes neither.
    assert capsys.readouterr() == ("", "")
    assert VersionLoader(directory, EngineConfig()).load(plain_checkpoint(directory)).policy_version == 0
    assert "checkpoint_unverified" in "".join(capsys.readouterr())
    # transformers' Trainer has a file of that name.
    (directory / "trainer_state.json").write_text(json.dumps({"global_step": 500, "log_history": []}))
    assert VersionLoader(directory, EngineConfig()).load(plain_checkpoint(directory)).policy_version == 0
    assert "checkpoint_unverified" in "".join(capsys.readouterr())


@pytest.fixture
def bare(monkeypatch):
    """An environment without keys."""
    monkeypatch.delenv("D1_API_TOKEN", raising=False)
    monkeypatch.delenv("D1_API_KEYS_FILE", raising=False)


def opens(keys, key):
    return keys.owner([b"Bearer " + key.encode()])


def test_the_token_file_is_created_once_for_its_owner_only(run_dir, bare):
    keys = read_keys(run_dir)
    token = (run_dir / "service.token").read_text().strip()
    assert len(token) > 40
    assert opens(keys, token) == opens(read_keys(run_dir), token) == "key1"
    assert token not in repr(keys)
    assert stat.S_IMODE((run_dir / "service.token").stat().st_mode) == 0o600
    assert str(run_dir / "service.token") in banner(run_dir, "http://127.0.0.1:8000")
    assert token not in banner(run_dir, "http://127.0.0.1:8000")


def test_only_a_key_that_d1_created_is_shown(run_dir, bare, monkeypatch, tmp_path):
    read_keys(run_dir)
    made = (run_dir / "service.token").read_text().strip()
    assert own_key(run_dir) == made
    lines = banner_of_key("http://127.0.0.1:8000", made).splitlines()
    assert lines == [f"The key is {made}", f"The page, with the key: http://127.0.0.1:8000/#key={made}"]
    monkeypatch.setenv("D1_API_TOKEN", "0123456789abcdef")
    assert own_key(run_dir) is None
    monkeypatch.delenv("D1_API_TOKEN")
    monkeypatch.setenv("D1_API_KEYS_FILE", str(tmp_path / "keys"))
    assert own_key(run_dir) is None
    monkeypatch.delenv("D1_API_KEYS_FILE")
    (run_dir / "service.token").write_text("ann: a-key-that-ann-has-chosen\n")
    assert own_key(run_dir) is None


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_key_is_printed_on_a_terminal_only(run_dir, bare, monkeypatch, capsys, is_terminal):
    key = (read_keys(run_dir), (run_dir / "service.token").read_text().strip())[1]
    monkeypatch.setattr("deploy.service.on_ray.launch.deploy_source", lambda *_, **__: "http://127.0.0.1:8000")
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    monkeypatch.setattr("ray.available_resources", dict)
    source = Source(directory=str(run_dir), is_run=True, registry_url=None)
    session = RaySession(is_ours=False, dashboard_url="127.0.0.1:8265", logs_dir=Path())
    launch._serve(source, Address(host="127.0.0.1", port=8000), session)
    assert (key in capsys.readouterr().out) == is_terminal


def test_a_token_from_the_environment_is_not_stored(run_dir, bare, monkeypatch):
    monkeypatch.setenv("D1_API_TOKEN", "0123456789abcdef")
    assert opens(read_keys(run_dir), "0123456789abcdef") == "key1"
    assert not (run_dir / "service.token").exists()
    assert "$D1_API_TOKEN" in banner(run_dir, "http://127.0.0.1:8000")


@pytest.mark.parametrize("token", ["", "  ", "short"])
def test_a_short_token_is_refused(run_dir, monkeypatch, token):
    monkeypatch.delenv("D1_API_KEYS_FILE", raising=False)
    monkeypatch.setenv("D1_API_TOKEN", token)
    with pytest.raises(UserError, match="16 or more"):
        read_keys(run_dir)


def test_all_keys_of_a_key_file_are_accepted_under_their_names(run_dir, tmp_path, bare, monkeypatch):
    path = tmp_path / "keys"
    path.write_text("# ours\nann: aaaaaaaaaaaaaaaaaaaa\n\nbbbbbbbbbbbbbbbbbbbb\n")
    monkeypatch.setenv("D1_API_KEYS_FILE", str(path))
    keys = read_keys(run_dir)
    assert opens(keys, "a" * 20) == "ann"
    assert opens(keys, "b" * 20) == "key2"
    assert opens(keys, "c" * 20) is None
    assert keys.owner([]) is keys.owner([b"Bearer " + b"a" * 20] * 2) is keys.owner([b"a" * 20]) is None
    assert "D1_API_KEYS_FILE" in banner(run_dir, "http://127.0.0.1:8000")
    path.unlink()
    with pytest.raises(UserError, match="cannot read D1_API_KEYS_FILE"):
        read_keys(run_dir)
    with pytest.raises(UserError, match="two keys named ann"):
        ApiKeys.of(f"ann:{'a' * 20}\nann:{'b' * 20}", "keys")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org"])
def test_a_public_address_needs_keys_set_by_the_user(run_dir, bare, host):
    with pytest.raises(UserError, match="choose the keys yourself"):
        serve_run(run_dir, host, 8000)
    with pytest.raises(UserError, match="choose the keys yourself"):
        serve_checkpoint(run_dir / "checkpoints" / "sft-1", host, 8000)
    assert not (run_dir / "service.token").exists()


def test_an_empty_key_file_variable_counts_as_unset(run_dir, bare, monkeypatch):
    monkeypatch.setenv("D1_API_KEYS_FILE", "")
    with pytest.raises(UserError, match="choose the keys yourself"):
        launch._check_keys("0.0.0.0")
    read_keys(run_dir)
    assert own_key(run_dir) == (run_dir / "service.token").read_text().strip()


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_is_not_part_of_a_key(run_dir, bare, monkeypatch, tmp_path, encoding):
    (tmp_path / "keys").write_bytes("0123456789abcdef\r\n".encode(encoding))
    monkeypatch.setenv("D1_API_KEYS_FILE", str(tmp_path / "keys"))
    assert opens(read_keys(run_dir), "0123456789abcdef")


def test_a_directory_that_is_not_a_checkpoint_is_refused_and_not_changed(tmp_path, bare, free_port):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(UserError, match="cannot serve"):
        serve_checkpoint(tmp_path, "127.0.0.1", free_port)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_an_unreadable_token_file_is_reported_in_one_sentence(run_dir, bare, monkeypatch):
    token = run_dir / "service.token"
    # For root nothing is forbidden, and a directory is read by nobody.
    token.mkdir()
    with pytest.raises(UserError, match=f"^cannot read {token}: is a directory; set D1_API_TOKEN$"):
        read_keys(run_dir)
    token.rmdir()
    token.write_bytes(b"\xff" * 20)
    with pytest.raises(UserError, match=f"^cannot read {token}: it is not UTF-8; set D1_API_TOKEN$"):
        read_keys(run_dir)
    monkeypatch.setenv("D1_API_TOKEN", "0123456789abcdef")
    assert opens(read_keys(run_dir), "0123456789abcdef") == "key1"


@pytest.fixture
def no_ray(monkeypatch):
    """Starting Ray fails: what is refused is refused before."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(launch, "ray_session", lambda **_: pytest.fail("Ray is started"))


@pytest.fixture
def taken_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


@pytest.mark.usefixtures("no_ray")
def test_a_port_in_use_is_refused_before_ray_starts(run_dir, taken_port):
    said = rf"^cannot listen on 127\.0\.0\.1:{taken_port}: address already in use; choose another port$"
    with pytest.raises(UserError, match=said):
        serve_run(run_dir, "127.0.0.1", taken_port)
    with pytest.raises(UserError, match=said):
        serve_checkpoint(run_dir / "checkpoints" / "sft-1", "127.0.0.1", taken_port)


@pytest.mark.usefixtures("no_ray")
def test_a_run_listens_on_its_recipes_address_unless_overridden(run_dir, bare, taken_port, free_port):
    with (run_dir / "recipe.yaml").open("a") as recipe:
        recipe.write(f"\nservice: {{host: 127.0.0.2, port: {taken_port}}}\n")
    with pytest.raises(UserError, match=rf"^cannot listen on 127\.0\.0\.1:{taken_port}: "):
        serve_run(run_dir, "127.0.0.1", None)
    with socket.socket() as listening:
        listening.bind(("127.0.0.2", free_port))
        listening.listen()
        with pytest.raises(UserError, match=rf"^cannot listen on 127\.0\.0\.2:{free_port}: "):
            serve_run(run_dir, None, free_port)


def test_a_single_checkpoint_listens_on_loopback_unless_overridden(run_dir, monkeypatch):
    asked = []

    def note(address):
        asked.append(address)
        raise UserError("enough")

    monkeypatch.setattr(launch, "_check_port", note)
    for host, port in ((None, None), ("::1", 9000)):
        with pytest.raises(UserError, match="enough"):
            serve_checkpoint(run_dir / "checkpoints" / "sft-1", host, port)
    assert asked == [Address(host="127.0.0.1", port=8000), Address(host="::1", port=9000)]


@pytest.mark.usefixtures("no_ray")
def test_keys_are_read_before_ray_starts(run_dir, free_port, monkeypatch):
    monkeypatch.setenv("D1_API_TOKEN", "short")
    with pytest.raises(UserError, match=r"^D1_API_TOKEN has 5 characters in a key"):
        serve_run(run_dir, "127.0.0.1", free_port)


@pytest.mark.usefixtures("no_ray")
def test_a_checkpoint_whose_weights_are_missing_is_refused_before_ray_starts(run_dir, free_port):
    checkpoint = run_dir / "checkpoints" / "sft-1"
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(UserError, match=f"^cannot serve {checkpoint}: "):
        serve_checkpoint(checkpoint, "127.0.0.1", free_port)


@pytest.fixture
def connected_ray(monkeypatch):
    """A Ray that is there, of two machines."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(
        launch, "_ray", lambda: nullcontext(RaySession(is_ours=False, dashboard_url="", logs_dir=Path()))
    )
    nodes = [{"NodeManagerAddress": f"10.0.0.{last}", "Alive": True} for last in (1, 2)]
    monkeypatch.setattr("ray.nodes", lambda: nodes)


@pytest.mark.usefixtures("connected_ray")
def test_an_unreachable_registry_is_reported_in_one_sentence(run_dir, free_port, monkeypatch):
    monkeypatch.delenv("D1_REDIS_URL", raising=False)
    with pytest.raises(UserError, match=r"^the cluster has 2 machines .* serves one: set D1_REDIS_URL"):
        serve_run(run_dir, "127.0.0.1", free_port)
    monkeypatch.setenv("D1_REDIS_URL", f"redis://:s3cret@127.0.0.1:{free_port}/0")
    with pytest.raises(UserError, match=rf"^the registry at 127\.0\.0\.1:{free_port} cannot be used: .*D1_REDIS_URL"):
        serve_run(run_dir, "127.0.0.1", free_port)


@pytest.mark.usefixtures("connected_ray")
def test_an_embedded_registry_that_fails_to_start_is_reported_in_one_sentence(run_dir, free_port, monkeypatch):
    def fail():
        raise RuntimeError("the embedded registry gave no address within 60 s")

    monkeypatch.setattr("actors.registry.server.registry_url", fail)
    with pytest.raises(RunFailedError, match="gave no address within 60 s"):
        serve_run(run_dir, "127.0.0.1", free_port)


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")  # Ray Serve's schema
@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("DEPLOY_FAILED", r"^the service did not come up: no such luck$"),
        ("DEPLOYING", r"^the service was not up after 0 s \(DEPLOYING\); does the cluster have room"),
    ],
)
def test_a_service_that_fails_to_start_is_reported_in_one_sentence(monkeypatch, status, said):
    application = SimpleNamespace(status=status, deployments={}, message="it failed:\nTraceback ...\nno such luck\n")
    monkeypatch.setattr("ray.serve.status", lambda: SimpleNamespace(applications={"d1-tiny": application}, proxies={}))
    with pytest.raises(RunFailedError, match=said):
        launch._wait_until_running("d1-tiny", {}, 0.0, lambda _: None)


def test_the_start_timeout_scales_with_the_weights(run_dir):
    checkpoint = run_dir / "checkpoints" / "initial"
    checkpoint.mkdir()
    with (checkpoint / "model.safetensors").open("wb") as file:
        file.truncate(5 * 10**9)
    of_run = Source(directory=str(run_dir), is_run=True, registry_url=None)
    alone = replace(of_run, directory=str(checkpoint), is_run=False)
    assert launch._ready_within_s(of_run) == launch._ready_within_s(alone) == 380.0


def test_an_invalid_recipe_is_reported_in_one_sentence(run_dir):
    (run_dir / "recipe.yaml").write_text("name: tiny\ntask: {name: sums}\nlearner: {}\nsft: {}\nepochs: 3\n")
    with pytest.raises(UserError, match=r"recipe\.yaml: epochs is no key of a recipe"):
        serve_run(run_dir, "127.0.0.1", 8000)


def test_a_checkpoint_is_loaded_in_the_requested_precision(run_dir):
    directory = str(run_dir / "checkpoints" / "sft-1")
    for dtype in ("float32", "bfloat16"):
        source = Source(directory=directory, is_run=False, registry_url=None, dtype=dtype)
        model = source.versions("cpu")._current.sampler.model
        assert {str(weight.dtype) for weight in model.parameters()} == {f"torch.{dtype}"}


class Dashboard(BaseHTTPRequestHandler):
    """Answers as Serve's REST API."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, body, self.headers["authorization"]))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(b'{"error": "no such luck"}')

    def log_message(self, *_):
        pass


@pytest.fixture
def dashboard():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Dashboard)
    server.asked, server.status = [], 200
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(20)


def test_engines_are_scaled_through_serves_rest_api(run_dir, dashboard, free_port, monkeypatch):
    source, url = Source(directory=str(run_dir), is_run=True, registry_url=None), f"127.0.0.1:{dashboard.server_port}"
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t" * 16)
    launch.scale_engines(source, 3, url)
    path = "/api/v1/applications/d1-tiny/deployments/EngineReplica/scale"
    assert dashboard.asked == [(path, {"target_num_replicas": 3}, "Bearer " + "t" * 16)]
    dashboard.status = 412
    with pytest.raises(RunFailedError, match=r"^Ray Serve refuses: .*no such luck"):
        launch.scale_engines(source, 3, url)
    with pytest.raises(RunFailedError, match=rf"^Ray's dashboard at 127\.0\.0\.1:{free_port} does not answer: "):
        launch.scale_engines(source, 3, f"127.0.0.1:{free_port}")


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")  # Ray Serve's schema
def test_max_replicas_turns_on_serves_autoscaler(run_dir):
    source, here = (
        Source(directory=str(run_dir), is_run=True, registry_url=None),
        Address(host="127.0.0.1", port=8000),
    )

    def engines():
        return launch.bound_application(source, here, 2, num_gpus=0)._bound_deployment.init_args[0]._bound_deployment

    assert engines().num_replicas == 2
    recipe = yaml.safe_load((run_dir / "recipe.yaml").read_text())
    (run_dir / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"service": {"num_replicas": 2, "max_replicas": 5}}))
    scale = engines()._deployment_config.autoscaling_config
    assert (scale.min_replicas, scale.max_replicas) == (2, 5)
    with pytest.raises(ValueError, match="max_replicas 1 is below num_replicas 2"):
        ServiceSection(num_replicas=2, max_replicas=1)
