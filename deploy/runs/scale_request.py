"""Scale requests (`d1 scale`) for the actors of a run, and their answers: files in the run directory.

Write access to the directory is the only permission needed. The run's driver polls for a request, carries it out and
answers it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from actors.files.atomic_file import replace_file
from deploy.errors import UserError, os_errors
from deploy.program import program

Kind = Literal["samplers", "graders", "engines"]
KINDS: tuple[Kind, ...] = ("samplers", "graders", "engines")
MAX_ACTORS = 100_000
"""Maximum number of actors of a kind that is accepted: more is a typing error."""
_REQUEST, _ANSWER = ".scale.json", ".scaled.json"
_POLL_S = 0.1


class ScaleRequest(BaseModel):
    """Requested numbers of actors of a run, by kind."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Annotated[str, Field(min_length=1, max_length=64)]
    sizes: dict[Kind, Annotated[int, Field(ge=1, le=MAX_ACTORS)]]


class ScaleAnswer(BaseModel):
    """Outcome of a scale request."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    id: str
    """Id of the request."""
    refusal: str = ""
    """Why nothing was changed; empty if the request was carried out."""
    changes: dict[Kind, tuple[int, int]] = Field(default_factory=dict)
    """For each requested kind, the numbers of actors before and after."""
    notes: tuple[str, ...] = ()
    """Remarks for the user, in sentences."""


def send_request(run_dir: Path, sizes: Mapping[Kind, int], within_s: float) -> ScaleAnswer:
    """Send a scale request to a run and wait for the answer. Without one in `within_s` seconds it is withdrawn.

    Raises UserError if the directory is not writable, or the run does not answer.
    """
    request = ScaleRequest(id=secrets.token_hex(8), sizes=dict(sizes))
    with os_errors(f"{run_dir} cannot be written to"):
        replace_file(run_dir / _REQUEST, request.model_dump_json())
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if (answer := _read(run_dir / _ANSWER, ScaleAnswer)) is not None and answer.id == request.id:
            return answer
        time.sleep(_POLL_S)
    withdraw(run_dir)
    raise UserError(
        f"the run {run_dir.name} did not answer within {within_s:.0f} s, and the request was withdrawn; "
        f"`{program()} status {run_dir.name}` shows its state"
    )


def read_request(run_dir: Path) -> ScaleRequest | None:
    """Read the pending request of a run; None if there is none, or it is invalid."""
    return _read(run_dir / _REQUEST, ScaleRequest)


def withdraw(run_dir: Path) -> None:
    """Delete the pending request of a run."""
    with suppress(OSError):
        (run_dir / _REQUEST).unlink(missing_ok=True)


def write_answer(run_dir: Path, what: ScaleAnswer) -> None:
    """Write the answer to a request, and delete the request. Raises OSError if the answer cannot be written."""
    replace_file(run_dir / _ANSWER, what.model_dump_json())
    withdraw(run_dir)


_Model = TypeVar("_Model", bound=BaseModel)


def _read(path: Path, kind: type[_Model]) -> _Model | None:
    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None
