"""Where problems and demonstrations come from."""
