"""Consistency of pinned versions, published ports and documentation with the code, and the form of commit messages."""

from __future__ import annotations

import re
import runpy
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from deploy.recipe.recipe import recipe_schema

ROOT = Path(__file__).parents[1]


def _constraints() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {re.sub("[-_.]+", "-", name).lower(): Version(version) for name, version in pairs}


def _requirements(project: dict[str, Any]) -> list[Requirement]:
    return [Requirement(text) for text in [*project["dependencies"], *project["optional-dependencies"]["dev"]]]


def test_dependencies_are_pinned_to_allowed_public_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = _constraints()
    for requirement in _requirements(project):
        assert pinned[requirement.name.lower()] in requirement.specifier, requirement
    assert [name for name, version in pinned.items() if version.local] == []


def test_the_licence_file_matches_pyproject() -> None:
    assert distribution("d1").metadata["License-Expression"] == "Apache-2.0"
    assert "Apache License\n                           Version 2.0" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_containers_publish_on_loopback_only_and_have_no_default_secrets() -> None:
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    services = yaml.safe_load(text)["services"]
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert ports
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []
    assert {name for name, rest in re.findall(r"\$\{(\w+)(.*?)}", text) if not rest.startswith(":?")} == set()


def test_the_recipe_field_table_is_current() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert page == runpy.run_path(str(ROOT / "docs" / "recipe_fields.py"))["page"](page), "run make docs"


def _field_names(schema: dict[str, Any], section: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, field in section["properties"].items():
        yield prefix + name
        for choice in field.get("oneOf", field.get("anyOf", [field])):
            if "$ref" in choice:
                target = schema["$defs"][choice["$ref"].rpartition("/")[2]]
                yield from _field_names(schema, target, f"{prefix}{name}.") if "properties" in target else ()


def test_documents_name_only_existing_recipe_fields() -> None:
    schema = recipe_schema()
    fields = set(_field_names(schema, schema))
    # run_directory.md is left out: it names files, and `model.safetensors` is not a field.
    for name in ("algorithms.md", "architecture.md", "d1_defects.md", "recipes.md"):
        spans = re.findall(r"`([a-z_]+\.[a-z_.]+)(?:: [^`]+)?`", (ROOT / "docs" / name).read_text(encoding="utf-8"))
        named = {span for span in spans if span.partition(".")[0] in fields}
        assert named - fields == set(), name


def test_the_file_tree_page_is_current() -> None:
    page = (ROOT / "docs" / "tree.md").read_text(encoding="utf-8")
    assert page == runpy.run_path(str(ROOT / "docs" / "tree.py"))["page"](), "run make docs"


def test_the_file_tree_page_skips_folders_with_only_bytecode(tmp_path: Path) -> None:
    """A moved folder leaves its bytecode behind."""
    (tmp_path / "moved" / "__pycache__").mkdir(parents=True)
    (tmp_path / "moved" / "__pycache__" / "old.pyc").touch()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "new.py").write_text('"""What it is."""')
    lines = runpy.run_path(str(ROOT / "docs" / "tree.py"))["_lines"](tmp_path, 0)
    assert [line.split()[0] for line in lines] == [f"{tmp_path.name}/", "kept/", "new.py"]


def test_no_folder_has_more_than_sixteen_files_of_code() -> None:
    folders = ("rewards", "learner", "rollout", "actors", "deploy", "benchmarks", "tests")
    sizes = Counter(path.parent for folder in folders for path in (ROOT / folder).rglob("*.py"))
    assert {str(path.relative_to(ROOT)): size for path, size in sizes.items() if size > 16} == {}


def _bad_messages(messages: str) -> list[str]:
    """Return the subjects of commits, given as NUL-terminated messages, that are too long or have no body."""
    commits = [message.strip().partition("\n") for message in messages.split("\0") if message.strip()]
    return [subject for subject, _, body in commits if len(subject) > 72 or not body.strip()]


@pytest.mark.skipif(not (ROOT / ".git").exists() or which("git") is None, reason="needs git and the repository")
def test_commits_have_a_subject_of_at_most_72_characters_and_a_body() -> None:
    # Earlier commits do not follow the rule.
    command = ["git", "log", "--no-merges", "--since=2026-11-28T03:00Z", "--format=%B%x00"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(done.stderr)
    assert _bad_messages(done.stdout) == []


def test_the_commit_check_finds_long_subjects_and_missing_bodies() -> None:
    messages = f"Good\n\nWhy.\n\0\n{'x' * 73}\n\nWhy.\n\0\nNo body\n\0\n"
    assert _bad_messages(messages) == ["x" * 73, "No body"]
