"""JSON Schema as a regular expression: of the JSON that fits a schema, and of nothing else.

What a regular expression cannot say is refused, so that no text comes that does not fit.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import unquote

from backbone_surgery.errors import SurgeryError
from backbone_surgery.generation.formats import json_numbers, json_strings
from backbone_surgery.generation.formats.pieces import any_of, escape, times
from backbone_surgery.generation.formats.schema_errors import (
    bounds,
    check_alone,
    check_length,
    refusal,
)

DEEPEST = 3
"""How many arrays and objects lie in one another, where a schema leaves open what a value is; and
how often a part of a schema lies in itself."""

_MOST_PARTS = 2**16

_GAP = "[ ]?"
_SCALARS = {"null": "null", "boolean": "(true|false)"}
_ANY_SCALAR = [*_SCALARS.values(), json_numbers.ANY, json_strings.ANY]
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
    "string": json_strings.KEYWORDS,
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
    "integer": json_numbers.KEYWORDS,
    "number": json_numbers.KEYWORDS,
}


def regex_of_schema(schema: Any) -> str:
    """Return the regular expression of the JSON that fits a schema.

    Args:
        schema: a JSON Schema, a dict.

    Raises:
        SurgeryError: it says what cannot be said here, or is no schema.
    """
    try:
        return _Translation(schema).any(schema, "schema", ("#",))
    except RecursionError as error:
        raise refusal("schema", "fewer levels", schema) from error


def regex_of_objects() -> str:
    """Return the regular expression of JSON objects, of `DEEPEST` levels at most."""
    return _object_of(_value(DEEPEST - 1))


class _TooDeepError(SurgeryError):
    """A part of a schema lies in itself too often."""


class _Translation:
    """Turns the parts of one schema into regular expressions.

    Where it need not have a part that lies in itself too often, it has none: so texts end.

    Args:
        whole: the schema, which references point into.
    """

    def __init__(self, whole: Any) -> None:
        self._whole = whole
        self._referred: dict[str, str] = {}
        self._repeated: set[str] = set()
        self._count = 0

    def any(self, schema: Any, where: str, inside: tuple[str, ...]) -> str:
        """Return the expression of a schema; `inside` are the references that led to it."""
        if inside.count(inside[-1]) > 1:
            self._repeated.add(inside[-1])
        if inside.count(inside[-1]) > DEEPEST:
            rule = "a schema whose texts can end, though it is part of itself"
            raise _TooDeepError(str(refusal(where, rule, {"$ref": inside[-1]})))
        self._count += 1
        if self._count > _MOST_PARTS:
            rule = f"at most {_MOST_PARTS} parts, with those of each reference where it stands"
            raise refusal("schema", rule, self._whole)
        regex = self._any(schema, where, inside)
        check_length(len(regex), where)
        return regex

    def _any(self, schema: Any, where: str, inside: tuple[str, ...]) -> str:
        if schema is True:
            return _value(DEEPEST)
        if not isinstance(schema, Mapping):
            raise refusal(where, "a JSON Schema, a dict", schema)
        said = {name for name in schema if name not in _NOTES}
        if schema is not self._whole:  # else references inside would mean something else
            check_alone({"$id"} & set(schema), where)
        names = _types(schema, where)
        for name in ("$ref", "anyOf", "allOf", "oneOf", "const", "enum"):
            if name in said:
                typed = {"type"} if name in ("const", "enum") else set()
                check_alone(said - {name} - typed, where)
        if "$ref" in said:
            return self._reference(schema["$ref"], where, inside)
        if "oneOf" in said:
            return self._one(schema["oneOf"], f"{where} at 'oneOf'", inside)
        if "anyOf" in said or "allOf" in said:
            return self._several(schema, where, inside)
        if "const" in said or "enum" in said:
            return _constants(schema, names, where)
        check_alone(said - {"type"}.union(*_OF_TYPES.values()), where)
        if not said:
            return _value(DEEPEST)
        if "type" not in said:
            raise refusal(f"{where} at 'type'", f"one or more of {', '.join(_TYPES)}", None)
        check_alone(said - {"type"}.union(*(_OF_TYPES.get(n, set()) for n in names)), where)
        return _choice(lambda name: self._typed(name, schema, where, inside), names, where)

    def _typed(self, name: str, schema: Any, where: str, inside: tuple[str, ...]) -> str:
        if name == "object":
            return self._object(schema, where, inside)
        if name == "array":
            least, most = bounds(schema, "minItems", "maxItems", where)
            item = self._unless(not least, schema.get("items", True), f"{where} at 'items'", inside)
            return _list_of(item, "[", "]", least, most)
        if name == "integer":
            return json_numbers.integers_of(schema, where)
        if name == "number":
            return json_numbers.numbers_of(schema, where)
        return json_strings.string_of(schema, where) if name == "string" else _SCALARS[name]

    def _object(self, schema: Any, where: str, inside: tuple[str, ...]) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not all(isinstance(n, str) for n in properties):
            raise refusal(f"{where} at 'properties'", "a dict of schemas", properties)
        names = set(properties)
        if not isinstance(required, list) or not all(
            isinstance(name, str) and name in names for name in required
        ):
            raise refusal(f"{where} at 'required'", "names of its properties", required)
        others = schema.get("additionalProperties", True)
        if not isinstance(others, bool | Mapping):
            raise refusal(f"{where} at 'additionalProperties'", "a schema or a boolean", others)
        if not properties:
            if others is False:
                return rf"\{{{_GAP}\}}"
            place = f"{where} at 'additionalProperties'"
            return _object_of(self._unless(True, others, place, inside))
        needed, parts, length = set(required), [], 0
        for name, value in properties.items():
            text = self._unless(name not in needed, value, f"{where} at '{name}'", inside)
            if text is not None:
                key = escape(json.dumps(name, ensure_ascii=False))
                parts.append((f"{key}{_GAP}:{_GAP}{text}", name in needed))
                length += len(parts[-1][0])
                check_length(length, where)
        ways = next((i for i, (_, is_required) in enumerate(parts) if is_required), len(parts))
        check_length((ways + 1) * length, where)
        return rf"\{{{_GAP}{_in_order(parts)}{_GAP}\}}"

    def _unless(
        self, may_miss: bool, schema: Any, where: str, inside: tuple[str, ...]
    ) -> str | None:
        """Return the expression of a schema; `None` for one that may miss and lies too deep."""
        try:
            return self.any(schema, where, inside)
        except _TooDeepError:
            if may_miss:
                return None
            raise

    def _several(self, schema: Any, where: str, inside: tuple[str, ...]) -> str:
        name = "anyOf" if "anyOf" in schema else "allOf"
        parts = schema[name]
        if not isinstance(parts, list) or not parts or (name == "allOf" and len(parts) > 1):
            rule = "a list of one or more schemas" if name == "anyOf" else "one schema"
            raise refusal(f"{where} at '{name}'", rule, parts)
        place = f"{where} at '{name}'"
        return _choice(lambda part: self.any(part, place, inside), parts, place)

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
            raise refusal(
                where,
                "objects with one property of which each has other values, by `const` or `enum`",
                schemas,
            )
        told = [{**part, "required": [*part.get("required", []), name]} for part in parts]
        led = [inside if r is None else (*inside, r) for r in references]
        pairs = zip(told, led, strict=True)
        return _choice(lambda pair: self.any(pair[0], where, pair[1]), pairs, where)

    def _reference(self, reference: Any, where: str, inside: tuple[str, ...]) -> str:
        found = self._referred_to(reference, where)
        if reference in self._referred and reference not in inside:
            return self._referred[reference]
        text = self.any(found, f"schema at '{reference}'", (*inside, reference))
        if not self._repeated & set(inside):  # else it depends on where it stands
            self._referred[reference] = text
        return text

    def _referred_to(self, reference: Any, where: str) -> Any:
        parts = str(reference).split("/")
        found = self._whole
        for part in parts[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = {str(i): item for i, item in enumerate(found)}
            found = found.get(key) if isinstance(found, Mapping) else None
        if parts[0] != "#" or found is None:
            raise refusal(where, "a reference to a part of the schema", {"$ref": reference})
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


def _choice(text_of: Callable[[Any], str], parts: Iterable[Any], where: str) -> str:
    """Return the expression of any of some parts but those that lie too deep."""
    found: list[str] = []
    length, too_deep = 0, None
    for part in parts:
        try:
            found.append(text_of(part))
        except _TooDeepError as error:
            too_deep = error
            continue
        length += len(found[-1])
        check_length(length, where)
    if too_deep is not None and not found:
        raise too_deep
    return any_of(found)


def _types(schema: Any, where: str) -> list[str]:
    """Return the types that a schema names; all of them if it names none."""
    kinds = schema.get("type", list(_TYPES))
    names = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(names, list) or not names or not set(map(str, names)) <= set(_TYPES):
        raise refusal(f"{where} at 'type'", f"one or more of {', '.join(_TYPES)}", kinds)
    return list(dict.fromkeys(names))


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
        raise refusal(where, "one or more values of its type", values)
    try:
        texts = [json.dumps(value, ensure_ascii=False, allow_nan=False) for value in fits]
    except (TypeError, ValueError) as error:
        raise refusal(where, "values that JSON has", values) from error
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


def _list_of(item: str | None, opening: str, closing: str, least: int, most: int | None) -> str:
    """Return the expression of some items between brackets, with commas between them."""
    if most == 0 or item is None:
        return rf"\{opening}{_GAP}\{closing}"
    more = times(max(least - 1, 0), None if most is None else most - 1)
    items = f"({item}({_GAP},{_GAP}{item}){more})"
    return rf"\{opening}{_GAP}{items}{'' if least else '?'}{_GAP}\{closing}"


def _object_of(value: str | None) -> str:
    """Return the expression of objects with any names; without a value, of the empty one."""
    item = None if value is None else f"{json_strings.ANY}{_GAP}:{_GAP}{value}"
    return _list_of(item, "{", "}", 0, None)


def _value(depth: int) -> str:
    """Return the expression of any value, with so many arrays and objects in one another."""
    if not depth:
        return any_of(_ANY_SCALAR)
    inner = _value(depth - 1)
    return any_of([*_ANY_SCALAR, _list_of(inner, "[", "]", 0, None), _object_of(inner)])
