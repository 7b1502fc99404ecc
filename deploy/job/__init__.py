"""A run as a job: started, followed, stopped, and cleaned up after."""
