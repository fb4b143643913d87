"""The base of all answers, which gives each an example made of those of its fields."""

from typing import Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field


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


class ErrorDetail(BaseModel):
    """Why a request could not be answered."""

    detail: str = Field(description="What is wrong, and what to do", examples=['no run "x" has reported'])


class Schema(BaseModel):
    """A model that OpenAPI shows with an example."""

    model_config = ConfigDict(json_schema_extra=_with_example)
