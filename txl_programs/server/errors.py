"""The error of a request, with the status of the answer."""


class Failed(Exception):
    """A request that cannot be answered.

    Args:
        status: HTTP status of the answer.
        message: a sentence for the client.
        name: the parameter that is wrong; `None` if no single one is.
    """

    def __init__(self, status: int, message: str, name: str | None = None):
        super().__init__(message)
        self.status = status
        self.name = name
