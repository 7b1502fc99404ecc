"""Terminal output of offline work: canvases, grades, tasks and evaluations."""
