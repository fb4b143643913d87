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
    def of(cls, *objects: object, **given: object) -> Self:
        """Returns an answer with the given fields. All other fields come from the first object that has them.

        `duration_ms` also comes from `duration_s`, in seconds. A field that no object has, or that is optional in a
        message of protobuf and not set, has its default or None. Raises ValidationError if its type forbids None.

        Args:
            objects: Objects or messages with fields of the same names; None counts as one without fields.
            given: Fields that are not copied.
        """
        for name in cls.model_fields.keys() - given.keys():
            value = _field_of(objects, name)
            if value is not None or cls.model_fields[name].is_required():
                given[name] = value
        return cls(**given)


def _field_of(objects: Iterable[object], name: str) -> object:
    for one in objects:
        if (value := getattr(one, name, None)) is not None:
            is_unset = isinstance(one, Message) and _is_optional(one, name) and not one.HasField(name)
            # Protobuf's maps have no order of their own.
            return None if is_unset else dict(sorted(value.items())) if isinstance(value, Mapping) else value
        if name.endswith("_ms") and (value := getattr(one, f"{name[:-2]}s", None)) is not None:
            return 1e3 * value
    return None


def _is_optional(message: Message, name: str) -> bool:
    return bool(message.DESCRIPTOR.fields_by_name[name].has_presence)
