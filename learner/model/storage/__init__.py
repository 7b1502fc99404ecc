"""The bytes of checkpoint files: read, hashed and referred to, in several threads, with the rate shown."""
