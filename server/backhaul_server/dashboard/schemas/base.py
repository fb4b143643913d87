"""The base of all answers: how they are made of what has fields of the same names."""

from collections.abc import Iterable, Mapping
from typing import Self

from google.protobuf.message import Message
from pydantic import BaseModel, ConfigDict, Field


class ErrorDetail(BaseModel):
    """Why a request could not be answered."""

    detail: str = Field(description="What is wrong, and what to do", examples=['no run "x" has reported'])


class Schema(BaseModel):
    """An answer, whose fields can be copied by their names."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    @classmethod
    def of(cls, *sources: object, **given: object) -> Self:
        """Returns an answer with the given fields. All other fields come from the first source that has them.

        `duration_ms` also comes from `duration_s`, in seconds. A field that no source has, or that is optional in a
        message of protobuf and not set, has its default or None. Raises ValidationError if its type forbids None.

        Args:
            sources: Objects or messages with fields of the same names; None counts as one without fields.
            given: Fields that are not copied.
        """
        for name in cls.model_fields.keys() - given.keys():
            value = _field_of(sources, name)
            if value is not None or cls.model_fields[name].is_required():
                given[name] = value
        return cls(**given)


def _field_of(sources: Iterable[object], name: str) -> object:
    for source in sources:
        if (value := getattr(source, name, None)) is not None:
            is_unset = isinstance(source, Message) and _is_optional(source, name) and not source.HasField(name)
            # Protobuf's maps have no order of their own.
            return None if is_unset else dict(sorted(value.items())) if isinstance(value, Mapping) else value
        if name.endswith("_ms") and (value := getattr(source, f"{name[:-2]}s", None)) is not None:
            return 1e3 * value
    return None


def _is_optional(source: Message, name: str) -> bool:
    return bool(source.DESCRIPTOR.fields_by_name[name].has_presence)
