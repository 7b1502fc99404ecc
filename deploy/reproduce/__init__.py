"""`d1 reproduce`: the four rows of the first d1's table, trained and evaluated by one command."""
