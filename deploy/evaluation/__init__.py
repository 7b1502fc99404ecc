"""`d1 eval` and `d1 compare`: accuracy by length and schedule with confidence intervals."""
