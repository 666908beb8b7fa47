"""Errors as OpenAI's clients read them: a status, and {"error": {message, type, param, code}}."""

from maxtext.common.errors import UserError
from maxtext.common.log import LOGGER
from maxtext.common.types import Json
from maxtext.inference.errors import EngineError
from maxtext.inference.validation import RequestError

INVALID_REQUEST = "invalid_request_error"
NOT_FOUND = "not_found_error"
SERVER_ERROR = "server_error"
# Names that the API has for fields of SamplingParams.
API_NAMES = {"max_new_tokens": "max_tokens"}
# `finish_reason` of the API by that of the engine, without those of failures.
FINISH_REASONS = {"end": "stop", "stop": "stop", "length": "length"}
# Status and type by the code of an EngineError.
ENGINE_ERRORS = {
    "queue_full": (429, "rate_limit_error"),
    "preparation_queue_full": (429, "rate_limit_error"),
    "grammar_queue_full": (429, "rate_limit_error"),
    "draining": (503, SERVER_ERROR),
    "engine_failed": (503, SERVER_ERROR),
    "request_timeout": (504, "timeout_error"),
    "slow_consumer": (408, INVALID_REQUEST),
    "adapter_dropped": (404, NOT_FOUND),
}


class ApiError(Exception):
    """A response that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> Json:
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    @classmethod
    def from_exception(cls, error: BaseException, request_id: str) -> "ApiError":
        """The response to a request that raised `error`. An exception that is not the user's is
        logged, and becomes a 500 that says no more than the id of the request.
        """
        if isinstance(error, ApiError):
            return error
        if isinstance(error, EngineError):
            status, kind = ENGINE_ERRORS[error.code]
            headers = {}
            if error.retry_after is not None:
                headers["Retry-After"] = str(max(1, round(error.retry_after)))
            return cls(status, str(error), kind, code=error.code, headers=headers)
        if isinstance(error, RequestError):
            param = API_NAMES.get(error.param or "", error.param)
            return cls(400, str(error), param=param, code=error.code)
        if isinstance(error, UserError):
            return cls(400, str(error))
        LOGGER.error("request %s failed", request_id, exc_info=error)
        message = f"an internal error: the server's log has it under {request_id}"
        return cls(500, message, SERVER_ERROR, code="internal_error")
