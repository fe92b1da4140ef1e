"""Checks of single values: strict JSON types, except that an integer may be written as 5e8."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from shardwise.config.problems import kind_of, mismatch, show

MAX_INT = 2**63 - 1
MAX_NUMBER = 3.4028235e38
"""The largest finite fp32: any number of a config ends up in fp32 arithmetic."""


def refuse(message: str) -> PydanticCustomError:
    """Make the error with which a check refuses a value; pydantic adds the path."""
    # A message template, so that braces in a value are not taken for placeholders.
    return PydanticCustomError("config", "{message}", {"message": message})


@dataclass(frozen=True)
class Integer:
    """An integer between two bounds; `5e8` counts, `true` and `"5"` do not."""

    low: int = 0
    high: int = MAX_INT
    also: tuple[int, ...] = ()
    note: str = ""

    @property
    def what(self) -> str:
        """What is expected, in words."""
        text = f"an integer >= {self.low}" if self.high == MAX_INT else f"an integer from {self.low} to {self.high}"
        return "".join([text, *(f", or {value}" for value in self.also), f" ({self.note})" if self.note else ""])

    def __call__(self, value: object) -> int:
        """Return the value as an int, or refuse it."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise refuse(mismatch(value, self.what))
        if value in self.also or self.low <= value <= self.high:
            return value
        if value > self.high == MAX_INT:
            raise refuse(f"{show(value)} is too large; expected {self.what} and below 2^63")
        raise refuse(f"{show(value)} is out of range; expected {self.what}")


@dataclass(frozen=True)
class Number:
    """A number that fp32 can hold, between two bounds."""

    low: float | None = None
    above: float | None = None
    below: float | None = None
    high: float | None = None
    note: str = ""

    @property
    def what(self) -> str:
        """What is expected, in words."""
        limits = ((">=", self.low), (">", self.above), ("<", self.below), ("<=", self.high))
        bounds = " and ".join(f"{sign} {bound:g}" for sign, bound in limits if bound is not None)
        return " ".join(part for part in ("a number", bounds, f"({self.note})" if self.note else "") if part)

    def __call__(self, value: object) -> float:
        """Return the value as a float, or refuse it."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise refuse(mismatch(value, self.what))
        try:
            number = float(value)
        except OverflowError:
            raise refuse(f"{show(value)} is too large; expected {self.what}") from None
        if math.isnan(number) or abs(number) > MAX_NUMBER:
            raise refuse(f"{show(value)} is too large for fp32; expected {self.what}")
        if (
            (self.low is not None and number < self.low)
            or (self.above is not None and number <= self.above)
            or (self.below is not None and number >= self.below)
            or (self.high is not None and number > self.high)
        ):
            raise refuse(f"{show(value)} is out of range; expected {self.what}")
        return number


@dataclass(frozen=True)
class Flag:
    """`true` or `false`, nothing else."""

    note: str = ""

    @property
    def what(self) -> str:
        """What is expected, in words."""
        return "true or false" + (f" ({self.note})" if self.note else "")

    def __call__(self, value: object) -> bool:
        """Return the value, or refuse it."""
        if not isinstance(value, bool):
            raise refuse(mismatch(value, self.what))
        return value


@dataclass(frozen=True)
class Text:
    """A string; with `choices`, one of their keys in any case, replaced by the value."""

    choices: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def what(self) -> str:
        """What is expected, in words."""
        text = " or ".join(f'"{name}"' for name in self.choices) if self.choices else "a string"
        return text + (f" ({self.note})" if self.note else "")

    def __call__(self, value: object) -> str:
        """Return the value in its one spelling, or refuse it."""
        if not isinstance(value, str):
            raise refuse(mismatch(value, self.what))
        if not self.choices:
            return value
        if value.lower() not in self.choices:
            raise refuse(f"{show(value)} is not a choice; expected {self.what}")
        return self.choices[value.lower()]


@dataclass(frozen=True)
class Secret:
    """A string that is never shown."""

    what: str = "a string (the value is not shown)"

    def __call__(self, value: object) -> str:
        """Return the value, or refuse it without a word about it."""
        if not isinstance(value, str):
            raise refuse(f"{kind_of(value)}; expected {self.what}")
        return value


@dataclass(frozen=True)
class TextList:
    """A list of strings."""

    what: str = "a list of strings"

    def __call__(self, value: object) -> list[str]:
        """Return the value, or refuse it."""
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise refuse(mismatch(value, self.what))
        return list(value)


@dataclass(frozen=True)
class Object:
    """A JSON object with any keys."""

    what: str = "an object {...}"

    def __call__(self, value: object) -> dict[str, Any]:
        """Return the value, or refuse it."""
        if not isinstance(value, dict):
            raise refuse(mismatch(value, self.what))
        return value


Bool = Annotated[bool, BeforeValidator(Flag())]
Size = Annotated[int, BeforeValidator(Integer(0))]
Count = Annotated[int, BeforeValidator(Integer(1))]
Rate = Annotated[float, BeforeValidator(Number(low=0))]
Real = Annotated[float, BeforeValidator(Number())]
Names = Annotated[list[str], BeforeValidator(TextList())]
FreeObject = Annotated[dict[str, Any], BeforeValidator(Object())]


class Section(BaseModel):
    """Base of the sections: no unknown keys, null means absent, never changed once made."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _object_without_nulls(cls, value: object) -> object:
        if isinstance(value, cls):
            return value
        if not isinstance(value, dict):
            raise refuse(mismatch(value, "an object {...}"))
        return {key: item for key, item in value.items() if item is not None or key not in cls.model_fields}


def expected(model: type[BaseModel], name: str) -> str:
    """Say in words what a model's field takes."""
    for data in model.model_fields[name].metadata:
        what = getattr(getattr(data, "func", None), "what", None)
        if isinstance(what, str):
            return what
    return "a value"


def refused(check: Integer | Number | Flag | Text, value: object) -> str | None:
    """Return why a check refuses a value, or None when it takes it."""
    try:
        check(value)
    except PydanticCustomError as error:
        return error.message()
    return None
