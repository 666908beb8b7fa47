"""The error of a valid request that the engine does not serve."""

from maxtext.common.errors import UserError


class EngineError(UserError):
    """The engine does not serve a request, although the request is valid. `code` is queue_full,
    preparation_queue_full, grammar_queue_full, draining, engine_failed, request_timeout,
    slow_consumer or adapter_dropped. `retry_after` is the number of seconds after which it makes
    sense to try again, or None.
    """

    def __init__(self, message: str, code: str, retry_after: float | None = None):
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after
