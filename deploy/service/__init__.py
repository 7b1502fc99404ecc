"""The service: HTTP answers from the newest policy version, on Ray Serve."""

import structlog

# Here, because every process imports it. By default tracebacks show the values of variables: prompts and secrets.
structlog.configure(
    processors=[
        # Log lines of a request have its id.
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.dev.set_exc_info,
        structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S", utc=False),
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)
