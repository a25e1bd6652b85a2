"""The base of every request body: nothing unknown, nothing converted, and no flood of errors. Torch-free.

A body may hold millions of wrong values, and telling them all would take the server half a minute to tell one.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MAX_MEMBERS = 1 << 16
T = TypeVar("T")


def _bounded(value: Any) -> Any:
    if isinstance(value, Sized) and len(value) > MAX_MEMBERS:
        raise ValueError(f"an object of more than {MAX_MEMBERS} members")
    return value


Items = Annotated[list[T], Field(fail_fast=True)]
"""A list that is wrong at its first wrong item."""
Members = Annotated[dict[str, T], BeforeValidator(_bounded)]
"""An object that maps names to values of one type."""


class Strict(BaseModel):
    """No unknown field, no conversion between types, no NaN or infinity. A null means "not given"."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_flood(cls, data: Any) -> Any:
        return _bounded(data) if isinstance(data, dict) else data
