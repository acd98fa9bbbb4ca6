"""Tagged sentences."""
