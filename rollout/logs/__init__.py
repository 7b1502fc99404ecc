"""Logs of what the steps of a row did, kept on the device until it leaves."""
