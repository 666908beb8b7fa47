"""Loads configurations and checks them against the layers of their model.

Everything above `configs/` loads configurations here.
"""

import os
from collections.abc import Iterable, Mapping

from maxtext.configs import load as configs_load
from maxtext.configs.derive import Devices
from maxtext.configs.problems import raise_if_any
from maxtext.configs.provenance import Layer
from maxtext.configs.sources import from_python
from maxtext.configs.types import MaxTextConfig
from maxtext.models.rules import check_layers, check_order


def config(path: str | os.PathLike | None = None, **overrides: object) -> MaxTextConfig:
    """The configuration of a run, merged from base.yml, the YAML file at `path`, the model's file,
    M_KEY environment variables and the keywords.
    """
    return load(path, from_python(overrides))


def load(
    path: str | os.PathLike | None = None,
    overrides: Layer | Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
    devices: Devices | None = None,
    model: Layer | None = None,
) -> MaxTextConfig:
    """As `config`, from key=value overrides. See `configs.load.load` for the parameters.

    Raises ConfigError with all settings that do not fit together or that would do nothing.
    """
    config = configs_load.load(path, overrides, environ, devices, model, check_layers)
    raise_if_any(check_order(config))
    return config
