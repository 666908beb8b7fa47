"""The base class of the groups of keys."""

from pydantic import BaseModel, ConfigDict


class Group(BaseModel):
    """A group of keys: frozen, and unknown keys are refused."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        protected_namespaces=(),
        # a group is rarely instantiated by itself, and building 75 validators takes time
        defer_build=True,
    )
