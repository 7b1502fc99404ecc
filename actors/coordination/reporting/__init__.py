"""Reports about a run: status, timeline and gauges."""
