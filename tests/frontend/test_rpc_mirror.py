"""The proto is the native dialect: each message has the fields of the type that it stands for, no
more and no less; the table has every method; what is committed as generated is what the compiler
gives.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import grpc
import msgspec
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from tests.frontend.live_server import LiveServer
from tests.frontend.test_auth import routes
from tests.processes import completed
from tlt_client.wire import RolloutStatus, WireError
from tlt_server.errors import codes, from_code
from tlt_server.frontend.dialects.sglang.requests import GenerateFields
from tlt_server.frontend.dialects.weights.requests import DirectoryFields
from tlt_server.frontend.http.endpoints import Endpoint
from tlt_server.frontend.http.fields import Strict
from tlt_server.frontend.rpc.messages import NULL, OBJECT
from tlt_server.frontend.rpc.methods import METHODS, OPERATIONS, SERVICE, UPDATES, Operation
from tlt_server.frontend.rpc.server import Error
from tlt_server.frontend.weights.broadcasts import UpdateFields
from tlt_server.wire.packed import PackedIds

CLIENTS = Path(__file__).parents[2] / "clients"
NEVER_SENT = {
    "startup",  # there is no server yet
    "method_not_allowed",  # gRPC has an error of its own
    "unsafe_channel",  # only a borrowed dialect raises it
}
BY_NAME = {"stream", "detach"}  # fields that the name of a method implies
# Forms of other dialects on the same routes.
BORROWED = (GenerateFields, DirectoryFields, UpdateFields)
SCALARS: dict[int, type] = {
    FieldDescriptor.TYPE_DOUBLE: float,
    FieldDescriptor.TYPE_INT32: int,
    FieldDescriptor.TYPE_INT64: int,
    FieldDescriptor.TYPE_UINT64: int,
    FieldDescriptor.TYPE_BOOL: bool,
    FieldDescriptor.TYPE_STRING: str,
    FieldDescriptor.TYPE_BYTES: bytes,
}


class Described(NamedTuple):
    """The types of one field, and whether it may be null."""

    kinds: set[Any]
    null: bool  # null differs from absent: always in a reply, in a request if there is a default


def fields_of(kind: Any) -> dict[str, Described]:
    if isinstance(kind, dict):
        return kind
    if issubclass(kind, Strict):
        hints = get_type_hints(kind, include_extras=True)
        return {
            field.encode_name: described(
                hints[field.name],
                null=(
                    getattr(kind.absent_means, field.name)  # type: ignore[attr-defined]
                    if field.default is msgspec.UNSET
                    else field.default
                )
                is not None,
            )
            for field in msgspec.structs.fields(kind)
        }
    return {
        name: described(hint, null=True)
        for name, hint in get_type_hints(kind).items()
        if name in kind.__struct_fields__
    }


def described(hint: Any, *, null: bool) -> Described:
    found = branches(hint)
    if str in found:  # an object that may come as its JSON text does so in a message
        found -= {dict[str, Any]}
    return Described(found - {NoneType, msgspec.UnsetType}, null and NoneType in found)


def branches(hint: Any) -> set[Any]:
    if get_origin(hint) is Annotated:
        return branches(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return {found for part in get_args(hint) for found in branches(part)}
    if get_origin(hint) is Literal:
        return {type(value) for value in get_args(hint)}
    return {list[int]} if hint is PackedIds else {hint}


def differences(
    message: Descriptor, kind: Any, where: str, *, reply: bool = False
) -> Iterator[str]:
    """Describe each difference between a message and the type."""
    asked = fields_of(kind)
    fields = {field.name: field for field in message.fields}
    unions = {
        union.name: union for union in message.oneofs if union.name in asked
    }  # a field of several types
    for union in unions.values():
        fields = {name: field for name, field in fields.items() if field.containing_oneof != union}
        if {SCALARS[field.type] for field in union.fields} != asked[union.name].kinds:
            yield f"{where}.{union.name} has other members"
    nulls = {name.removesuffix(NULL) for name in fields if name.endswith(NULL)}
    fields = {name: field for name, field in fields.items() if not name.endswith(NULL)}
    objects = {name: field for name, field in fields.items() if name.endswith(OBJECT)}
    fields = {name: field for name, field in fields.items() if name not in objects}
    for name, field in objects.items():
        kinds = asked[name.removesuffix(OBJECT)].kinds
        for kind in (kind for kind in kinds if kind not in SCALARS.values()):
            yield from element_differences(field, kind, f"{where}.{name}", reply=reply)
    for name in (fields.keys() | unions.keys()) ^ asked.keys():
        yield f"{where}.{name} is in the {'type' if name in asked else 'proto'} only"
    if nulls != (set() if reply else {name for name, about in asked.items() if about.null}):
        yield f"{where} has nulls of {nulls}"
    for name in fields.keys() & asked.keys():
        yield from field_differences(
            fields[name], asked[name].kinds, f"{where}.{name}", reply=reply
        )
        if (
            reply
            and asked[name].null
            and not fields[name].is_repeated
            and not fields[name].has_presence
        ):
            yield f"{where}.{name} may be null and has no presence"


def field_differences(
    field: FieldDescriptor, kinds: set[Any], where: str, *, reply: bool
) -> Iterator[str]:
    """One field, whose type is one of the kinds."""
    about = field.message_type
    if field.enum_type is not None:
        if kinds:
            yield f"{where} is null in the proto and {kinds} in the type"
    elif about is not None and (
        about.full_name == "google.protobuf.Struct" or about.GetOptions().map_entry
    ):
        value = (
            {Any}
            if about.full_name == "google.protobuf.Struct"
            else {SCALARS[about.fields_by_name["value"].type]}
        )
        if [value] != [branches(get_args(kind)[1]) for kind in kinds if get_origin(kind) is dict]:
            yield f"{where} is a map to {value} in the proto and {kinds} in the type"
    elif field.is_repeated:
        elements = [get_args(kind)[0] for kind in kinds if get_origin(kind) is list]
        if not elements:
            yield f"{where} is a list in the proto and {kinds} in the type"
        for kind in (kind for element in elements for kind in branches(element) - {NoneType}):
            yield from element_differences(field, kind, where, reply=reply)
    elif about is not None or SCALARS[field.type] not in kinds:
        for kind in kinds:
            yield from element_differences(field, kind, where, reply=reply)


def element_differences(
    field: FieldDescriptor, kind: Any, where: str, *, reply: bool
) -> Iterator[str]:
    if get_origin(kind) is tuple:  # a pair, by its places
        pair = {
            part.name: described(of, null=False)
            for part, of in zip(field.message_type.fields, get_args(kind), strict=True)
        }
        yield from differences(field.message_type, pair, where, reply=reply)
    elif (
        field.message_type is not None
        and isinstance(kind, type)
        and hasattr(kind, "__annotations__")
    ):
        yield from differences(field.message_type, kind, where, reply=reply)
    elif field.message_type is not None or SCALARS[field.type] is not kind:
        in_proto = field.message_type or SCALARS[field.type]
        yield f"{where} is {in_proto} in the proto and {kind} in the type"


def endpoint_of(operation: Operation, server: LiveServer) -> Endpoint:
    [found] = [
        route
        for route in routes(server)
        if (route.method, route.path) == (operation.method, operation.path.replace(":path", ""))
    ]
    return found


def takes(endpoint: Endpoint, operation: Operation) -> dict[str, Described]:
    """Describe the fields that a client sends in path, query and body."""
    kinds = {"string": str, "number": float, "boolean": bool}
    parameters = {
        parameter.name: described(kinds[str(parameter.schema["type"])], null=False)
        for parameter in endpoint.parameters
        if parameter.place != "header" and parameter.name != "config_format"
    }
    if operation.ranged:
        return parameters | {
            "start": described(int, null=False),
            "total": described(int, null=False),
            "data": described(bytes, null=False),
        }
    models = [
        kind for kind in branches(endpoint.takes) if kind is not None and kind not in BORROWED
    ]
    return parameters | {
        name: about for model in models for name, about in fields_of(model).items()
    }


@pytest.mark.parametrize("name", OPERATIONS)
def test_messages_mirror_the_types_of_their_operation(name: str, server: LiveServer) -> None:
    operation, about = OPERATIONS[name], SERVICE.methods_by_name[name]
    endpoint = endpoint_of(operation, server)
    asked = takes(endpoint, operation)
    assert set(operation.fixed) <= asked.keys()
    left = {
        field: about for field, about in asked.items() if field not in {*BY_NAME, *operation.fixed}
    }
    assert list(differences(about.input_type, left, about.input_type.name)) == []
    if about.server_streaming:
        [events] = about.output_type.oneofs
        # The event `message` belongs to a borrowed dialect.
        streamed = {event: kind for event, kind in endpoint.streams if event != "message"}
        assert {field.name for field in events.fields} == streamed.keys()
        for field in events.fields:
            assert (
                list(differences(field.message_type, streamed[field.name], field.name, reply=True))
                == []
            )
    else:
        gives = RolloutStatus if name == "Detach" else endpoint.gives
        assert list(differences(about.output_type, gives, about.output_type.name, reply=True)) == []


def test_messages_of_an_update_mirror_their_operations(server: LiveServer) -> None:
    about = SERVICE.methods_by_name["UpdateWeights"]
    [held] = about.input_type.oneofs
    assert {field.name for field in held.fields} == UPDATES.keys() and about.client_streaming
    for field in held.fields:
        operation = UPDATES[field.name]
        endpoint = endpoint_of(operation, server)
        assert list(differences(field.message_type, takes(endpoint, operation), field.name)) == []
        assert endpoint.needs == "push-weights", (
            "keys are looked at once, before the first message says what it holds"
        )
    assert list(differences(about.output_type, endpoint.gives, "PushReply", reply=True)) == []


def test_methods_and_the_error_match_the_wire() -> None:
    assert {*OPERATIONS, "UpdateWeights"} == set(SERVICE.methods_by_name)
    assert len(METHODS) == len(SERVICE.methods_by_name)
    assert list(differences(Error.DESCRIPTOR, WireError, "Error", reply=True)) == []


def test_comparison_sees_a_missing_or_differently_typed_field() -> None:
    class Other(msgspec.Struct):
        code: int
        message: str
        more: str

    found = list(differences(Error.DESCRIPTOR, Other, "Error", reply=True))
    assert sorted(line.split(" ")[0] for line in found) == [
        "Error.code",
        "Error.more",
        "Error.retryable",
    ]


def test_the_page_of_grpc_lists_every_error_by_its_status() -> None:
    rows = re.findall(
        r"^\| (`[A-Z_`, ]+) \| (.*) \|$",
        (CLIENTS.parent / "docs" / "grpc.md").read_text(),
        re.MULTILINE,
    )
    statuses = [status for row, _ in rows for status in re.findall(r"`(\w+)`", row)]
    listed = {
        code: set(re.findall(r"`(\w+)`", row))
        for row, errors in rows
        for code in re.findall(r"`(\w+)`", errors)
    }
    known = {
        code: type(from_code(code, "")).grpc_code for code in codes() if code not in NEVER_SENT
    }
    assert listed.keys() == known.keys() and all(known[code] in listed[code] for code in known)
    assert sorted(statuses) == sorted(set(known.values()))
    assert all(hasattr(grpc.StatusCode, status) for status in statuses)


def test_the_committed_stubs_are_current(tmp_path: Path) -> None:
    (tmp_path / "tlt_client" / "rpc").mkdir(parents=True)
    done = completed(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-Itlt_client/rpc={CLIENTS / 'proto'}",
            f"--python_out={tmp_path}",
            f"--pyi_out={tmp_path}",
            f"--grpc_python_out={tmp_path}",
            "tlt_client/rpc/rollout.proto",
        ]
    )
    assert done.returncode == 0, done.stderr
    made = sorted((tmp_path / "tlt_client" / "rpc").iterdir())
    assert [file.name for file in made] == [
        "rollout_pb2.py",
        "rollout_pb2.pyi",
        "rollout_pb2_grpc.py",
    ]
    for file in made:
        assert file.read_bytes() == (CLIENTS / "tlt_client" / "rpc" / file.name).read_bytes(), (
            f"run make proto: {file.name}"
        )
