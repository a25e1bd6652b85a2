"""The base of every request body: nothing unknown, nothing converted. Torch-free."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """No unknown field, no conversion between types, no NaN or infinity. A null means "not given"."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
