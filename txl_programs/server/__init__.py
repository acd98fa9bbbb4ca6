"""The server of models over HTTP. `serve.py` runs it, `app.py` assembles it."""
