"""One record per family: everything in which its runs differ from others."""
