"""Checkpoints by hub id, against local caches and a fake hub: no request leaves this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlparse

import pytest
from huggingface_hub import constants

from learner.model.hub import find_checkpoint, find_tokenizer
from learner.model.peft_directory.config import find_base, is_peft

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "model-00001-of-00001.safetensors": b"weights",
    "model.safetensors.index.json": b"{}",
    "vocab.json": b"{}",
    "merges.txt": b"",
    "modeling_dream.py": b"raise SystemExit",
    "README.md": b"read me",
}


@dataclass
class FakeHub:
    """A hub with the model `org/name`, with one commit that the branch `main` and the tag `v1` point to."""

    url: str = ""
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Status and error code of refused models, by name."""
    asked: list[str] = field(default_factory=list)
    """Files that were fetched."""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body for a request."""
        for name, (status, code) in self.refusals.items():
            if name in path:
                return status, {"X-Error-Code": code}, b""
        if path in ("/api/models/org/name", "/api/models/org/name/revision/main", "/api/models/org/name/revision/v1"):
            return 200, {}, json.dumps({"id": "org/name", "sha": COMMIT, "siblings": []}).encode()
        if path.startswith("/api/models/org/name/revision/"):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if path.startswith(f"/api/models/org/name/tree/{COMMIT}"):
            tree = [{"type": "file", "path": name, "size": len(FILES[name]), "oid": name} for name in FILES]
            return 200, {}, json.dumps(tree).encode()
        name = path.removeprefix(f"/org/name/resolve/{COMMIT}/")
        self.asked.append(name)
        return 200, {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT}, FILES[name]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, in offline mode."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    fake = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = fake.answer(urlparse(self.path).path)
            self.send_response(status)
            for key, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 (the library's word)

        def log_message(self, *args: object) -> None:
            """Suppress the request log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", fake.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", fake.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield fake
    server.shutdown()
    server.server_close()
    thread.join()


def _cached(cache: Path, ref: str) -> Path:
    repo = cache / "models--org--name"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / ref).write_text(COMMIT)
    return snapshot


def _refusal(reference: str | Path) -> str:
    with pytest.raises(ValueError, match=r"\S") as refused:
        find_checkpoint(reference)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_directory_is_used_directly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_checkpoint(tmp_path) == tmp_path
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint("org/name") == Path("org/name")


@pytest.mark.parametrize(
    ("reference", "ref"), [("org/name", "main"), (Path("org/name"), "main"), ("org/name@v1.5", "v1.5")]
)
def test_a_cached_model_is_found_without_the_hub(cache: Path, reference: str | Path, ref: str) -> None:
    snapshot = _cached(cache, ref)
    assert find_checkpoint(reference) == find_checkpoint(reference, config_only=True) == snapshot


def test_a_cached_commit_is_found_by_its_hash(cache: Path) -> None:
    snapshot = _cached(cache, "main")
    assert find_checkpoint(f"org/name@{COMMIT}") == snapshot


def test_a_model_that_is_not_cached_is_refused_offline(cache: Path) -> None:
    _cached(cache, "main")
    where = f"in the cache {cache}, and HF_HUB_OFFLINE is set; unset it, or give a directory"
    assert _refusal("org/other") == f"there is no directory org/other, and the model org/other is not {where}"
    assert _refusal("org/name@v2") == f"there is no directory org/name, and the model org/name is not {where}"


@pytest.mark.parametrize("reference", ["nowhere", "/no/such", "a/b/c", "./a/b", "org/name@", "~/x"])
def test_invalid_references_are_refused(reference: str, hub: FakeHub) -> None:
    assert _refusal(reference) == (
        f"{reference} is no directory, and no hub id either: that is org/name or org/name@revision"
    )
    assert _refusal("org/na--me").startswith("org/na--me is no directory, and no hub id either: Cannot have -- or ..")
    assert hub.asked == []


def test_only_data_files_of_a_model_are_fetched(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = find_checkpoint("org/name", config_only=True)
    assert [path.name for path in directory.iterdir()] == ["config.json"]
    assert set(hub.asked) == {"config.json"}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_checkpoint("org/name", config_only=True) == directory
    with pytest.raises(ValueError, match="only in part in the cache"):
        find_tokenizer("org/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert find_tokenizer("org/name") == directory
    assert "model-00001-of-00001.safetensors" not in hub.asked
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "org/name is only in part in the cache" in _refusal("org/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert find_checkpoint("org/name@v1") == directory
    assert {path.name for path in directory.iterdir()} == FILES.keys() - {"modeling_dream.py", "README.md"}


@pytest.mark.parametrize("find", [partial(find_checkpoint, config_only=True), find_tokenizer])
def test_only_config_and_matrices_of_an_adapter_are_fetched(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, find: Callable[[str], Path]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    about = json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(tmp_path)})
    files = {"adapter_config.json": about.encode(), "adapter_model.safetensors": b"matrices", "optimizer.pt": b""}
    for name in list(FILES):
        monkeypatch.delitem(FILES, name)
    for name, content in files.items():
        monkeypatch.setitem(FILES, name, content)
    directory = find("org/name")
    assert is_peft(directory)
    assert find_base(directory) == tmp_path
    assert set(hub.asked) == {"adapter_config.json"}
    assert {path.name for path in find_checkpoint("org/name").iterdir()} == files.keys() - {"optimizer.pt"}


def test_the_base_of_an_adapter_is_fetched_at_its_revision(hub: FakeHub, tmp_path: Path) -> None:
    about = {"peft_type": "LORA", "base_model_name_or_path": "org/name", "revision": "v1"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(about))
    assert (find_base(tmp_path) / "model-00001-of-00001.safetensors").is_file()
    (tmp_path / "adapter_config.json").write_text(json.dumps(about | {"revision": "v9"}))
    with pytest.raises(ValueError, match=r"the base org/name of the adapter .* org/name has no revision v9 on the hub"):
        find_base(tmp_path)


def test_hub_refusals_say_what_would_help(hub: FakeHub) -> None:
    hub.refusals = {"org/gone": (404, "RepoNotFound"), "org/gated": (403, "GatedRepo"), "org/broken": (400, "")}
    assert _refusal("org/gone") == (
        "there is no directory org/gone, and the hub shows no model of that name; check the name, and if it is "
        "private, log in with `hf auth login` or set HF_TOKEN"
    )
    assert _refusal("org/gated") == (
        "org/gated is gated: accept its terms at https://huggingface.co/org/gated, then log in with `hf auth login` "
        "or set HF_TOKEN"
    )
    assert _refusal("org/name@v9") == (
        "org/name has no revision v9 on the hub; name one of its branches, tags or commits, or leave it out"
    )
    assert "the model org/broken is not in the cache" in _refusal("org/broken")


def test_an_unreachable_hub_is_reported(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert _refusal("org/name") == (
        f"there is no directory org/name, and the model org/name is not in the cache {cache}, "
        "and the hub at http://127.0.0.1:9 cannot be reached; "
        "check the network, or give a directory"
    )
