"""JSON Schema as a regular expression: what it matches fits the schema, for `jsonschema`, too."""

import datetime
import enum
import json
import random
import re
from collections.abc import Callable
from typing import Annotated, Literal

import jsonschema
import pydantic
import pytest

import backbone_surgery as bs
from backbone_surgery.generation.formats.automaton_script import BYTES
from tests.generation.formats.automata import make_here


class Size(enum.Enum):
    small = "small"
    large = "large"


class Toy(pydantic.BaseModel):
    colour: str = pydantic.Field(max_length=8)
    size: Size


class Child(pydantic.BaseModel):
    """A class as those who use OpenAI's client write one."""

    name: str
    age: int
    toys: list[Toy] = pydantic.Field(max_length=2)
    nickname: str | None = None
    born: datetime.date


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog", "puppy"]
    lives: int | None = None


NAME = {"type": "string", "maxLength": 3}
SCHEMAS = {
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer"},
    "bounded integer": {"type": "integer", "minimum": -12, "exclusiveMaximum": 107},
    "number": {"type": "number"},
    "string": {"type": "string"},
    "bounded string": {"type": "string", "minLength": 2, "maxLength": 4},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "several types": {"type": ["string", "null"]},
    "array": {"type": "array", "items": {"type": "boolean"}},
    "bounded array": {"type": "array", "items": NAME, "minItems": 2, "maxItems": 3},
    "empty array": {"type": "array", "maxItems": 0},
    "enum": {"enum": ['a"b', 1, None, {"a": [1.5]}, "é."]},
    "enum of a type": {"type": "string", "enum": ["a", "b"]},
    "const": {"const": "yes"},
    "any of": {"anyOf": [{"type": "boolean"}, NAME]},
    "one of": {
        "oneOf": [
            {"type": "object", "properties": {"a": {"const": "x"}, "b": NAME}},
            {"type": "object", "properties": {"b": {"type": "null"}, "a": {"enum": ["y", "z"]}}},
        ]
    },
    "one of some classes": pydantic.TypeAdapter(
        Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
    ).json_schema(),
    "object": {"type": "object", "properties": {"a": NAME, "b.c": {"type": "null"}}},
    "required": {
        "type": "object",
        "properties": {"a": NAME, "b": {"type": "null"}, "c": NAME, "d": NAME},
        "required": ["b", "c"],
        "additionalProperties": False,
    },
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "empty object": {"type": "object", "additionalProperties": False},
    "reference": {"$defs": {"n": NAME}, "type": "array", "items": {"$ref": "#/$defs/n"}},
    "class": Child.model_json_schema(),
}


def made(regex):
    found = make_here(regex)
    return found.table.reshape(-1, BYTES), found.first, found.ends


def random_texts(regex, count, rng):
    """Return texts that a walk through the automaton writes, most of them short."""
    table, first, ends = made(regex)
    dead, texts = len(table) - 1, []
    while len(texts) < count:
        state, text = first, b""
        while len(text) < 400:
            following = [b for b in range(BYTES) if table[state, b] != dead]
            plain = [b for b in following if chr(b) in '"{}[]:,ab01\\'] or following
            if state in ends and (not following or rng.random() < 0.3):
                texts.append(text.decode())
                break
            closing = [b for b in plain if chr(b) in '"]}']
            byte = rng.choice(rng.choice([following, plain, plain, closing or plain]))
            state, text = table[state, byte], text + bytes([byte])
    return texts


def format_checker():
    """Return one that knows times, which the package leaves to others."""
    checker = jsonschema.FormatChecker()
    for name, read in (("time", datetime.time), ("date-time", datetime.datetime)):
        checker.checks(name, ValueError)(
            lambda text, read=read: bool(read.fromisoformat(text)) or True
        )
    return checker


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_it_matches_fits_the_schema(name):
    schema, checker = SCHEMAS[name], format_checker()
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    texts = random_texts(bs.ResponseFormat.json_schema(schema).regex, 40, random.Random(name))
    for text in texts:
        validator.validate(json.loads(text))


def test_a_class_of_pydantic_reads_what_it_matches():
    wanted = bs.ResponseFormat.json_schema(Child)
    assert wanted == bs.ResponseFormat.json_schema(Child.model_json_schema())
    assert wanted == bs.ResponseFormat.json_schema(json.dumps(Child.model_json_schema()))
    for text in random_texts(wanted.regex, 40, random.Random(0)):
        Child.model_validate_json(text)


