"""`make chaos`: fault injection into runs of recipes/chaos.yaml, checked against d1's guarantees."""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser
from pathlib import Path

from deploy.recipe.overrides import load_recipe
from tests.chaos.faults import ON_MACHINES, Target
from tests.chaos.report import as_json, markdown
from tests.chaos.session import RECIPE, SessionOptions, run_session


def main() -> int:
    """Run a session and write its report. Returns the exit status: 1 if a guarantee was violated."""
    parser = ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes to the recipe")
    parser.add_argument("--kills", type=int, default=200, help="number of faults (200 take a night)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="seed of their schedule")
    parser.add_argument("--only", type=Target, choices=list(Target), action="append", help="targets; repeatable")
    parser.add_argument("--machines", action="store_true", help="run on two machines made of namespaces")
    parser.add_argument("--out", type=Path, help="new directory of the runs and the report")
    given = parser.parse_intermixed_args()
    runs_dir = load_recipe(RECIPE, given.overrides).runs_dir
    out = (given.out or runs_dir / f"chaos-{time.strftime('%Y%m%d-%H%M%S')}-seed-{given.seed}").resolve()
    options = SessionOptions(
        overrides=tuple(given.overrides),
        num_faults=given.kills,
        seed=given.seed,
        targets=given.only or (ON_MACHINES if given.machines else tuple(Target)),
        on_machines=given.machines,
        out=out,
    )
    began = time.monotonic()

    def log(line: str) -> None:
        sys.stdout.write(f"{time.monotonic() - began:8.1f} s  {line}\n")
        sys.stdout.flush()

    result = run_session(options, log)
    report = json.dumps(as_json(given.seed, result), indent=2)
    (out / "report.json").write_text(report + "\n", encoding="utf-8")
    sys.stdout.write(markdown(result.records))
    for what in result.skipped:
        log(f"skipped: {what}")
    num_injected = sum(len(record.injected) for record in result.records)
    log(f"{num_injected} of {given.kills} faults, {len(result.violations)} violations; runs and report: {out}")
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
