"""Limits of requests: every kind of request has some, each is enforced, and the documentation lists them."""

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from backhaul import LimitError
from backhaul_proto.v1 import segment_pb2, telemetry_pb2, tensor_pb2
from backhaul_runtime.sealing import sealed
from backhaul_runtime.wire.fields import has_more_fields
from backhaul_runtime.wire.protocol import MAX_DECLARED, MAX_NAME
from backhaul_runtime.wire.splicing import deserializer, field_of
from backhaul_server.worker import limits
from support.wire import METHODS


def test_each_kind_of_request_has_limits() -> None:
    asked = [field.message_type for field in segment_pb2.Request.DESCRIPTOR.oneofs_by_name["request"].fields]
    kinds = [*(method.input_type for method in METHODS), *asked]
    assert set(limits.REQUESTS_BY_KIND) == set(map(GetMessageClass, kinds))


@pytest.mark.parametrize("kind", limits.REQUESTS_BY_KIND, ids=lambda kind: kind.DESCRIPTOR.name)
def test_a_request_may_have_its_size_and_no_more(kind: type[Message]) -> None:
    most = limits.REQUESTS_BY_KIND[kind].most_bytes
    limits.check_size(kind, bytes(most))
    with pytest.raises(
        LimitError, match=f"{most + 1} bytes of a {kind.DESCRIPTOR.name} exceed the worker's limit of {most}"
    ):
        limits.check_size(kind, bytes(most + 1))


def save(**fields: Any) -> segment_pb2.Request:
    return segment_pb2.Request(save=segment_pb2.SaveRequest(**fields))


def report(**fields: Any) -> telemetry_pb2.PutReportsRequest:
    return telemetry_pb2.PutReportsRequest(report=telemetry_pb2.TrainerReport(**fields))


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (lambda n: save(name="x" * n), MAX_NAME),
        (lambda n: save(sources=[b""] * n), 8_192),
        (lambda n: save(generator_states=[b""] * n), 4_096),
        (lambda n: save(generator_states=[b"", bytes(n)]), 16 << 10),
        (lambda n: segment_pb2.Request(recompute=segment_pb2.RecomputeRequest(positions=[0] * n)), 8_192),
        (lambda n: segment_pb2.Request(backward=segment_pb2.BackwardRequest(slots=[segment_pb2.Slot()] * n)), 8_192),
        (lambda n: report(steps=[telemetry_pb2.Step()] * n), 1_024),
        (lambda n: report(calls=[telemetry_pb2.SegmentCall(spans=[telemetry_pb2.Span()] * n)]), 64),
    ],
)
def test_a_list_or_name_may_have_its_length_and_no_more(make: Callable[[int], Message], most: int) -> None:
    limits.check_fields(make(most))
    with pytest.raises(LimitError) as caught:
        limits.check_fields(make(most + 1))
    assert (caught.value.most, caught.value.found) == (most, most + 1)


def test_fields_of_nested_messages_are_counted() -> None:
    message = report(steps=[telemetry_pb2.Step()] * 10)  # one message in another that holds ten
    data, kind = message.SerializeToString(), telemetry_pb2.PutReportsRequest
    assert not has_more_fields(data, kind, 11)
    assert has_more_fields(data, kind, 10)
    for end in range(len(data)):  # half a message is protobuf's to refuse
        has_more_fields(data[:end] + b"\xff", kind, 11)


@pytest.mark.parametrize("part", [b"\x0a\x00", b"\x12\x00"], ids=["declarations", "chunks"])
@pytest.mark.parametrize("count", [MAX_DECLARED * 3, 400_000])
def test_empty_parts_of_tensors_are_refused_before_they_are_read(part: bytes, count: int) -> None:
    read = deserializer(tensor_pb2.PutTensorsRequest, limits.MOST_FIELDS)
    parsed = read(sealed([field_of(2, part * count)]))
    if isinstance(parsed, LimitError):
        assert parsed.__traceback__ is None
    else:  # a small message: the receiver refuses it
        assert count < limits.MOST_FIELDS
