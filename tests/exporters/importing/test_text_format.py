"""The text format is read as protobuf itself reads it, and what is not the text format is named by its line."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from halfeven.exporters.importing.text_format import MAX_BYTES, MAX_DEPTH, Word, read_text_format
from halfeven.models.errors import BadFolder, TooLarge
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ModelConfig: Any = pytest.importorskip("tritonclient.grpc.model_config_pb2").ModelConfig

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
INT64 = st.integers(-(2**63), 2**63 - 1)


def read(folder: Path, text: str) -> dict[str, list[Any]]:
    (folder / "config.pbtxt").write_bytes(text.encode())
    return read_text_format(folder / "config.pbtxt", folder)


def as_protobuf_has_it(message: Message) -> dict[str, list[Any]]:
    """Every field that is set, in the form that `read_text_format` gives."""
    found: dict[str, list[Any]] = {}
    for field, value in message.ListFields():
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            pairs = sorted(value.items())
            inner = entry.fields_by_name["value"]
            found[field.name] = [{"key": [key], "value": [plain(inner, each)]} for key, each in pairs]
        else:
            values = list(value) if field.is_repeated else [value]
            found[field.name] = [plain(field, each) for each in values]
    return found


def plain(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return as_protobuf_has_it(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return str(value).lower() if isinstance(value, bool) else value


@st.composite
def configurations(draw: st.DrawFn) -> Message:
    config = ModelConfig(name=draw(TEXTS), max_batch_size=draw(st.integers(0, 2**31 - 1)))
    for _ in range(draw(st.integers(0, 3))):
        tensor = config.input.add(
            name=draw(TEXTS), data_type=draw(st.integers(0, 14)), optional=draw(st.booleans())
        )
        tensor.dims.extend(draw(st.lists(INT64, max_size=4)))
    for key, value in draw(st.dictionaries(TEXTS.filter(bool), TEXTS, max_size=3)).items():
        config.parameters[key].string_value = value
    config.dynamic_batching.preferred_batch_size.extend(draw(st.lists(st.integers(0, 64), max_size=3)))
    config.optimization.graph.level = draw(st.integers(-(2**31), 2**31 - 1))
    sample = config.model_warmup.add(name=draw(TEXTS), count=1)
    sample.inputs["x"].zero_data = True
    return config


def same_order(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of maps have no order."""
    return {**tree, "parameters": sorted(tree.get("parameters", []), key=lambda entry: entry["key"])}


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(config=configurations(), as_utf8=st.booleans(), one_line=st.booleans(), braces=st.booleans())
def test_what_protobuf_writes_is_read_as_it_was(
    tmp_path: Path, config: Message, as_utf8: bool, one_line: bool, braces: bool
) -> None:
    text = text_format.MessageToString(
        config,
        as_utf8=as_utf8,
        as_one_line=one_line,
        pointy_brackets=not braces,
        use_short_repeated_primitives=braces,
    )
    assert same_order(read(tmp_path, text)) == same_order(as_protobuf_has_it(config))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1, b: 2; c: 0x1F d: 017 e: -3", {"a": [1], "b": [2], "c": [31], "d": [15], "e": [-3]}),
        ("a: 1.5f b: .5 c: 1e3 d: -inf", {"a": [1.5], "b": [0.5], "c": [1000.0], "d": [float("-inf")]}),
        ("a: [1, 2] a: 3 b: []", {"a": [1, 2, 3], "b": []}),
        ("m { x: 1 } m: < x: 2 > m [ { x: 3 }, { } ]", {"m": [{"x": [1]}, {"x": [2]}, {"x": [3]}, {}]}),
        ("# nothing\n a: TYPE_FP32 # a type\n", {"a": [Word("TYPE_FP32")]}),
        (r'''a: "one" 'two' "\n\x41\101\u00e9\303\251"''', {"a": ["onetwo\nAAéé"]}),
        ("", {}),
    ],
)
def test_every_form_of_a_value_is_read(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    assert read(tmp_path, text) == expected


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a 1", ":1: expected the text format of protobuf, got 1:3 : 'a 1': Expected ':' or '{'"),
        ("a: 1\nb: {", ":2: expected the text format"),
        ("a: }", "a: }"),
        ("}", "Expected identifier"),
        ("a: 'open", "missing ending quote"),
        ("a: [1, ]", "a: [1, ]"),
        ("a: [1 2]", 'Expected "]"'),
        ("a: 09", "09"),
        ("a: 12px", "12px"),
        ("a: " + "9" * 40, "numbers of 64 bits"),
        (r"a: '\xff'", "utf-8"),
        (r"a: 'b' 'c\z'", "Expected a string with escapes"),
        ("[ext.name]: 1", "Expected identifier"),
    ],
)
def test_what_is_not_the_text_format_is_named(text: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(BadFolder) as raised:
        read(tmp_path, text)
    assert fault in str(raised.value)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").write_bytes(b"name: '\xff'")
    with pytest.raises(BadFolder, match="not UTF-8"):
        read_text_format(tmp_path / "config.pbtxt", tmp_path)


def test_size_and_depth_are_bounded(tmp_path: Path) -> None:
    deepest = "a {" * MAX_DEPTH + "}" * MAX_DEPTH
    assert read(tmp_path, deepest)
    with pytest.raises(TooLarge, match="nested more than"):
        read(tmp_path, f"a {{{deepest}}}")
    with pytest.raises(TooLarge, match="larger than"):
        read(tmp_path, "#" * (MAX_BYTES + 1))


def test_a_long_number_is_read_in_one_pass(tmp_path: Path) -> None:
    """200,000 digits: a pattern that tries every part of them takes minutes."""
    before = time.process_time()
    with pytest.raises(BadFolder, match="expected the text format") as raised:
        read(tmp_path, "a: " + "9" * 200_000 + "x")
    assert time.process_time() - before < 30
    assert len(str(raised.value)) < 500
