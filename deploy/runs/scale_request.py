"""A request to change how many actors a run has, and its answer: files of the run directory, as `d1 status` reads.

Whoever may write to the directory may ask. The run's driver looks for a request, carries it out and answers it.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from deploy.errors import UserError, reason
from deploy.program import program

Kind = Literal["samplers", "graders", "engines"]
KINDS: tuple[Kind, ...] = ("samplers", "graders", "engines")
MOST = 100_000
"""Actors of a kind that may be asked for: more is a typing error."""
_REQUEST, _ANSWER = ".scale.json", ".scaled.json"
_POLL_S = 0.1
_Size = Annotated[int, Field(ge=1, le=MOST)]


class ScaleRequest(BaseModel):
    """How many actors of some kinds a run shall have."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Annotated[str, Field(min_length=1, max_length=64)]
    sizes: dict[Kind, _Size]


class ScaleAnswer(BaseModel):
    """What became of a request."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    id: str
    """The request's."""
    refusal: str = ""
    """Why nothing was changed; empty where it was."""
    changes: dict[Kind, tuple[int, int]] = Field(default_factory=dict)
    """For each kind that was asked for, how many there were, and how many there shall be."""
    notes: tuple[str, ...] = ()
    """What who asked should know, in sentences."""


def ask(run_dir: Path, sizes: Mapping[Kind, int], within_s: float) -> ScaleAnswer:
    """Ask a run for other sizes, and wait for the answer. Without one within so many seconds nothing is asked any more.

    Raises UserError when the directory cannot be written to, or the run does not answer.
    """
    request = ScaleRequest(id=secrets.token_hex(8), sizes=dict(sizes))
    try:
        _write(run_dir / _REQUEST, request)
    except OSError as error:
        raise UserError(f"{run_dir} cannot be written to: {reason(error)}") from error
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if (answer := _read(run_dir / _ANSWER, ScaleAnswer)) is not None and answer.id == request.id:
            return answer
        time.sleep(_POLL_S)
    forget(run_dir)
    raise UserError(
        f"the run {run_dir.name} did not answer within {within_s:.0f} s, and is not asked any more; "
        f"`{program()} status {run_dir.name}` says how it stands"
    )


def asked(run_dir: Path) -> ScaleRequest | None:
    """What a run is asked; None where nobody asks, or what is there is no request."""
    return _read(run_dir / _REQUEST, ScaleRequest)


def forget(run_dir: Path) -> None:
    """Whatever a run was asked, it is not any more."""
    with suppress(OSError):
        (run_dir / _REQUEST).unlink(missing_ok=True)


def answer(run_dir: Path, what: ScaleAnswer) -> None:
    """Answer a request, which is done with. Raises OSError."""
    _write(run_dir / _ANSWER, what)
    forget(run_dir)


def _write(path: Path, what: BaseModel) -> None:
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        beside.write_text(what.model_dump_json(), encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


_Model = TypeVar("_Model", bound=BaseModel)


def _read(path: Path, kind: type[_Model]) -> _Model | None:
    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None
