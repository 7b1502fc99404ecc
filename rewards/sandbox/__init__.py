"""Programs that a model wrote, run where they can do no harm, and judged by tests that they cannot reach."""

from rewards.sandbox.config import SandboxConfig
from rewards.sandbox.sandbox import ProgramEnding, Ran, Sandbox
from rewards.sandbox.suite import Suite, SuiteVerdict

__all__ = ["ProgramEnding", "Ran", "Sandbox", "SandboxConfig", "Suite", "SuiteVerdict"]
