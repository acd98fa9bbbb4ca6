"""The guard in front of the page, which decides which requests the page gets."""
