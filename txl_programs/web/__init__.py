"""The common parts of the programs that serve over HTTP: connections, checks of the sender, and the terminal."""
