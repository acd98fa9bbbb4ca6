"""One record a family: all that tells its runs from those of others."""
