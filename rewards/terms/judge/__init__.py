"""LLM judge as a reward term, through any OpenAI-compatible server."""