@pytest.mark.parametrize(
    ("name", "text", "fits"),
    [
        ("string", r'"a\n\u00e9\"é"', True),
        ("string", '"a\n"', False),
        ("string", '"a', False),
        ("bounded string", '"é\\"b"', True),
        ("bounded string", '"a"', False),
        ("number", "-0.5e+10", True),
        ("number", "01", False),
        ("integer", "999999999999999", True),
        ("integer", "1.0", False),
        ("date", '"2024-02-28"', True),
        ("date", '"2024-02-30"', False),
        ("date", '"2024-12-31"', True),
        ("time", '"23:59:59.5Z"', True),
        ("array", "[]", True),
        ("array", "[ true , false]", True),
        ("array", "[true,]", False),
        ("bounded array", '["a"]', False),
        ("enum", '{"a": [1.5]}', True),
        ("enum", '"éx"', False),
        ("object", "{}", True),
        ("object", '{"b.c": null}', True),
        ("object", '{"a": "x", "b.c": null}', True),
        ("object", '{"a": "x",}', False),
        ("object", '{"bxc": null}', False),
        ("required", '{"b": null, "c": "", "d": "x"}', True),
        ("required", '{"a": "x", "b": null, "c": ""}', True),
        ("required", '{"a": "x", "b": null}', False),
        ("required", '{, "b": null, "c": ""}', False),
        ("map", '{"x": 1, "y": 2}', True),
        ("map", '{"x": "1"}', False),
        ("class", '{"name": "Mia", "age": 5, "toys": [], "born": "2020-01-31"}', True),
        ("class", '{"name": "Mia", "age": 5, "born": "2020-01-31", "toys": []}', False),
    ],
)
def test_what_it_matches(name, text, fits):
    regex = bs.ResponseFormat.json_schema(SCHEMAS[name]).regex
    assert (re.fullmatch(regex, text) is not None) == fits


def test_any_object_has_three_levels_at_most():
    regex = bs.ResponseFormat.json_object().regex
    for text in ("{}", '{"a": {"b": [1, "x"]}, "c": null}', '{"a": [[true]]}'):
        assert re.fullmatch(regex, text)
    for text in ("[]", '{"a": [[[1]]]}', '{"a" 1}', "{a: 1}"):
        assert not re.fullmatch(regex, text)


def nested(depth, inner):
    for _ in range(depth):
        inner = {"type": "array", "items": inner}
    return inner


def test_references_into_lists_and_with_escapes():
    names = {"a b/c": {"type": "null"}}
    part = {"$ref": "#/$defs/a%20b~1c"}
    schema = {"$defs": names, "anyOf": [part, {"type": "array", "items": {"$ref": "#/anyOf/0"}}]}
    regex = bs.ResponseFormat.json_schema(schema).regex
    assert re.fullmatch(regex, "null")
    assert re.fullmatch(regex, "[null]")


def test_a_reference_is_written_once():
    names = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(12)}
    schema = {"$defs": {**names, "d12": {"type": "null"}}, "$ref": "#/$defs/d0"}
    assert re.fullmatch(bs.ResponseFormat.json_schema(schema).regex, "null")


