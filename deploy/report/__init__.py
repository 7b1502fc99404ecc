"""`d1 report`: runs as one self-contained HTML file."""
