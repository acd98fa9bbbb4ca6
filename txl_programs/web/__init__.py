"""What the programs that serve over HTTP share: connections, checks of who sends a request, and the terminal."""
