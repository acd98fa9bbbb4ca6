"""Networks, tasks, cached inference and generation."""
