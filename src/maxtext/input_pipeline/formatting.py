"""formatting_func_path: a function of the user that turns a record into one of the forms of rows.

The path is dotted (package.module.function) or a file (folder/file.py:function). The function takes
the record and formatting_func_kwargs, and returns the new record. A `template_path` among these is
a JSON file, which the function gets parsed, as `template_config`.
"""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from maxtext.common.errors import ConfigError, UserError
from maxtext.common.files import local_path, read_json_object
from maxtext.common.types import Json
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.formats import Record, UnusableRecord
from maxtext.input_pipeline.user_code import failure

# Of MaxText's formatters, which apply a function to a whole dataset: rows have no columns to remove
IGNORED = ("remove_columns",)


class FormattingFunction:
    """The function of formatting_func_path with its keyword arguments. It is imported again in
    other processes.
    """

    def __init__(self, path: str, kwargs: Json):
        self.path = path
        self.kwargs = kwargs
        self.function = load_function(path)
        self.arguments = {
            name: value for name, value in kwargs.items() if name not in (*IGNORED, "template_path")
        }
        if "template_path" in kwargs:
            self.arguments["template_config"] = read_template_config(kwargs["template_path"])

    @classmethod
    def from_config(cls, config: MaxTextConfig) -> "FormattingFunction | None":
        if not config.formatting_func_path:
            return None
        return cls(config.formatting_func_path, config.formatting_func_kwargs)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path, self.kwargs)

    def __call__(self, record: Record) -> Record:
        """Raises UnusableRecord if the function fails for this record."""
        setting = f"formatting_func_path={self.path}"
        row = call_user_function(setting, self.function, record, **self.arguments)
        if not isinstance(row, dict):
            raise UnusableRecord(
                f"formatting_func_path={self.path} returned {type(row).__name__} instead of a "
                "record of columns"
            )
        return row


def call_user_function(
    setting: str, function: Callable[..., Any], *args: object, **kwargs: object
) -> Any:
    """The result of the function of `setting`. Raises UnusableRecord if it fails."""
    try:
        return function(*args, **kwargs)
    except UserError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise UnusableRecord(
            f"{setting} raised {type(error).__name__}: "
            f"{' '.join(str(error).split()) or 'no message'}"
        ) from error


def load_function(path: str, key: str = "formatting_func_path") -> Callable[..., Any]:
    """The function of a dotted path, or of file.py:name. Raises ConfigError, which names `key`."""
    key = f"{key}={path}"
    file, _, name = path.rpartition(":")
    dotted, _, last = path.rpartition(".")
    if not file and not dotted:
        raise ConfigError(f"{key} names no function: use package.module.function or file.py:name")
    try:
        module = load_file(file, key) if file.endswith(".py") else None
        if module is None:
            module, name = (
                importlib.import_module(file or dotted),
                name if file else last,
            )
        function = getattr(module, name)
    except UserError:
        raise
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key} cannot be imported: {error}") from error
    except Exception as error:  # the user's module may raise anything
        raise failure(f"{key} cannot be imported: {type(error).__name__}", error) from error
    if not callable(function):
        raise ConfigError(f"{key} is {type(function).__name__} and no function")
    return function


def load_file(file: str, key: str) -> ModuleType:
    path = local_path(file)
    if not path.is_file():
        raise ConfigError(f"{key}: there is no file {file}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_template_config(path: object) -> Json:
    if not isinstance(path, str) or not Path(path).expanduser().is_file():
        raise ConfigError(f"formatting_func_kwargs: template_path={path} is no file")
    return read_json_object(Path(path).expanduser())
