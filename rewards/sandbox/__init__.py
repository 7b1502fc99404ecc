"""Programs that a model wrote, run where they can do no harm, and judged by tests that they cannot reach."""

from rewards.sandbox.config import SandboxConfig
from rewards.sandbox.sandbox import Ending, Ran, Sandbox
from rewards.sandbox.suite import Suite, Verdict

__all__ = ["Ending", "Ran", "Sandbox", "SandboxConfig", "Suite", "Verdict"]
