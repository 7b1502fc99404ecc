"""The service: HTTP answers from the newest policy version, on Ray Serve."""

import structlog

# Here, since each of its processes passes here. By default tracebacks show what variables hold: prompts, and secrets.
structlog.configure(
    processors=[
        # What is logged while a request is answered has its id.
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.dev.set_exc_info,
        structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S", utc=False),
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)