def test_a_class_without_a_schema_is_refused():
    class Odd(pydantic.BaseModel):
        call: Callable

    with pytest.raises(
        bs.SurgeryError, match=r"expected a class that has a JSON Schema\. Received"
    ):
        bs.ResponseFormat.json_schema(Odd)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "number", "minimum": 3}, r"keywords that can be kept. Received 'minimum'"),
        ({"type": ["integer", "number"], "maximum": 3}, "can be kept. Received 'maximum'"),
        ({"type": "string", "minimum": 3}, "can be kept. Received 'minimum'"),
        ({"type": "integer", "minimum": True}, "at 'minimum': expected a finite number. Received"),
        ({"type": "integer", "maximum": float("inf")}, "at 'maximum': expected a finite number"),
        ({"type": "integer", "maximum": "3"}, "at 'maximum': expected a finite number"),
        (
            {"type": "integer", "exclusiveMinimum": 2, "maximum": 2.9},
            r"expected bounds that a number of 15 digits lies between\. Received",
        ),
        ({"type": "integer", "minimum": 10**15}, "bounds that a number of 15 digits lies between"),
        ({"type": "string", "pattern": "a"}, "Received 'pattern'. Leave these out and check"),
        ({"type": "string", "items": {}}, "Received 'items'"),
        ({"oneOf": [{"type": "null"}]}, "schema at 'oneOf': expected objects with one property"),
        ({"oneOf": []}, "schema at 'oneOf': expected objects with one property"),
        ({"oneOf": "ab"}, "schema at 'oneOf': expected objects with one property"),
        (
            {"oneOf": [{"type": "object", "properties": {"a": {"const": "x"}}}] * 2},
            "schema at 'oneOf': expected objects with one property of which each has other values",
        ),
        (
            {"oneOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"oneOf": [{"$ref": "#"}]}}},
            "schema at 'oneOf': expected objects with one property",
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"const": "x"}, "b": {"oneOf": [{"$ref": "#"}]}},
            },
            "expected a schema that is not part of itself",
        ),
        ({"anyOf": [{"type": "null"}], "type": "null"}, "Received 'type'"),
        (
            {"type": "string", "format": "date", "maxLength": 3},
            "schema beside 'format': expected keywords that can be kept. Received",
        ),
        ({"type": "string", "format": "email"}, "schema at 'format': expected one of date, time"),
        ({"type": "text"}, "schema at 'type': expected one or more of null, boolean"),
        ({"type": "string", "format": []}, r"schema at 'format': expected one of .* Received \[\]"),
        ({"enum": [1], "type": 5}, "schema at 'type': expected one or more of null, .* Received 5"),
        ({"const": 1, "type": [["integer"]]}, "schema at 'type': expected one or more of null"),
        ({"type": "string", "maxLength": None}, "whole numbers, the least one first"),
        ({"$ref": "#name", "$defs": {}}, "expected a reference to a part of the schema"),
        (nested(26, {"type": "null"}), "at most 1048576 characters as a regular expression"),
        (nested(2000, {}), "expected fewer levels"),
        (
            {"type": "object", "properties": {f"p{i}": {} for i in range(9000)}},
            "at most 1048576 characters as a regular expression. Received more. Ask for less",
        ),
        (
            {"$defs": {"a": nested(9, {})}, "anyOf": [{"$ref": "#/$defs/a"}] * 900},
            "schema at '.*': expected what takes at most 1048576 characters",
        ),
        ({"type": "array", "items": {"$id": "x"}}, r"schema at 'items': expected keywords .*id"),
        (
            {"type": "object", "properties": {"1": {}}, "required": [1]},
            "expected names of its prop",
        ),
        ({"type": "object", "additionalProperties": 5}, "expected a schema or a boolean. Received"),
        ({"$ref": "#x/$defs/a", "$defs": {"a": {}}}, "expected a reference to a part of the sch"),
        ({"const": "\ud800"}, "expected characters that UTF-8 has"),
        ({"type": []}, "schema at 'type': expected one or more of"),
        ({"minLength": 3}, r"schema at 'type': expected one or more of .*\. Received None"),
        ({"type": "array", "items": [1]}, r"schema at 'items': expected a JSON Schema, a dict"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "whole numbers, the least one first"),
        ({"type": "string", "maxLength": True}, "whole numbers, the least one first"),
        ({"type": "object", "properties": ["a"]}, "schema at 'properties': expected a dict"),
        (
            {"type": "object", "properties": {"a": {}}, "required": ["b"]},
            r"schema at 'required': expected names of its properties. Received \['b'\]",
        ),
        ({"enum": []}, "one or more values of its type"),
        ({"enum": [1], "type": "string"}, "one or more values of its type"),
        ({"type": "integer", "enum": [True]}, "one or more values of its type"),
        ({"enum": [float("nan")]}, "values that JSON has"),
        ({"allOf": [{}, {}]}, "schema at 'allOf': expected one schema"),
        ({"anyOf": []}, "schema at 'anyOf': expected a list of one or more schemas"),
        ({"$ref": "#/$defs/a"}, "expected a reference to a part of the schema"),
        ({"$ref": "other.json"}, "expected a reference to a part of the schema"),
        (
            {
                "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}},
                "$ref": "#/$defs/a",
            },
            "expected a schema that is not part of itself",
        ),
        ("{", "expected JSON. Received '{', which is none"),
        ([], "expected a JSON Schema, a dict. Received"),
    ],
)
def test_what_cannot_be_kept_is_refused(schema, words):
    with pytest.raises(bs.SurgeryError, match=words):
        bs.ResponseFormat.json_schema(schema)


@pytest.mark.parametrize("texts", [[], "yes", ["yes", ""], [1], None])
def test_choices_are_texts(texts):
    with pytest.raises(bs.SurgeryError, match="expected a list of texts, none of them empty"):
        bs.ResponseFormat.choice(texts)


def test_a_format_is_a_string():
    with pytest.raises(bs.SurgeryError, match="expected a regular expression, a string"):
        bs.ResponseFormat(re.compile("a"))


def test_choices_are_taken_as_they_stand():
    texts = ["a.b", "(x) [y] {z}", "1+1=2?", "^$|\\", "é\n\t", "#-~&"]
    regex = bs.ResponseFormat.choice(texts).regex
    found = make_here(regex)
    for text in [*texts, "axb", "x"]:
        state = found.first
        for byte in text.encode():
            state = found.table[state * BYTES + byte]
        assert (state in found.ends) == (text in texts)
