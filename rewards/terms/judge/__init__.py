"""A language model as a judge: behind any OpenAI-compatible server."""
