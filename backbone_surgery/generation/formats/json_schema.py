"""JSON Schema as a regular expression: of the JSON that fits a schema, and of nothing else.

What a regular expression cannot say is refused, so that no text comes that does not fit.
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.generation.formats.pieces import (
    DIGITS,
    LARGEST,
    any_of,
    escape,
    whole_numbers,
)
from backbone_surgery.numbers import is_int

DEEPEST = 3
"""How many arrays and objects lie in one another, where a schema leaves open what a value is."""

_LONGEST = 2**20

_GAP = "[ ]?"
_CHARACTER = (
    r'([^"\\\x00-\x1f]|\\["\\/bfnrt]'
    r"|\\u([0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))"
)
_INTEGER = rf"-?(0|[1-9][0-9]{{0,{DIGITS - 1}}})"
_SCALARS = {
    "null": "null",
    "boolean": "(true|false)",
    "integer": _INTEGER,
    "number": rf"{_INTEGER}(\.[0-9]{{1,15}})?([eE][+-]?[0-9]{{1,2}})?",
    "string": f'"{_CHARACTER}*"',
}
_DAYS = {"(0[13578]|1[02])": "|29|3[01]", "(0[469]|11)": "|29|30", "02": ""}
_DATE = "[12][0-9]{3}-" + any_of(
    f"{months}-(0[1-9]|1[0-9]|2[0-8]{last})" for months, last in _DAYS.items()
)
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_CLOCK})"
_HEX = "[0-9a-f]"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
}
_TYPES = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
}

_NOTES = frozenset(
    "title description default examples deprecated readOnly writeOnly "
    "$schema $id $comment $defs definitions discriminator".split()
)
"""Keywords that say nothing about which values fit."""

_OF_TYPES = {
    "string": {"minLength", "maxLength", "format"},
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
}


def regex_of_schema(schema: Any) -> str:
    """Return the regular expression of the JSON that fits a schema.

    Args:
        schema: a JSON Schema, a dict.

    Raises:
        SurgeryError: it says what cannot be said here, or is no schema.
    """
    try:
        return _Translation(schema).any(schema, "schema", ())
    except RecursionError as error:
        raise _refusal("schema", "fewer levels", schema) from error


def regex_of_objects() -> str:
    """Return the regular expression of JSON objects, of `DEEPEST` levels at most."""
    return _object_of(_value(DEEPEST - 1))


class _Translation:
    """Turns the parts of one schema into regular expressions.

    Args:
        whole: the schema, which references point into.
    """

    def __init__(self, whole: Any) -> None:
        self._whole = whole
        self._referred: dict[str, str] = {}

    def any(self, schema: Any, where: str, inside: tuple[str, ...]) -> str:
        """Return the expression of a schema; `inside` are the references that led to it."""
        regex = self._any(schema, where, inside)
        _check_length(len(regex), where)
        return regex

    def _any(self, schema: Any, where: str, inside: tuple[str, ...]) -> str:
        if schema is True:
            return _value(DEEPEST)
        if not isinstance(schema, Mapping):
            raise _refusal(where, "a JSON Schema, a dict", schema)
        said = {name for name in schema if name not in _NOTES}
        if schema is not self._whole:  # else references inside would mean something else
            _check_alone({"$id"} & set(schema), where)
        names = _types(schema, where)
        for name in ("$ref", "anyOf", "allOf", "oneOf", "const", "enum"):
            if name in said:
                typed = {"type"} if name in ("const", "enum") else set()
                _check_alone(said - {name} - typed, where)
        if "$ref" in said:
            return self._reference(schema["$ref"], where, inside)
        if "oneOf" in said:
            return self._one(schema["oneOf"], f"{where} at 'oneOf'", inside)
        if "anyOf" in said or "allOf" in said:
            return self._several(schema, where, inside)
        if "const" in said or "enum" in said:
            return _constants(schema, names, where)
        _check_alone(said - {"type"}.union(*_OF_TYPES.values()), where)
        if not said:
            return _value(DEEPEST)
        if "type" not in said:
            raise _refusal(f"{where} at 'type'", f"one or more of {', '.join(_TYPES)}", None)
        _check_alone(said - {"type"}.union(*(_OF_TYPES.get(n, set()) for n in names)), where)
        if "number" in names:  # these would be kept for whole ones alone
            _check_alone(said & _OF_TYPES["integer"], where)
        return any_of(self._typed(name, schema, where, inside) for name in names)

    def _typed(self, name: str, schema: Any, where: str, inside: tuple[str, ...]) -> str:
        if name == "object":
            return self._object(schema, where, inside)
        if name == "array":
            least, most = _bounds(schema, "minItems", "maxItems", where)
            item = self.any(schema.get("items", True), f"{where} at 'items'", inside)
            return _list_of(item, "[", "]", least, most)
        if name == "integer" and _OF_TYPES[name] & set(schema):
            return _integers(schema, where)
        if name != "string":
            return _SCALARS[name]
        if "format" in schema:
            _check_alone({"minLength", "maxLength"} & set(schema), f"{where} beside 'format'")
            if not isinstance(schema["format"], str) or schema["format"] not in _FORMATS:
                known = ", ".join(_FORMATS)
                raise _refusal(f"{where} at 'format'", f"one of {known}", schema["format"])
            return f'"{_FORMATS[schema["format"]]}"'
        least, most = _bounds(schema, "minLength", "maxLength", where)
        return f'"{_CHARACTER}{_times(least, most)}"'

    def _object(self, schema: Any, where: str, inside: tuple[str, ...]) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not all(isinstance(n, str) for n in properties):
            raise _refusal(f"{where} at 'properties'", "a dict of schemas", properties)
        names = set(properties)
        if not isinstance(required, list) or not all(
            isinstance(name, str) and name in names for name in required
        ):
            raise _refusal(f"{where} at 'required'", "names of its properties", required)
        others = schema.get("additionalProperties", True)
        if not isinstance(others, bool | Mapping):
            raise _refusal(f"{where} at 'additionalProperties'", "a schema or a boolean", others)
        if not properties:
            if others is False:
                return rf"\{{{_GAP}\}}"
            return _object_of(self.any(others, f"{where} at 'additionalProperties'", inside))
        texts = _bounded(
            (self._property(name, value, where, inside) for name, value in properties.items()),
            where,
        )
        needed = set(required)
        parts = [(text, name in needed) for text, name in zip(texts, properties, strict=True)]
        ways = next((i for i, (_, is_required) in enumerate(parts) if is_required), len(parts))
        _check_length((ways + 1) * sum(map(len, texts)), where)
        return rf"\{{{_GAP}{_in_order(parts)}{_GAP}\}}"

    def _property(self, name: str, schema: Any, where: str, inside: tuple[str, ...]) -> str:
        value = self.any(schema, f"{where} at '{name}'", inside)
        return f"{escape(json.dumps(name, ensure_ascii=False))}{_GAP}:{_GAP}{value}"

    def _several(self, schema: Any, where: str, inside: tuple[str, ...]) -> str:
        name = "anyOf" if "anyOf" in schema else "allOf"
        parts = schema[name]
        if not isinstance(parts, list) or not parts or (name == "allOf" and len(parts) > 1):
            rule = "a list of one or more schemas" if name == "anyOf" else "one schema"
            raise _refusal(f"{where} at '{name}'", rule, parts)
        place = f"{where} at '{name}'"
        return any_of(_bounded((self.any(part, place, inside) for part in parts), place))

    def _one(self, schemas: Any, where: str, inside: tuple[str, ...]) -> str:
        """Return the expression of schemas of which a value fits one, as their objects tell."""
        listed = schemas if isinstance(schemas, list) else []
        references = [x.get("$ref") if isinstance(x, Mapping) else None for x in listed]
        parts = [
            x if r is None else self._referred_to(r, where)
            for x, r in zip(listed, references, strict=True)
        ]
        name = _what_tells(parts)
        if name is None:
            raise _refusal(
                where,
                "objects with one property of which each has other values, by `const` or `enum`",
                schemas,
            )
        told = [{**part, "required": [*part.get("required", []), name]} for part in parts]
        led = [inside if r is None else self._led_to(r, where, inside) for r in references]
        return any_of(
            _bounded((self.any(x, where, way) for x, way in zip(told, led, strict=True)), where)
        )

    def _led_to(self, reference: Any, where: str, inside: tuple[str, ...]) -> tuple[str, ...]:
        """Return the references that led to a part, if it is not a part of itself."""
        if reference in inside:
            raise _refusal(
                where, "a schema that is not part of itself, since JSON ends", {"$ref": reference}
            )
        return (*inside, reference)

    def _reference(self, reference: Any, where: str, inside: tuple[str, ...]) -> str:
        inside = self._led_to(reference, where, inside)
        found = self._referred_to(reference, where)
        if reference not in self._referred:
            place = f"schema at '{reference}'"
            self._referred[reference] = self.any(found, place, inside)
        return self._referred[reference]

    def _referred_to(self, reference: Any, where: str) -> Any:
        parts = str(reference).split("/")
        found = self._whole
        for part in parts[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = {str(i): item for i, item in enumerate(found)}
            found = found.get(key) if isinstance(found, Mapping) else None
        if parts[0] != "#" or found is None:
            raise _refusal(where, "a reference to a part of the schema", {"$ref": reference})
        return found


def _what_tells(parts: list[Any]) -> str | None:
    """Return a property by whose values objects of some schemas are told apart, if there is one."""
    if not parts or not all(_has_properties(part) for part in parts):
        return None
    for name in parts[0]["properties"]:
        values: list[Any] = []
        for part in parts:
            said = part["properties"].get(name)
            own = said if isinstance(said, Mapping) else {}
            listed = [own["const"]] if "const" in own else own.get("enum")
            values += listed if isinstance(listed, list) else [None]
        if all(isinstance(x, str) for x in values) and len(set(values)) == len(values):
            return str(name)
    return None


def _has_properties(schema: Any) -> bool:
    """Tell whether a schema is one of objects, and says which properties they have."""
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        return False
    is_list = isinstance(schema.get("required", []), list)
    return is_list and isinstance(schema.get("properties"), Mapping)


def _bounded(parts: Iterable[str], where: str) -> list[str]:
    """Return expressions that are not too long together."""
    found: list[str] = []
    length = 0
    for part in parts:
        found.append(part)
        length += len(part)
        _check_length(length, where)
    return found


def _check_length(length: int, where: str) -> None:
    if length > _LONGEST:
        raise SurgeryError(
            f"ResponseFormat.json_schema, {where}: expected what takes at most {_LONGEST} "
            "characters as a regular expression. Received more. Ask for less at once."
        )


def _types(schema: Any, where: str) -> list[str]:
    """Return the types that a schema names; all of them if it names none."""
    kinds = schema.get("type", list(_TYPES))
    names = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(names, list) or not names or not set(map(str, names)) <= set(_TYPES):
        raise _refusal(f"{where} at 'type'", f"one or more of {', '.join(_TYPES)}", kinds)
    return list(dict.fromkeys(names))


def _check_alone(others: Iterable[str], where: str) -> None:
    """Refuse keywords that cannot be kept."""
    names = sorted(map(str, others))
    if names:
        raise SurgeryError(
            f"ResponseFormat.json_schema, {where}: expected keywords that can be kept. Received "
            f"{', '.join(map(repr, names))}. Leave these out and check the answers, or write a "
            "regular expression."
        )


def _refusal(where: str, rule: str, received: Any) -> SurgeryError:
    return SurgeryError(
        f"ResponseFormat.json_schema, {where}: expected {rule}. Received {shown(received)}. Write "
        "the schema in another way."
    )


def _bounds(schema: Any, first: str, last: str, where: str) -> tuple[int, int | None]:
    least, most = schema.get(first, 0), schema.get(last)
    numbers = [least, most] if last in schema else [least]
    if not all(is_int(n) and n >= 0 for n in numbers) or numbers != sorted(numbers):
        received = {name: schema[name] for name in (first, last) if name in schema}
        raise _refusal(where, "whole numbers, the least one first", received)
    return least, most


def _integers(schema: Any, where: str) -> str:
    """Return the expression of the whole numbers within the bounds of a schema."""
    said = {name: schema[name] for name in sorted(_OF_TYPES["integer"]) if name in schema}
    least, most = -LARGEST, LARGEST
    for name, bound in said.items():
        if not is_int(bound) and not (isinstance(bound, float) and math.isfinite(bound)):
            raise _refusal(f"{where} at '{name}'", "a finite number", bound)
        if name == "minimum":
            least = max(least, math.ceil(bound))
        elif name == "exclusiveMinimum":
            least = max(least, math.floor(bound) + 1)
        elif name == "maximum":
            most = min(most, math.floor(bound))
        else:
            most = min(most, math.ceil(bound) - 1)
    if least > most:
        raise _refusal(where, f"bounds that a number of {DIGITS} digits lies between", said)
    return whole_numbers(least, most)


def _times(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def _constants(schema: Any, names: list[str], where: str) -> str:
    """Return the expression of the values that `const` or `enum` list and `type` allows."""
    values = [schema["const"]] if "const" in schema else schema["enum"]
    types: Any = tuple(t for name in names for t in _TYPES[name])
    fits = [
        value
        for value in (values if isinstance(values, list) else [])
        if isinstance(value, types) and (not isinstance(value, bool) or bool in types)
    ]
    if not fits:
        raise _refusal(where, "one or more values of its type", values)
    try:
        texts = [json.dumps(value, ensure_ascii=False, allow_nan=False) for value in fits]
    except (TypeError, ValueError) as error:
        raise _refusal(where, "values that JSON has", values) from error
    return any_of(map(escape, texts))


def _in_order(parts: list[tuple[str, bool]]) -> str:
    """Return the expression of some parts in order, of which those not required may be missing."""
    comma = f"{_GAP},{_GAP}"
    ways = []
    for i, (first, is_required) in enumerate(parts):
        rest = (
            f"{comma}{part}" if needed else f"({comma}{part})?" for part, needed in parts[i + 1 :]
        )
        ways.append(first + "".join(rest))
        if is_required:
            return any_of(ways)
    return f"{any_of(ways)}?"


def _list_of(item: str, opening: str, closing: str, least: int, most: int | None) -> str:
    """Return the expression of some items between brackets, with commas between them."""
    if most == 0:
        return rf"\{opening}{_GAP}\{closing}"
    more = _times(max(least - 1, 0), None if most is None else most - 1)
    items = f"({item}({_GAP},{_GAP}{item}){more})"
    return rf"\{opening}{_GAP}{items}{'' if least else '?'}{_GAP}\{closing}"


def _object_of(value: str) -> str:
    """Return the expression of objects with any names."""
    return _list_of(f"{_SCALARS['string']}{_GAP}:{_GAP}{value}", "{", "}", 0, None)


def _value(depth: int) -> str:
    """Return the expression of any value, with so many arrays and objects in one another."""
    scalars = [_SCALARS[name] for name in ("null", "boolean", "number", "string")]
    if not depth:
        return any_of(scalars)
    inner = _value(depth - 1)
    return any_of([*scalars, _list_of(inner, "[", "]", 0, None), _object_of(inner)])
