"""The server of the page: the requests that it accepts, and its output."""
