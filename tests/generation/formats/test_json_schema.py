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
from tests.generation.formats.automata import accepts, make_here, random_texts


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


class Tree(pydantic.BaseModel):
    name: str
    children: list["Tree"] = pydantic.Field(max_length=2)


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
    "duration": {"type": "string", "format": "duration"},
    "email": {"type": "string", "format": "email"},
    "hostname": {"type": "string", "format": "hostname"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"},
    "pattern of a length": {
        "type": "string",
        "pattern": "^a{2,5}$",
        "minLength": 1,
        "maxLength": 5,
    },
    "bounded number": {"type": "number", "minimum": -1.25, "exclusiveMaximum": 30},
    "bounded numbers": {"type": ["integer", "number"], "exclusiveMinimum": 0, "maximum": 1.5},
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
    "tree": Tree.model_json_schema(),
    "list": {
        "type": "object",
        "properties": {"value": NAME, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["value", "next"],
    },
    "map of itself": {"type": "object", "additionalProperties": {"$ref": "#"}},
    "one of itself": {
        "$defs": {
            "leaf": {"type": "object", "properties": {"kind": {"const": "leaf"}}},
            "pair": {
                "type": "object",
                "properties": {
                    "kind": {"const": "pair"},
                    "left": {"$ref": "#/$defs/node"},
                    "right": {"$ref": "#/$defs/node"},
                },
                "required": ["left", "right"],
            },
            "node": {"oneOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/pair"}]},
        },
        "$ref": "#/$defs/node",
    },
    "several types, of itself": {
        "type": ["array", "null"],
        "items": {"$ref": "#"},
        "minItems": 1,
        "maxItems": 2,
    },
    "class": Child.model_json_schema(),
}


def format_checker():
    """Return one that knows times, which the package leaves to others."""
    checker = jsonschema.FormatChecker()
    duration = pydantic.TypeAdapter(datetime.timedelta)
    label = "(?!-)[a-z0-9-]{1,63}(?<!-)"
    for name, read in {
        "time": datetime.time.fromisoformat,
        "date-time": datetime.datetime.fromisoformat,
        "duration": duration.validate_python,
        "hostname": re.compile(rf"(?=.{{1,253}}$){label}(\.{label})*$").match,
    }.items():
        checker.checks(name, ValueError)(lambda text, read=read: read(text) is not None)
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
        ({"type": "number", "multipleOf": 3}, r"keywords that can be kept. Received 'multipleOf'"),
        ({"type": "number", "minimum": True}, "at 'minimum': expected a finite number. Received"),
        (
            {"type": "number", "exclusiveMinimum": 0.5, "maximum": 0.5},
            "expected bounds that a number of 15 digits lies between",
        ),
        (
            {"type": "number", "minimum": 3, "maximum": 2},
            "expected bounds that a number of 15 digits lies between",
        ),
        ({"type": "string", "minimum": 3}, "can be kept. Received 'minimum'"),
        ({"type": "integer", "minimum": True}, "at 'minimum': expected a finite number. Received"),
        ({"type": "integer", "maximum": float("inf")}, "at 'maximum': expected a finite number"),
        ({"type": "integer", "maximum": "3"}, "at 'maximum': expected a finite number"),
        (
            {"type": "integer", "exclusiveMinimum": 2, "maximum": 2.9},
            r"expected bounds that a number of 15 digits lies between\. Received",
        ),
        ({"type": "integer", "minimum": 10**15}, "bounds that a number of 15 digits lies between"),
        (
            {"type": "string", "pattern": "(?=a)b"},
            r"schema at 'pattern': expected a pattern that JavaScript and Python read alike, but "
            r"of what begins with '\(\?' it may have '\(\?:' alone\. Received '\(\?=a\)b'",
        ),
        ({"type": "string", "pattern": 3}, "read alike, but it is no string. Received 3"),
        (
            {"type": "string", "pattern": "^[a-z]+$", "maxLength": 8},
            r"schema at 'pattern': expected one of 0 to 8 characters, as 'minLength' .* such as "
            r"'\^\[a-z\]\{0,8\}\$'\. Received",
        ),
        (
            {"type": "string", "pattern": "a", "format": "date"},
            "schema beside 'format': expected keywords that can be kept. Received 'pattern'",
        ),
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
                "required": ["b"],
            },
            "expected a schema whose texts can end, though it is part of itself",
        ),
        ({"anyOf": [{"type": "null"}], "type": "null"}, "Received 'type'"),
        (
            {"type": "string", "format": "date", "maxLength": 3},
            "schema beside 'format': expected keywords that can be kept. Received",
        ),
        ({"type": "string", "format": "regex"}, "schema at 'format': expected one of date, time"),
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
                "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}},
                "$ref": "#/$defs/a",
            },
            "expected a schema whose texts can end, though it is part of itself",
        ),
        ({"$ref": "#"}, "expected a schema whose texts can end"),
        ({"anyOf": [{"$ref": "#"}]}, "expected a schema whose texts can end"),
        (
            {
                "$defs": {
                    f"d{i}": {
                        "type": "object",
                        "properties": {f"p{j}": {"$ref": f"#/$defs/d{j}"} for j in range(8)},
                        "required": [f"p{j}" for j in range(8)],
                    }
                    for i in range(8)
                },
                "$ref": "#/$defs/d0",
            },
            "schema whose texts can end",
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
        assert accepts(found, text) == (text in texts)
