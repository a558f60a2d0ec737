"""What every part of a plan file is made of (meshfold.plan_file.schema)."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Bytes = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Document(BaseModel):
    """Strict (no coercion of types), closed (no further fields), frozen."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
