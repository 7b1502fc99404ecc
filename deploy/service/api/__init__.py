"""The HTTP application: bodies to jobs, events to answers. It imports no engine."""
