"""The base of all answers: how they are made, and the example that each of them has."""

from collections.abc import Iterable, Mapping
from typing import Any, Self, get_args, get_origin

from google.protobuf.message import Message
from pydantic import BaseModel, ConfigDict, Field


class ErrorDetail(BaseModel):
    """Why a request could not be answered."""

    detail: str = Field(description="What is wrong, and what to do", examples=['no run "x" has reported'])


def example_of(model: type[BaseModel]) -> dict[str, Any]:
    """Returns an example of a model, built from those of its fields. Raises KeyError for a field without an example."""
    example = {}
    for name, field in model.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if field.examples:
            example[name] = field.examples[0]
        elif inner is not None:
            is_list = get_origin(field.annotation) is list
            example[name] = [example_of(inner)] if is_list else example_of(inner)
        else:
            raise KeyError(f"{model.__name__}.{name} has no example")
    return example


def _with_example(schema: dict[str, Any], model: type[BaseModel]) -> None:
    schema["examples"] = [example_of(model)]


class Schema(BaseModel):
    """A model that OpenAPI shows with an example, and whose fields can be copied by their names."""

    model_config = ConfigDict(json_schema_extra=_with_example, json_schema_serialization_defaults_required=True)

    @classmethod
    def of(cls, *sources: object, **given: object) -> Self:
        """Returns an answer with the given fields. All other fields come from the first source that has them.

        `wait_ms` also comes from `wait_s`, in seconds. A field that no source has, or that is optional in a message of
        protobuf and not set, has its default or None. Raises ValidationError if its type does not allow None.

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
