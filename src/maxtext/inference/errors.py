"""The error of a request that is well-formed, and that the engine cannot serve."""

from maxtext.common.errors import UserError


class EngineError(UserError):
    """A request that the engine does not serve, though nothing is wrong with it. `code` is
    queue_full, preparation_queue_full, grammar_queue_full, draining, engine_failed,
    request_timeout, slow_consumer or adapter_dropped; `retry_after` is in seconds, if it makes
    sense to try again.
    """

    def __init__(self, message: str, code: str, retry_after: float | None = None):
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after
