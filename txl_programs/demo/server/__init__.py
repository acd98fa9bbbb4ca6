"""The server of the page: whom it answers, what a request may hold, and what it prints."""
