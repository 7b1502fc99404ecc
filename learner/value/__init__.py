"""Value model: step-level returns and advantages from a learned baseline (TraceRL)."""
