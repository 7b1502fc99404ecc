"""Sandboxed execution of model-written programs, graded by tests that they cannot access."""

from rewards.sandbox.config import SandboxConfig
from rewards.sandbox.sandbox import ExitReason, RunResult, Sandbox
from rewards.sandbox.suite import Suite, SuiteVerdict

__all__ = ["ExitReason", "RunResult", "Sandbox", "SandboxConfig", "Suite", "SuiteVerdict"]
