"""Take RayJob.json and RayService.json from KubeRay's CustomResourceDefinitions (Apache License 2.0).

python tests/deploy/kuberay/take.py DIRECTORY, a checkout of github.com/ray-project/kuberay: these are of v1.7.0.

Descriptions are left out, and so are pod templates, which are most of the size: those are Kubernetes's own, and are
validated against its schema.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
_KINDS = {"RayJob": "rayjobs", "RayService": "rayservices"}
_POD_TEMPLATES = ("template", "submitterPodTemplate")


def _without_pods(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {"type": "object"} if name in _POD_TEMPLATES else _short(schema) for name, schema in properties.items()
    }


def _short(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_short(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: _without_pods(value) if name == "properties" else _short(value)
        for name, value in schema.items()
        if name != "description"
    }


def main() -> None:
    """Write both files."""
    definitions = Path(sys.argv[1]) / "ray-operator" / "config" / "crd" / "bases"
    for kind, plural in _KINDS.items():
        # The C loader takes a second where Python's takes ten.
        text = (definitions / f"ray.io_{plural}.yaml").read_text(encoding="utf-8")
        versions = yaml.load(text, Loader=yaml.CSafeLoader)["spec"]["versions"]
        (served,) = [each for each in versions if each["name"] == "v1"]
        schema = _short(served["schema"]["openAPIV3Schema"])
        (HERE / f"{kind}.json").write_text(json.dumps(schema, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
