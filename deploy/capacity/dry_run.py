"""Output of `--dry-run`: the resolved recipe, what it needs against what is available, and problems."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from deploy.capacity.available import Resources
from deploy.capacity.needs import Needs
from deploy.machine import free_bytes
from deploy.printing import gigabytes
from deploy.recipe.overrides import resolved_yaml
from deploy.recipe.recipe import Recipe


def print_dry_run(recipe: Recipe, needs: Needs, available: Resources, problems: Sequence[str]) -> None:
    """Print the resolved recipe, what it needs against what is available, and the problems."""
    console = Console()
    text = resolved_yaml(recipe)
    if console.is_terminal:
        console.print(Syntax(text, "yaml", background_color="default", word_wrap=True))
    else:
        # Plain YAML: the output up to the table can be piped into a file and used as a recipe.
        console.print(Text(text), soft_wrap=True)
    table = Table("resource", "the recipe needs", f"{available.where} has")
    table.add_row("CPUs", f"{needs.cpus:g}", f"{available.cpus:g}")
    table.add_row("GPUs", str(needs.gpus), str(available.gpus))
    table.add_row("memory", f"{gigabytes(needs.memory_bytes)} or more", gigabytes(available.memory_bytes))
    table.add_row(
        "object store of one machine", gigabytes(needs.object_store_bytes), gigabytes(available.object_store_bytes)
    )
    table.add_row(
        "disk for checkpoints", f"up to {gigabytes(needs.disk_bytes)}", gigabytes(free_bytes(recipe.run_dir.parent))
    )
    console.print(table)
    for problem in problems:
        console.print(Text(f"problem: {problem}", style="red"), soft_wrap=True)
    if not problems:
        console.print("Nothing stands in its way. Nothing was started or written.")
