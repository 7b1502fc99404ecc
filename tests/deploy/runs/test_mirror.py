"""Mirror of a run: the same as the run's directory, and restorable to one, on any file system."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.checkpoints.selection import Position, newest_checkpoint, prune, resumable
from actors.spec import Phase
from deploy.errors import UserError
from deploy.job.mirroring import mirrored
from deploy.recipe.overrides import load_recipe
from deploy.recipe.recipe import Recipe
from deploy.runs.mirror import Mirror, fetch_run, mirror_for
from learner.model.adapter import Adapter
from learner.model.checkpoint import load_policy, save_checkpoint
from learner.model.checkpoint_files import verify_checkpoint, weight_files
from learner.model.storage.weights import StoredWeights
from learner.model.transformer import Transformer

HAS_S3 = find_spec("s3fs") is not None and find_spec("moto") is not None


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """An S3 server on this machine."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["path", "memory", pytest.param("s3", marks=pytest.mark.skipif(not HAS_S3, reason="no s3fs"))])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "path":
        return str(tmp_path / "elsewhere")
    name = uuid.uuid4().hex
    if request.param == "memory":
        return f"memory://{name}/runs"
    monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3"))
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(key, "of-the-test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return f"s3://{name}/runs"


@pytest.fixture
def recipe(recipe_file: Path, tmp_path: Path, url: str) -> Recipe:
    return load_recipe(recipe_file, ["name=mirrored", f"runs_dir={tmp_path / 'runs'}", f"checkpoint_url={url}"])


def _position(done: int) -> Position:
    phase = Phase.RL if done else Phase.UNTRAINED
    return Position(phase=phase, round=done, policy_version=done, rl_seconds=1.0)


@pytest.fixture
def run_dir(recipe: Recipe, policy: Transformer, tmp_path: Path) -> Path:
    """A run with its initial policy and an adapter on it."""
    run_dir = recipe.run_dir
    state = asdict(_position(0))
    save_checkpoint(
        run_dir / "checkpoints" / "initial", policy.config, policy.state_dict(), tmp_path, trainer_state=state
    )
    (run_dir / "recipe.yaml").write_text("name: mirrored\n")
    for name in ("metrics.jsonl", "samples.jsonl", "solve_rates.jsonl"):
        (run_dir / name).write_text("{}\n")
    _save_adapter(run_dir, policy, 1)
    return run_dir


def _save_adapter(run_dir: Path, policy: Transformer, done: int) -> Path:
    matrices = {"blocks.0.attn.q_proj.lora_A.weight": torch.full((1, 32), float(done))}
    adapter = Adapter(rank=1, alpha=1, base="initial", matrices=matrices)
    directory = run_dir / "checkpoints" / f"rl-{done:06d}"
    state = asdict(_position(done))
    save_checkpoint(directory, policy.config, None, run_dir, adapter=adapter, trainer_state=state)
    return directory


def _contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_missing_run_is_fetched_from_its_mirror(recipe: Recipe, run_dir: Path, policy: Transformer) -> None:
    mirror = mirror_for(recipe, resume=False)
    assert mirror is not None
    mirror.push(run_dir)
    for done in (2, 3, 4):
        _save_adapter(run_dir, policy, done)
        prune(run_dir / "checkpoints", 2, [], _position(done))
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write("{}\n")
        mirror.push(run_dir)
    here = _contents(run_dir)
    assert {"checkpoints/rl-000003/lora.safetensors", "checkpoints/rl-000004/lora.safetensors"} <= here.keys()
    fetch_run(recipe)
    assert _contents(run_dir) == here, "what is here counts"
    shutil.rmtree(run_dir)
    fetch_run(recipe)
    assert _contents(run_dir) == here
    found = newest_checkpoint(run_dir / "checkpoints", resumable(9))
    assert found is not None
    assert (found.directory.name, found.skipped) == ("rl-000004", ())


def test_a_rewritten_checkpoint_is_mirrored_again(recipe: Recipe, run_dir: Path, policy: Transformer) -> None:
    mirror = Mirror(str(recipe.checkpoint_url), recipe.name)
    mirror.push(run_dir)
    state = asdict(_position(1))
    whole = run_dir / "checkpoints" / "rl-000001"
    save_checkpoint(whole, policy.config, policy.state_dict(), run_dir, trainer_state=state)
    mirror.push(run_dir)
    here = _contents(run_dir)
    shutil.rmtree(run_dir)
    mirror.pull(run_dir)
    assert _contents(run_dir) == here


def test_an_incomplete_copy_is_not_a_checkpoint(
    recipe: Recipe, run_dir: Path, policy: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = Mirror(str(recipe.checkpoint_url), recipe.name)
    mirror.push(run_dir)
    whole, half = _contents(run_dir), _save_adapter(run_dir, policy, 2)
    put = Mirror._put

    def broken(mirror: Mirror, path: Path, name: str) -> None:
        if name.startswith("checkpoints/rl-000002/trainer"):
            raise ConnectionError("the line is dead")
        put(mirror, path, name)

    monkeypatch.setattr(Mirror, "_put", broken)
    with pytest.raises(ConnectionError):
        mirror.push(run_dir)
    run_dir.rename(run_dir.with_name("kept"))
    mirror.pull(run_dir)
    assert _contents(run_dir) == whole
    shutil.rmtree(run_dir)
    run_dir.with_name("kept").rename(run_dir)
    monkeypatch.setattr(Mirror, "_put", put)
    mirror.push(run_dir)
    assert Mirror(str(recipe.checkpoint_url), recipe.name)._manifests()[half.name] is not None


def test_a_copy_keeps_what_the_run_has_not_deleted(recipe: Recipe, run_dir: Path, policy: Transformer) -> None:
    mirror, checkpoints = Mirror(str(recipe.checkpoint_url), recipe.name), run_dir / "checkpoints"
    for done in (1, 2):
        _save_adapter(run_dir, policy, done)
    mirror.push(run_dir)
    (checkpoints / "rl-000002" / "trainer_state.json").write_text("{")
    shutil.rmtree(checkpoints / "rl-000001")
    mirror.push(run_dir)
    assert mirror._manifests().keys() == {"initial", "rl-000002"}, "one is damaged, the other deleted"
    whole = mirror._manifests()
    shutil.rmtree(checkpoints)
    mirror.push(run_dir)
    shutil.rmtree(run_dir)
    mirror.push(run_dir)
    assert mirror._manifests() == whole


def test_a_mirrored_name_is_refused_unless_resumed(recipe: Recipe, run_dir: Path) -> None:
    Mirror(str(recipe.checkpoint_url), recipe.name).push(run_dir)
    with pytest.raises(UserError, match=r"there already is a run mirrored in checkpoint_url .*; choose name="):
        mirror_for(recipe, resume=False)
    assert mirror_for(recipe, resume=True) is not None


@pytest.mark.parametrize("wrong", ["nothing://x/y", "s4://bucket"])
def test_an_unsupported_url_is_refused(recipe: Recipe, wrong: str) -> None:
    with pytest.raises(UserError, match=rf"checkpoint_url {wrong} cannot be used: Protocol not known"):
        mirror_for(recipe.model_copy(update={"checkpoint_url": wrong}), resume=False)
    assert mirror_for(recipe.model_copy(update={"checkpoint_url": None}), resume=False) is None


def test_each_checkpoint_is_copied_while_the_run_goes_on_and_the_last_is_waited_for(
    recipe: Recipe, run_dir: Path, policy: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, seen, failures = Mirror(str(recipe.checkpoint_url), recipe.name), list[dict[str, Any]](), list[str]()
    push, is_dead = Mirror.push, [True]

    def dead_once(mirror: Mirror, directory: Path) -> None:
        if is_dead.pop() if is_dead else False:
            raise ConnectionError("the line is dead\nand more")
        push(mirror, directory)

    monkeypatch.setattr(Mirror, "push", dead_once)
    with mirrored(mirror, run_dir, seen.append, failures.append) as heard:
        heard({"event": "round"})
        _save_adapter(run_dir, policy, 2)
        heard({"event": "checkpoint"})
        _save_adapter(run_dir, policy, 3)
    assert failures == [f"the checkpoints are not copied to {mirror.url}: ConnectionError: the line is dead"]
    assert seen == [
        {"event": "round"},
        {"event": "checkpoint"},
        {"event": "status", "what": f"copying checkpoints to {mirror.url}"},
    ]
    here = _contents(run_dir)
    shutil.rmtree(run_dir)
    mirror.pull(run_dir)
    assert _contents(run_dir) == here


def test_a_failed_mirror_is_reported_and_does_not_block(
    recipe: Recipe, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead(_: Mirror, directory: Path) -> None:
        raise ConnectionError(f"no way out of {directory.name}")

    monkeypatch.setattr(Mirror, "push", dead)
    mirror, seen = Mirror(str(recipe.checkpoint_url), recipe.name), list[dict[str, Any]]()
    with mirrored(mirror, run_dir, seen.append, lambda _: None):
        pass
    what = f"the checkpoints are not copied to {mirror.url}: ConnectionError: no way out of mirrored"
    assert seen[-1] == {"event": "status", "what": what}


def test_a_resume_without_a_copy_and_a_url_that_nothing_reads_are_refused(
    recipe_file: Path, d1: Callable, workdir: Path
) -> None:
    train = ("train", recipe_file.name, "--resume")
    d1(*train, "checkpoint_url=nothing://x/y").assert_refused("checkpoint_url nothing://x/y cannot be used: Protocol")
    (workdir / "elsewhere").write_text("")
    d1(*train, "checkpoint_url=elsewhere").assert_refused("there is no run tiny in", "to resume")


def test_a_mirror_has_the_referenced_weights(
    recipe: Recipe, run_dir: Path, policy: Transformer, tmp_path: Path
) -> None:
    original, initial = tmp_path / "original", run_dir / "checkpoints" / "initial"
    save_checkpoint(original, policy.config, policy.state_dict(), tmp_path, shard_bytes=32_000)
    stored = StoredWeights(original)
    save_checkpoint(initial, policy.config, stored, original, trainer_state=asdict(_position(0)))
    Mirror(str(recipe.checkpoint_url), recipe.name).push(run_dir)
    for directory in (run_dir, original):
        shutil.rmtree(directory)
    fetch_run(recipe)
    verify_checkpoint(initial)
    loaded = load_policy(initial).state_dict()
    assert [name for name, tensor in policy.state_dict().items() if not torch.equal(loaded[name], tensor)] == []
    assert {path.parent for path in weight_files(initial)} == {initial}


def test_a_run_is_fetched_on_a_machine_that_shares_no_disk_with_its_cluster(
    recipe: Recipe, run_dir: Path, d1: Callable, workdir: Path
) -> None:
    bucket = run_dir.parent.parent / "bucket"
    Mirror(bucket.as_uri(), recipe.name).push(run_dir)
    here = _contents(run_dir)
    shutil.rmtree(run_dir)
    url = f"{bucket.as_uri()}/{recipe.name}"
    assert d1("runs", "fetch", url).out == f"run directory: runs/{recipe.name}\n"
    assert _contents(workdir / "runs" / recipe.name) == here
    d1("runs", "fetch", url).assert_refused(f"runs/{recipe.name} exists already; remove it")
    d1("runs", "fetch", f"{bucket.as_uri()}/other").assert_refused("there is no run at file://", "checkpoint_url/NAME")
