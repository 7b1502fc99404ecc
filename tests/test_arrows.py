"""Import boundaries: which folders may import which, and imports and calls forbidden everywhere."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

OURS = {"rewards", "learner", "rollout", "actors", "deploy"}
ALLOWED = {
    "rewards": set(),
    "learner": set(),
    "rollout": {"learner.model", "learner.batch", "learner.counter", "learner.seeds"},
    "actors": {"rewards", "learner", "rollout"},
    "deploy": {"rewards", "learner", "rollout", "actors"},
}
EDGE = {"fastapi", "starlette", "uvicorn", "typer", "rich", "matplotlib"}
FORBIDDEN = {
    "rewards": EDGE | {"ray", "torch", "transformers", "tokenizers", "safetensors"},
    "learner": EDGE | {"ray", "redis"},
    "rollout": EDGE | {"ray", "redis"},
    "actors": EDGE,
    "deploy": set(),
}
# Allowed imports within the service. Its entry point and composition root may import everything.
SERVICE = {
    "contract": set(),
    "errors": {"contract"},
    "checkpoints": {"contract"},
    "failover": {"contract"},
    "gateway": {"errors"},
    "engine": {"contract"},
    "example": set(),
    "api": {"checkpoints", "contract", "errors", "example", "failover", "gateway"},
}
# Modules and calls that can run code found in a file or text. (`yaml.load` is left to ruff: the loader decides.)
DANGEROUS_IMPORTS = {
    "_pickle",
    "cloudpickle",
    "dill",
    "importlib.import_module",
    "joblib",
    "marshal",
    "pickle",
    "shelve",
}
DANGEROUS_CALLS = {
    "__import__",
    "compile",
    "eval",
    "exec",
    "importlib.import_module",
    "pkgutil.resolve_name",
    "torch.load",
    "torch.save",
}
# Imports of private modules of Ray, which change without notice, and why no public API serves instead.
PRIVATE_RAY = {
    ("actors/training/run_client.py", "ray.train.v2._internal.execution.context.get_train_context"): (
        "the public context does not name Ray Train's controller, which must be probed"
    ),
    ("actors/training/trainer.py", "ray.train.v2._internal.callbacks.datasets.DatasetsCallback"): (
        "no setting leaves out this callback, which costs 2 s per start of the learner group"
    ),
    (
        "actors/training/trainer.py",
        "ray.train.v2._internal.callbacks.placement_group_callback.PlacementGroupCleanerCallback",
    ): "as the one above",
    ("deploy/capacity/available.py", "ray._private.state.state"): (
        "public APIs return only the machines that run now, not those that the autoscaler may add"
    ),
    ("deploy/ray_session.py", "ray._private.ray_constants"): "no setting keeps Ray on loopback after it is imported",
    ("deploy/ray_session.py", "ray._private.worker"): "`log_to_driver` does not cover notes on dead workers",
}
# The only place that imports a function named by a recipe's author.
OWN_CODE = {("rewards/terms/function_term.py", "pkgutil.resolve_name")}

# Runs in the sandbox only; trusted parts of d1 must not import it.
INSIDE = ROOT / "rewards" / "sandbox" / "inside"
SHARED_WITH_INSIDE = "rewards.sandbox.inside.wire"

MODULES = sorted(path for package in OURS for path in (ROOT / package).rglob("*.py"))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _place(path: Path, node: ast.stmt | ast.expr) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"


@cache
def _imports() -> tuple[tuple[Path, ast.stmt, str], ...]:
    """Return every imported module, at any depth of a file. `from a.b import c` is `a.b.c`."""
    return tuple(_imported())


def _imported() -> Iterator[tuple[Path, ast.stmt, str]]:
    for path in MODULES:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Import):
                yield from ((path, node, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{_place(path, node)} imports relatively; say the whole name"
                yield from ((path, node, f"{node.module}.{alias.name}") for alias in node.names)


def _is_below(module: str, parents: set[str]) -> bool:
    return any(module == parent or module.startswith(f"{parent}.") for parent in parents)


def _is_allowed(package: str, module: str) -> bool:
    if _is_below(module, OURS):
        return _is_below(module, ALLOWED[package] | {package})
    return not _is_below(module, FORBIDDEN[package])


def test_the_only_packages_are_the_five_folders() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == OURS


def test_imports_follow_the_arrows() -> None:
    assert [
        f"{_place(path, node)} imports {module}"
        for path, node, module in _imports()
        if not _is_allowed(path.relative_to(ROOT).parts[0], module)
    ] == []


def _rooms(package: str) -> dict[str, set[str]]:
    """Map each folder and file of a package to its siblings that it imports."""
    folder, rooms = ROOT / package.replace(".", "/"), dict[str, set[str]]()
    for path, _, module in _imports():
        if not path.is_relative_to(folder) or path == folder / "__init__.py":
            continue
        room = path.relative_to(folder).parts[0].removesuffix(".py")
        other = module.removeprefix(f"{package}.").partition(".")[0] if _is_below(module, {package}) else room
        is_there = (folder / other).is_dir() or (folder / f"{other}.py").is_file()
        rooms.setdefault(room, set()).update({other} - {room} if is_there else ())
    return rooms


@pytest.mark.parametrize(
    "package", ["rewards", "learner", "rollout", "actors", "actors.coordination", "deploy", "deploy.service"]
)
def test_imports_between_siblings_have_no_cycle(package: str) -> None:
    rooms = _rooms(package)
    assert len(rooms) > 8
    # Raises CycleError, which names the modules.
    TopologicalSorter(rooms).prepare()


def test_parts_of_the_service_import_only_allowed_parts() -> None:
    rooms = _rooms("deploy.service")
    assert {room: rooms[room] - allowed for room, allowed in SERVICE.items() if rooms[room] - allowed} == {}


def test_no_code_unpickles_or_executes_text() -> None:
    imports = [
        f"{_place(path, node)} imports {module}"
        for path, node, module in _imports()
        if _is_below(module, DANGEROUS_IMPORTS | DANGEROUS_CALLS)
    ]
    calls = [
        f"{_place(path, node)} calls {ast.unparse(node)}"
        for path in MODULES
        if path.parent != INSIDE
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call)
        if (str(path.relative_to(ROOT)), ast.unparse(node.func)) not in OWN_CODE
        if ast.unparse(node.func) in DANGEROUS_CALLS or any(word.arg == "allow_pickle" for word in node.keywords)
    ]
    assert imports + calls == []


def test_private_modules_of_ray_are_imported_only_where_listed() -> None:
    found = {
        (str(path.relative_to(ROOT)), module)
        for path, _, module in _imports()
        if module.startswith("ray.") and any(part.startswith("_") for part in module.split("."))
    }
    assert found == PRIVATE_RAY.keys()


def test_only_the_sandbox_imports_the_code_that_runs_programs() -> None:
    package = SHARED_WITH_INSIDE.rpartition(".")[0]
    imported = {
        module if module == SHARED_WITH_INSIDE else _place(path, node)
        for path, node, module in _imports()
        if path.parent != INSIDE and _is_below(module, {package})
    }
    assert imported == {SHARED_WITH_INSIDE}
    assert [
        f"{_place(path, node)} imports {module}"
        for path, node, module in _imports()
        if path.parent == INSIDE and _is_below(module, OURS) and not _is_below(module, {package})
    ] == []


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    names = {path: path.parent.name if path.name == "__init__.py" else path.stem for path in MODULES}
    assert [str(path.relative_to(ROOT)) for path, name in names.items() if name in sys.stdlib_module_names] == []


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        (("rewards",), {"torch", "ray", "numpy", "transformers", "redis"}),
        (("learner.learner", "rollout.sampler"), {"ray", "fastapi", "redis"}),
        # Importing torch costs seconds of CPU and 150 MB in each process of a cluster.
        (("actors.grader",), {"torch", "ray"}),
        # A process that receives an actor's handle imports the actor's class.
        (
            (
                "actors.weights.store",
                "actors.registry.server",
                "actors.coordination.coordinator",
                "actors.sampler",
                "deploy.service.on_ray.ingress",
                "deploy.job.job",
                "deploy.job.preflight",
            ),
            {"torch"},
        ),
        # `d1 --help` must answer immediately.
        (("deploy.cli",), {"torch", "ray", "transformers", "matplotlib", "fastapi"}),
    ],
)
def test_modules_do_not_import_heavy_packages(modules: tuple[str, ...], heavy: set[str]) -> None:
    """Checked at run time, since third-party packages may import heavy ones too."""
    lines = (f"import {module}; print({module!r}, *{heavy} & sys.modules.keys())" for module in modules)
    code = "\n".join(("import sys", *lines))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == list(modules), "a module, followed by the heavy packages that its import brings"
