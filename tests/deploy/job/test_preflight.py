"""Preflight checks: a recipe that cannot run here is refused before anything starts."""

from __future__ import annotations

import errno
import json
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from actors.registry.server import ValkeyServer, free_port
from deploy.capacity.available import ClusterMachine, Resources, cluster_resources, resources_of
from deploy.capacity.needs import checkpoint_bytes, needs_of
from deploy.errors import UserError
from deploy.job.preflight import preflight
from deploy.program import program
from deploy.recipe.overrides import load_recipe
from learner.model.config import TransformerConfig
from learner.model.families import llada2
from learner.model.families.llada import write_config
from rewards.data.sampling import sample_distinct

ROOMY = {"object_store_bytes": 10**11, "gpu_memory_bytes": None, "num_machines": 1, "machines": ()}
PLENTY = Resources(where="this machine", cpus=64, gpus=8, memory_bytes=10**12, **ROOMY, is_ours=True)
SMALL = Resources(where="the cluster at x:1", cpus=2, gpus=0, memory_bytes=2 * 10**9, **ROOMY, is_ours=False)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


@pytest.fixture(autouse=True)
def roomy_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend 10 TB of free disk: the recipes here may need more than this machine has."""
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage._replace(free=10**13))


def _problems(recipe_file: Path, *overrides: str, available: Resources = PLENTY, **options: Any) -> list[str]:
    return preflight(load_recipe(recipe_file, overrides), available, **options)


def test_a_recipe_that_fits_has_no_problems_and_nothing_is_written(recipe_file: Path) -> None:
    assert _problems(recipe_file, serve=False) == []
    assert [path.name for path in recipe_file.parent.iterdir()] == ["tiny.yaml"]


def test_an_unavailable_registry_is_reported_before_the_run_directory_is_created(
    recipe_file: Path, d1: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ValkeyServer(free_port(), "right")
    port = urlsplit(server.url).port
    try:
        monkeypatch.setenv("D1_REDIS_URL", server.url)
        assert _problems(recipe_file) == []
        monkeypatch.setenv("D1_REDIS_URL", server.url.replace("right", "wrong"))
        (refused,) = _problems(recipe_file)
        assert refused.startswith(f"the registry at 127.0.0.1:{port} refused the password; D1_REDIS_URL should be")
    finally:
        server.stop()
    d1("train", "tiny.yaml").assert_refused(f"the registry at 127.0.0.1:{port} cannot be used", "D1_REDIS_URL")
    monkeypatch.setenv("D1_REDIS_URL", "redis://ann:s3cret")
    (refused,) = _problems(recipe_file)
    assert refused.startswith("D1_REDIS_URL is no address of a Redis; D1_REDIS_URL should be redis://")
    monkeypatch.delenv("D1_REDIS_URL")
    (refused,) = _problems(recipe_file, available=replace(PLENTY, num_machines=2, is_ours=False))
    assert refused.startswith("the cluster has 2 machines and the embedded registry serves one: set D1_REDIS_URL")
    assert [path.name for path in recipe_file.parent.iterdir()] == ["tiny.yaml"]


def test_missing_gpus_cpus_and_memory_are_reported(recipe_file: Path) -> None:
    overrides = ("device=cuda", "rollout.num_samplers=3", "learner.num_workers=1", "learner.groups_per_round=32")
    gpus, cpus, memory = _problems(recipe_file, *overrides, available=SMALL)
    assert gpus.startswith(
        "the recipe needs 4 GPUs (3 samplers, 1 learner worker) and the cluster at x:1 has 0; take device=cpu"
    )
    assert cpus.startswith("the recipe needs 4.3 CPUs (3 samplers, 1 learner worker, 1 grader, 2 more) and the cluster")
    assert "GB of memory" in memory
    assert "has 2.0 GB" in memory


@pytest.mark.parametrize(
    ("overrides", "found_s"),
    [
        ((), None),
        (("rollout.num_samplers=20",), (20, 8, 1, "learner.groups_per_round=20 or rollout.num_samplers=8")),
        (("rollout.num_samplers=6",), (6, 4, 2, "learner.groups_per_round=6 or rollout.num_samplers=4")),
        (
            ("rollout.num_samplers=20", "learner.max_staleness=1"),
            (20, 16, 1, "learner.groups_per_round=10 or rollout.num_samplers=16"),
        ),
        (("rollout.num_samplers=16", "learner.max_staleness=1"), None),
        (("device=cpu",), None),
    ],
)
def test_gpus_that_would_idle_in_every_round_are_refused(
    recipe_file: Path, overrides: tuple[str, ...], found_s: tuple[int, int, int, str] | None
) -> None:
    """Eight groups of six, of which four fit into the samplers at once: as work units of two, for four samplers."""
    exact = "estimator: {name: trajectory, steps_per_segment: 1, law: sampler}"
    old = "objective: {name: clipped_ratio, old: sampler}"
    learner = f"{{num_rounds: 1, groups_per_round: 8, group_size: 6, {exact}, {old}}}"
    given = ("device=cuda", "rollout.num_samplers=4", "rollout.batch_size=24", f"learner={learner}", *overrides)
    found = [problem for problem in _problems(recipe_file, *given) if "can be sampled at a time" in problem]
    if found_s is None:
        assert found == []
    else:
        number, work_units, groups, take = found_s
        assert found == [
            f"rollout.num_samplers is {number}, and only {work_units} work units of {6 * groups} completions can be "
            f"sampled at a time: the other GPUs would wait; take {take}"
        ]


def test_an_adapter_needs_less_memory_than_training_every_parameter(recipe_file: Path) -> None:
    whole, adapter = (
        needs_of(load_recipe(recipe_file, ["model.vocab_size=1000000", f"model.lora.rank={rank}"])).memory_bytes
        for rank in (0, 8)
    )
    # No gradient, no moments, no copy for the reference.
    assert whole - adapter > 4 * 4 * 2 * 1_000_000 * 128 * 0.99


def test_each_version_of_staleness_needs_object_store_memory(recipe_file: Path) -> None:
    """All weights, or only the adapter."""

    def needed(max_staleness: int, *overrides: str) -> int:
        exact = "learner.estimator={name: trajectory, steps_per_segment: 1, law: sampler}"
        stale = [exact, "learner.objective.old=sampler", f"learner.max_staleness={max_staleness}"]
        return needs_of(load_recipe(recipe_file, ["model.vocab_size=1000000", *stale, *overrides])).memory_bytes

    assert needed(2) - needed(1) == pytest.approx(4 * 2 * 1_000_000 * 128, rel=0.01), "a copy of the weights"
    assert needed(2, "model.lora.rank=8") - needed(1, "model.lora.rank=8") == 4 * _adapter_numbers(rank=8)


def _adapter_numbers(rank: int) -> int:
    return rank * 4 * (4 * (128 + 128) + 3 * (128 + 384))


def test_nf4_needs_bitsandbytes(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lora = ("model.lora.rank=8", "model.lora.base_weights=nf4")
    monkeypatch.setattr("deploy.job.preflight.find_spec", lambda _name: None)
    assert _problems(recipe_file, *lora) == [
        "model.lora.base_weights is nf4 and the package bitsandbytes is missing; pip install 'd1[quantized]'"
    ]
    monkeypatch.setattr("deploy.job.preflight.find_spec", lambda _name: object())
    assert _problems(recipe_file, *lora) == []


def test_direct_transport_is_refused_without_its_requirements(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.job.preflight.find_spec", lambda _name: None)
    assert _problems(recipe_file, "weight_transport=nixl") == [
        "weight_transport is nixl and the package nixl is missing; pip install nixl, or leave it out"
    ]
    monkeypatch.setattr("deploy.job.preflight.find_spec", lambda _name: object())
    assert _problems(recipe_file, "weight_transport=nixl") == []
    assert _problems(recipe_file, "weight_transport=nixl", "model.lora.rank=8") == [
        "weight_transport is nixl, and an adapter goes through the object store; leave it out"
    ]
    (problem,) = _problems(recipe_file, "weight_transport=cuda_ipc")
    assert problem.startswith("weight_transport is cuda_ipc, which reaches processes on the same GPU alone, and this ")
    shared = ("gpus.sampler=0.5", "gpus.learner=0.5", "rollout.num_samplers=1", "learner.num_workers=1")
    on_one = [
        one for one in _problems(recipe_file, "weight_transport=cuda_ipc", "device=cuda", *shared) if "ipc" in one
    ]
    assert on_one == []


def test_a_sum_of_fractions_that_fits_exactly_fits(recipe_file: Path) -> None:
    just = Resources(where="this machine", cpus=1.9, gpus=0, memory_bytes=10**12, **ROOMY, is_ours=True)
    assert _problems(recipe_file, available=just) == []
    assert _problems(recipe_file, "grading.num_graders=2", available=just) != []


@pytest.mark.parametrize(
    ("term", "sentence"),
    [
        ("own={kind: function, path: 'nowhere:f'}", "own: nowhere:f cannot be imported, installed or from /"),
        ("digits={kind: speed}", "digits: the task's reward has a part of that name; take another"),
        (
            "a={kind: http, url: 'http://h/', token_env: D1_NO_SUCH}",
            "a: the environment variable D1_NO_SUCH is not set; graders read a secret from it",
        ),
        (
            "a={kind: judge, model: m, criteria: c, base_url: 'http://127.0.0.1:1/v1', vllm: {command: [no-vllm]}}",
            "a: vllm.command begins with no-vllm, which is no command here; pip install 'd1[vllm]'",
        ),
    ],
)
def test_a_term_that_cannot_work_is_refused_in_one_sentence(term: str, sentence: str, recipe_file: Path) -> None:
    (problem,) = _problems(recipe_file, f"reward.terms.{term}")
    assert problem.startswith(f"reward.terms.{sentence}")
    assert "\n" not in problem


def test_the_speed_filter_needs_a_speed_term(recipe_file: Path) -> None:
    filtered = ("learner.filters.min_speed_range=0.01", "rollout.sampling.threshold=0.9")
    (problem,) = _problems(recipe_file, *filtered)
    assert problem == (
        "learner.filters.min_speed_range is 0.01 and the reward has no term of kind speed; add "
        "reward.terms.fast='{kind: speed}', or take learner.filters.min_speed_range=0"
    )
    assert _problems(recipe_file, *filtered, "reward.terms.fast={kind: speed}") == []


def test_a_schedule_that_the_objective_does_not_support_is_named(recipe_file: Path) -> None:
    words = ("learner.algorithm=forkgrpo", "rollout.schedules=[{threshold: 0.9}, {num_denoise_steps: 8}]")
    (problem,) = _problems(recipe_file, *words)
    assert problem == (
        "learner.estimator.only is fallback; the sampler's schedule never falls back: set rollout.sampling.threshold "
        "(rollout.schedules[1])"
    )


def test_no_judge_is_started_for_graders_on_other_machines(recipe_file: Path) -> None:
    vllm = "{kind: judge, model: m, criteria: c, base_url: 'http://127.0.0.1:1/v1', vllm: {command: [python3]}}"
    cluster = replace(PLENTY, is_ours=False)
    (problem,) = _problems(recipe_file, f"reward.terms.a={vllm}", available=cluster)
    assert problem.startswith("reward.terms.a.vllm: d1 starts it on this machine alone")
    assert _problems(recipe_file, f"reward.terms.a={vllm}") == []


def test_an_existing_run_is_refused_unless_resumed(recipe_file: Path, make_run: Callable) -> None:
    assert "there is no run tiny in" in _problems(recipe_file, resume=True)[0]
    make_run("tiny", [])
    (problem,) = _problems(recipe_file)
    assert "there already is a run tiny in" in problem
    assert problem.endswith("choose name=..., or go on with it by --resume")
    assert _problems(recipe_file, resume=True) == []
    assert _problems(recipe_file, "name=other") == []


def test_a_runs_dir_that_cannot_be_made_is_refused(recipe_file: Path) -> None:
    (problem,) = _problems(recipe_file, f"runs_dir={recipe_file}/runs")
    assert f"cannot be written to: {recipe_file} is a file" in problem


def test_more_problems_than_the_task_has_are_refused(recipe_file: Path) -> None:
    train, heldout = _problems(recipe_file, "num_train_problems=5000", "evaluation.num_problems=500")
    assert train.startswith("num_train_problems is 5000: ")
    assert heldout.startswith("evaluation.num_problems is 500: ")


TOO_MANY = "num_train_problems=99999999"
MANY_COUNTDOWNS = "task={name: countdown, prompt: compact, max_number: 1000, max_target: 100000}"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([], "the train split of sums has at most 825 problems with this config, but 99999999 were asked for"),
        (["task={name: sums, num_terms: 5}"], "the train split of sums has at most "),
        (["task={name: sudoku}"], "the train split of sudoku has at most "),
        (["task={name: countdown, prompt: compact}"], "the train split of countdown has at most 17170000 problems"),
    ],
    ids=lambda value: str(value)[-30:],
)
def test_an_impossible_number_of_problems_is_refused_without_generating_them(
    overrides: list[str], sentence: str, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(draw_one: object, *, count: int, **arguments: object) -> object:
        assert count == 1, "an example or the held-out problem"
        return sample_distinct(draw_one, count=count, **arguments)

    for task in ("countdown", "sudoku"):
        monkeypatch.setattr(f"rewards.tasks.{task}.sample_distinct", draw)
    huge = replace(PLENTY, memory_bytes=10**14)
    words = (*overrides, TOO_MANY, "evaluation.num_problems=1", "sft.num_steps=0")
    (problem,) = _problems(recipe_file, *words, available=huge)
    assert problem.startswith(f"num_train_problems is 99999999: {sentence}")


def test_only_some_problems_are_generated_and_the_memory_of_all_counts(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.job.preflight.MAX_CHECKED_PROBLEMS", 50)
    made: list[int] = []

    def draw(draw_one: object, *, count: int, **arguments: object) -> object:
        made.append(count)
        return sample_distinct(draw_one, count=count, **arguments)

    monkeypatch.setattr("rewards.tasks.countdown.sample_distinct", draw)
    available = replace(PLENTY, memory_bytes=32 * 10**9)
    (problem,) = _problems(recipe_file, MANY_COUNTDOWNS, TOO_MANY, available=available)
    assert "GB of memory" in problem
    assert max(made) == 50
    few, many = (
        needs_of(load_recipe(recipe_file, [MANY_COUNTDOWNS, f"num_train_problems={count}"])).memory_bytes
        for count in (1000, 1_001_000)
    )
    # The driver, the coordinator and two learner workers; about 700 bytes each.
    assert 4 * 1_000_000 * 600 < many - few < 4 * 1_000_000 * 2000


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("rollout.max_prompt_tokens=3", "every prompt of task sums is longer than rollout.max_prompt_tokens 3; raise"),
        ("rollout.sampling={gen_length: 2, block_length: 2, num_denoise_steps: 2}", "demonstration of task sums has"),
        ("runs_dir=/proc/x", "runs_dir /proc/x cannot be written to: /proc: no such file or directory; take another"),
    ],
    ids=lambda value: value[:20],
)
def test_a_dry_run_refuses_with_the_same_message_as_the_run(
    override: str, sentence: str, recipe_file: Path, d1: Callable
) -> None:
    dry, real = d1("train", "tiny.yaml", override, "--dry-run"), d1("train", "tiny.yaml", override)
    assert dry.status == 2
    assert "No problems found" not in dry.out
    real.assert_refused(sentence)
    assert f"problem: {real.err.removeprefix('d1: ')}" in dry.out
    assert dry.err == "d1: tiny cannot run: 1 problem, listed above\n"
    assert [path.name for path in recipe_file.parent.glob("**/*") if path.is_file()] == ["tiny.yaml"]


def test_a_dry_run_with_serve_counts_the_engines_gpus(recipe_file: Path, d1: Callable) -> None:
    """The table and the sentence agree."""
    given = ("device=cuda", "rollout.num_samplers=1", "learner.num_workers=1", "gpus.engine=0.5", "--dry-run")
    for serve, num_gpus in (((), 2), (("--serve",), 3)):
        out = d1("train", "tiny.yaml", *given, *serve).out
        assert f"the recipe needs {num_gpus} GPUs" in out
        assert re.search(rf"GPUs\W+{num_gpus}\b", out.partition("resource")[2])


def test_a_full_disk_is_noticed_before_the_run(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullFile(BytesIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("deploy.machine.TemporaryFile", lambda **_: FullFile())
    (problem,) = _problems(recipe_file)
    assert problem.startswith("runs_dir runs cannot be written to: ")
    assert problem.endswith(": no space left on device; take another runs_dir")


def test_a_directory_without_a_checkpoint_is_refused(recipe_file: Path) -> None:
    (problem,) = _problems(recipe_file, "model.checkpoint=nowhere")
    assert problem == (
        "model.checkpoint: nowhere is no directory, and no hub id either: that is org/name or org/name@revision"
    )
    empty = recipe_file.parent / "empty"
    empty.mkdir()
    (problem,) = _problems(recipe_file, f"model.checkpoint={empty}")
    assert problem == f"model.checkpoint: {empty} is not a checkpoint: it has no config.json"


def test_the_needs_of_a_run_follow_from_the_checkpoints_config(
    recipe_file: Path, config: TransformerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config is all that is fetched from the hub before the run starts."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (problem,) = _problems(recipe_file, "model.checkpoint=org/name")
    assert problem.startswith("model.checkpoint: there is no directory org/name, and the model ")
    assert f"org/name is not in the cache {tmp_path}, and HF_HUB_OFFLINE is set" in problem
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    wide = config.model_copy(update={"vocab_size": 10_000_000})
    (snapshot / "config.json").write_text(json.dumps(write_config(wide)))
    assert _problems(recipe_file, "model.checkpoint=org/name") == []
    # Weights, gradient, moments and reference; two samplers; three versions; a checkpoint with its moments.
    scratch, copies = needs_of(load_recipe(recipe_file, [])).memory_bytes, 5 + 2 + 3 + 3
    needs = needs_of(load_recipe(recipe_file, ["model.checkpoint=org/name"])).memory_bytes
    assert needs - scratch == pytest.approx(copies * 4 * 2 * wide.vocab_size * wide.d_model, rel=0.01)


def test_unsupported_settings_of_an_moe_policy_are_refused(
    recipe_file: Path, moe_config: TransformerConfig, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llada2.write_config(moe_config)))
    checkpoint = f"model.checkpoint={tmp_path}"
    assert _problems(recipe_file, checkpoint, "model.lora={rank: 4, targets: [up_proj]}") == []
    assert _problems(recipe_file, checkpoint, "rollout.engine={compile: true, dtype: bfloat16}") == []
    (problem,) = _problems(recipe_file, checkpoint, "rollout.engine.compile=true")
    assert problem == (
        "rollout.engine.compile is true, and experts are compiled in bfloat16 only; take rollout.engine.dtype=bfloat16"
    )
    (problem,) = _problems(recipe_file, checkpoint, "rollout.engine.fp8=true")
    assert problem == "rollout.engine.fp8 is for linear layers, and this policy has experts: leave it out"
    assert _problems(recipe_file, checkpoint, "sharding={compile: true, compute_dtype: bfloat16}") == []
    (problem,) = _problems(recipe_file, checkpoint, "sharding.compile=true")
    assert problem == (
        "sharding.compile is true, and experts are compiled in bfloat16 only; take sharding.compute_dtype=bfloat16"
    )
    problems = _problems(recipe_file, checkpoint, "model.lora={rank: 4, base_weights: nf4}")
    assert problems[-1].startswith("model.lora.base_weights nf4 holds linear layers in 4 bits, and experts")


def test_the_services_port_must_be_free_only_on_our_own_ray(recipe_file: Path, taken_port: int) -> None:
    port = f"service.port={taken_port}"
    (problem,) = _problems(recipe_file, port, serve=True)
    assert problem == (
        f"the service cannot listen on 127.0.0.1:{taken_port}: address already in use; take another service.port"
    )
    assert _problems(recipe_file, port, serve=False) == []
    cluster = Resources(where="a cluster", cpus=64, gpus=8, memory_bytes=10**12, **ROOMY, is_ours=False)
    assert _problems(recipe_file, port, available=cluster, serve=True) == []


def test_without_an_address_resources_are_this_machines() -> None:
    here = cluster_resources(None)
    assert here.is_ours
    assert here.cpus >= 1
    assert here.memory_bytes > 10**8


@pytest.mark.parametrize(("shared", "store"), [(None, 60), (1000, 60), (40, 38), (1, 10)])
def test_the_object_store_of_our_own_ray_follows_rays_defaults(
    monkeypatch: pytest.MonkeyPatch, shared: int | None, store: int
) -> None:
    """Of 200 GB: 30 %, at most what fits into shared memory, and at least 10 GB."""
    monkeypatch.setattr("deploy.machine.memory_bytes", lambda: 200 * 10**9)
    monkeypatch.setattr("deploy.machine.shared_memory_bytes", lambda: None if shared is None else shared * 10**9)
    assert cluster_resources(None).object_store_bytes == store * 10**9


def test_machines_that_the_autoscaler_may_start_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"CPU": 8.0, "memory": 4e9, "object_store_memory": 2e9, "accelerator_type:H100": 1.0, "GPU": 1.0}
    nodes = [("10.0.0.1", True, 0.5e9), ("10.0.0.1", True, 0.5e9), ("10.0.0.2", True, 1e9), ("10.0.0.3", False, 9e9)]
    monkeypatch.setattr(
        "ray.nodes",
        lambda: [
            {"NodeManagerAddress": at, "Alive": alive, "Resources": {"object_store_memory": store, "CPU": 2.0}}
            for at, alive, store in nodes
        ],
    )
    monkeypatch.setattr("ray.cluster_resources", lambda: now)
    monkeypatch.setattr("ray._private.state.state.get_max_resources_from_cluster_config", lambda: None)
    fixed = resources_of("10.0.0.1:6379")
    assert (fixed.cpus, fixed.gpus, fixed.memory_bytes, fixed.is_ours) == (8.0, 1, 6 * 10**9, False)
    assert fixed.num_machines == 2, "not the one that left"
    assert fixed.object_store_bytes == 10**9, "of one machine"
    assert fixed.machines[-1] == ClusterMachine("10.0.0.2", 10**9, has_gpu=False)
    most = {"CPU": 4, "GPU": 16, "memory": 64 * 10**9, "object_store_memory": 8 * 10**9}
    monkeypatch.setattr("ray._private.state.state.get_max_resources_from_cluster_config", lambda: most)
    elastic = resources_of("10.0.0.1:6379")
    assert (elastic.cpus, elastic.gpus, elastic.memory_bytes) == (8.0, 16, 72 * 10**9)
    assert elastic.object_store_bytes == 6 * 10**9, "one machine that is to come may have all that is to come"
    assert elastic.where == "the cluster at 10.0.0.1:6379"


@pytest.mark.parametrize(
    ("address", "part"),
    [
        ("http://127.0.0.1:8265", f"use `{program()} submit`"),
        ("ray://127.0.0.1:10001", f"use `{program()} submit`"),
        ("127.0.0.1:1", "connection refused; unset it"),
    ],
)
def test_an_unusable_address_is_refused_at_once(address: str, part: str) -> None:
    with pytest.raises(UserError, match=part):
        cluster_resources(address)


def test_a_dry_run_shows_everything_and_starts_nothing(recipe_file: Path, d1: Callable) -> None:
    ended = d1("train", "tiny.yaml", "learner.lr=2e-4", "--dry-run")
    assert ended.status == 0
    assert "lr: 0.0002" in ended.out
    assert "1.9" in ended.out
    assert "Nothing was started or written." in ended.out
    assert [path.name for path in recipe_file.parent.iterdir()] == ["tiny.yaml"]


def test_a_dry_run_lists_all_problems_and_exits_2(recipe_file: Path, d1: Callable) -> None:
    ended = d1("train", "tiny.yaml", "num_train_problems=5000", "evaluation.num_problems=500", "--dry-run")
    assert ended.status == 2
    assert ended.out.count("problem: ") == 2
    for key in ("num_train_problems is 5000: ", "evaluation.num_problems is 500: "):
        assert (ended.out + ended.err).count(key) == 1, "each thing is said once"
    assert ended.err == "d1: tiny cannot run: 2 problems, listed above\n"


def test_training_is_refused_with_the_first_problem(recipe_file: Path, d1: Callable) -> None:
    ended = d1("train", "tiny.yaml", "num_train_problems=5000", "evaluation.num_problems=500")
    ended.assert_refused("num_train_problems is 5000", "(1 more: --dry-run lists all)")


def test_the_resolved_yaml_of_a_dry_run_is_a_recipe(recipe_file: Path, workdir: Path, d1: Callable) -> None:
    out = d1("train", "tiny.yaml", "--dry-run").out
    (workdir / "copy.yaml").write_text(out[: out.index("┏")])
    assert load_recipe(workdir / "copy.yaml", []) == load_recipe(recipe_file, [])


ANSWERED, UNANSWERED = (
    json.dumps({"messages": [{"role": role, "content": "x"} for role in roles]})
    for roles in (("user", "assistant"), ("user", "assistant", "user"))
)


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_line_of_sft_data_without_an_answer_is_refused(command: str, recipe_file: Path, d1: Callable) -> None:
    data = recipe_file.with_name("data.jsonl")
    data.write_text(f"{ANSWERED}\n{UNANSWERED}\n")
    d1(command, "tiny.yaml", "sft.data=data.jsonl").assert_refused(
        "sft.data: data.jsonl, line 2: there is no answer: the last of messages is the user's; "
        "it should be the assistant's, which is what is trained on"
    )
    assert not (recipe_file.parent / "runs").exists()


def test_sft_data_is_read_before_anything_starts(recipe_file: Path) -> None:
    data = recipe_file.with_name("data.jsonl")
    data.write_text(f"{ANSWERED}\n")
    assert _problems(recipe_file, f"sft.data={data}", "sft.num_labels=null") == []
    (problem,) = _problems(recipe_file, "sft.data=absent.jsonl")
    assert problem == "sft.data: absent.jsonl cannot be read: no such file or directory"


def test_sft_on_problems_without_labels_is_refused(recipe_file: Path, workdir: Path) -> None:
    lines = [{"nums": [1, 2, n], "target": n + 3} for n in range(3, 300)]
    path = workdir / "countdown.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = recipe_file.with_name("file.yaml")
    recipe.write_text(
        f"task: {{name: countdown, train_data: {path}}}\nnum_train_problems: 64\n"
        "sft: {num_labels: 8, num_steps: 2}\nlearner: {num_rounds: 1}\nevaluation: {num_problems: 4}\n"
    )
    (problem,) = _problems(recipe)
    assert problem.startswith("SFT is to train on the train problems of countdown, and countdown/1,2,")
    assert problem.endswith("has no right completion in its file; give sft.data, or take sft.num_steps=0")
    assert _problems(recipe, "sft.num_steps=0") == []


def test_unusable_data_is_refused_before_anything_starts(recipe_file: Path, workdir: Path) -> None:
    recipe = recipe_file.with_name("file.yaml")
    recipe.write_text(
        f"task: {{name: jsonl, grader: exact, train_data: {workdir / 'x.jsonl'}}}\n"
        "sft: {num_labels: 1, num_steps: 1}\nnum_train_problems: 64\n"
        "learner: {num_rounds: 1}\nevaluation: {num_problems: 4}\n"
    )
    assert "num_train_problems is 64" in _problems(recipe)[0]
    assert _problems(recipe)[0].endswith("x.jsonl cannot be read: no such file or directory")
    (workdir / "x.jsonl").write_text('{"prompt": "a"}\n')
    assert "x.jsonl, line 1: answer is missing; it should be a text or a number: what is right" in _problems(recipe)[0]
    (workdir / "x.jsonl").write_text("".join(f'{{"prompt": "{n % 90}?", "answer": 7}}\n' for n in range(100)))
    told: list[str] = []
    assert _problems(recipe, on_warning=told.append) == []
    assert told == [
        f"{workdir / 'x.jsonl'}: 10 of 100 rows repeat an earlier problem and are left out, first line 91 (as line 1)"
    ]


def test_a_process_that_exceeds_its_share_of_a_gpu_is_refused(recipe_file: Path) -> None:
    """Where the memory of the GPUs is known. On a CPU there is no such limit."""
    small = replace(PLENTY, gpu_memory_bytes=4 * 10**9)
    given = ("device=cuda", "rollout.num_samplers=1", "learner.num_workers=1", "model.d_model=256")
    assert _problems(recipe_file, *given, available=small) == []
    assert _problems(recipe_file, *given, available=replace(PLENTY, gpu_memory_bytes=None)) == []
    sampler, learner = _problems(recipe_file, *given, "gpus={sampler: 0.25, learner: 0.3}", available=small)
    assert re.fullmatch(
        r"a sampler takes at least 1\.\d GB of GPU memory \(activations 0\.\d\), and 0\.25 of a GPU of this machine "
        r"has 1\.0; take a smaller rollout\.engine\.num_slots, or a larger gpus\.sampler",
        sampler,
    )
    assert re.fullmatch(
        r"a learner worker takes at least \d\.\d GB of GPU memory \(activations \d\.\d\), and 0\.3 of a GPU of this "
        r"machine has 1\.2; take sharding\.activation_checkpointing=true or a smaller learner\.micro_batch_tokens, "
        r"or a larger gpus\.learner",
        learner,
    )
    assert _problems(recipe_file, "device=cpu", available=small) == []


def test_an_engine_on_a_gpu_must_fit_its_share(recipe_file: Path) -> None:
    """With all versions that it may hold, if the service is requested."""
    small = replace(PLENTY, gpu_memory_bytes=8 * 10**9)
    one = ("device=cuda", "rollout.num_samplers=1", "learner.num_workers=1", "model.vocab_size=200000")
    given = (*one, "rollout.engine.num_slots=1", "gpus={sampler: 0.4, learner: 1, engine: 0.2}")
    assert _problems(recipe_file, *given, available=small) == []
    (engine,) = _problems(recipe_file, *given, available=small, serve=True)
    assert re.fullmatch(
        r"an engine takes at least 1\.\d GB of GPU memory \(other versions 0\.6\), and 0\.2 of a GPU of this machine "
        r"has 1\.6; take a smaller service\.max_live_versions, or a larger gpus\.engine",
        engine,
    )
    assert _problems(recipe_file, *given, "service.max_live_versions=2", available=small, serve=True) == []


WHOLE = 2 * 320 * 128 + 4 * (4 * 128**2 + 3 * 128 * 384 + 2 * 128) + 128


@pytest.mark.parametrize("base_weights", ["full", "nf4"])
def test_under_lora_checkpoints_and_versions_are_adapters(recipe_file: Path, base_weights: str) -> None:
    lora = f"model.lora={{rank: 2, base_weights: {base_weights}}}"
    needs = needs_of(load_recipe(recipe_file, ["learner.num_rounds=1", lora]))
    adapter = 4 * _adapter_numbers(rank=2)
    # Three kept, the last round's, the best, one in progress; ends of SFT and control; the first policy.
    assert needs.disk_bytes == 6 * 3 * adapter + 2 * adapter + 4 * WHOLE
    assert checkpoint_bytes(load_recipe(recipe_file, [lora])) == 3 * adapter
    # Two kept, one arriving, and the copy from which it is put.
    assert needs.object_store_bytes == 4 * adapter


def test_machines_whose_object_store_holds_no_version_are_warned_of(recipe_file: Path) -> None:
    version = 4 * WHOLE
    machines = (
        ClusterMachine("10.0.0.1", version, has_gpu=True),
        ClusterMachine("10.0.0.2", version - 1, has_gpu=False),
        ClusterMachine("10.0.0.3", version // 2, has_gpu=True),
    )
    available = replace(PLENTY, machines=machines)

    def warnings(*overrides: str) -> list[str]:
        said: list[str] = []
        assert _problems(recipe_file, *overrides, available=available, on_warning=said.append) == []
        return said

    (warning,) = warnings()
    assert warning.startswith("a policy version takes 0.0 GB, and Ray's object store on 10.0.0.2, 10.0.0.3 has 0.0 GB")
    (warning,) = warnings("device=cuda")
    assert "on 10.0.0.3 has" in warning, "without a GPU, a machine gets no sampler"
    assert warnings("model.lora.rank=2") == [], "an adapter fits"
    assert "10.0.0.2" not in str(warnings("rollout.engine.dtype=bfloat16"))


def test_a_checkpoint_that_a_run_starts_from_takes_no_disk(
    recipe_file: Path, config: TransformerConfig, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(write_config(config)))
    given = [f"model.checkpoint={tmp_path}", "model.lora.rank=2", "control.enabled=false", "sft.num_steps=0"]
    recipe = load_recipe(recipe_file, given)
    # Three kept, the best, one in progress.
    assert needs_of(recipe).disk_bytes == 5 * checkpoint_bytes(recipe)


def test_versions_must_fit_one_object_store_and_checkpoints_the_disk(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = needs_of(load_recipe(recipe_file, ["learner.num_rounds=1"]))
    assert needs.object_store_bytes == 3 * 4 * WHOLE
    assert needs.disk_bytes == 4 * (6 * 3 + 2 + 1) * WHOLE
    few = replace(PLENTY, object_store_bytes=2 * 4 * WHOLE)
    (problem,) = _problems(recipe_file, available=few)
    assert problem == (
        "policy versions take 0.0 GB of Ray's object store on one machine, and that of this machine has 0.0 GB; take "
        "LoRA (model.lora.rank), rollout.engine.dtype=bfloat16, or start Ray with a larger --object-store-memory"
    )
    half = "rollout.engine.dtype=bfloat16"
    assert needs_of(load_recipe(recipe_file, [half])).object_store_bytes == 3 * 2 * WHOLE, "what travels is narrower"
    # Each of two machines holds one of two workers and its rows, and a whole version where it is read.
    assert needs_of(load_recipe(recipe_file, []), num_machines=2).object_store_bytes == 3 * 4 * WHOLE / 2
    two = replace(few, num_machines=2, is_ours=False, where="the cluster at x:1")
    assert [each for each in _problems(recipe_file, available=two) if "object store" in each] == []
    one = needs_of(load_recipe(recipe_file, ["learner.num_workers=8"]), num_machines=8).object_store_bytes
    assert one == 4 * WHOLE
    assert checkpoint_bytes(load_recipe(recipe_file, ["learner.reference_sync_rounds=2"])) == 4 * 4 * WHOLE
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage._replace(free=10**6))
    (problem,) = _problems(recipe_file)
    assert problem.startswith("the checkpoints of the recipe take up to 0.1 GB and the disk of runs_dir runs has 0.0")
    assert problem.endswith("take another runs_dir, a smaller num_checkpoints_kept or LoRA (model.lora.rank)")


def test_too_little_memory_names_the_largest_part(recipe_file: Path) -> None:
    wide = ("model.vocab_size=1000000", "learner.num_rounds=1")
    (problem,) = _problems(recipe_file, *wide, available=replace(PLENTY, memory_bytes=10**10))
    assert re.fullmatch(
        r"the recipe needs at least \d+\.\d GB of memory \(weights and moments of the learner \d\.\d GB\) and this "
        r"machine has 10\.0 GB; take LoRA \(model\.lora\.rank\), or a smaller model",
        problem,
    )


def test_offloaded_weights_count_as_main_memory(recipe_file: Path) -> None:
    """All that is trained, with gradient, moments and reference, if it is offloaded."""
    given = ("device=cuda", "learner.num_workers=2", "model.vocab_size=1000000")
    apart, offloaded = (
        needs_of(load_recipe(recipe_file, [*given, f"sharding.cpu_offload={way}"])).memory_bytes
        for way in (False, True)
    )
    assert offloaded - apart == pytest.approx(5 * 4 * 2 * 1_000_000 * 128, rel=0.01)
