"""`ResponseFormat`: what a new text has to be."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.generation.formats.json_schema import regex_of_objects, regex_of_schema
from backbone_surgery.generation.formats.pieces import any_of, escape


@dataclass(frozen=True)
class ResponseFormat:
    r"""What a new text has to be: a match of a regular expression, from its first character on.

    At each step only those tokens can be chosen with which the text can still become a match, and a
    stop token only where it is one. The text ends with the token after which nothing can follow.
    So it is a match, unless it has as many tokens as it may before, or a stop sequence ends it.

    The new text is what comes after the prompt. Most models begin it with a space, if the prompt
    ends in a word: `" (yes|no)"` then fits better than `"(yes|no)"`.

    Attributes:
        regex: in the syntax of the Rust crate `regex`, which is Python's but for lookaround and
            back references. Anchors such as `^` and `$` are not needed, as the whole text has to
            fit, and are refused; so is a character 0. Of flags there are `i`, `m` and `U`, and
            `(?s)` at the beginning.
        kind: what it was made of, for errors.

    Raises:
        SurgeryError: it is no string. What is wrong in a string is told by the call that uses it.

    Examples:
        >>> import backbone_surgery as bs
        >>> bs.ResponseFormat(r"[0-9]{1,3}(\.[0-9])?").regex
        '[0-9]{1,3}(\\.[0-9])?'
        >>> bs.ResponseFormat.choice([" yes", " no"]).regex
        '( yes| no)'
        >>> schema = {"type": "object", "properties": {"age": {"type": "integer"}}}
        >>> bs.ResponseFormat.json_schema(schema).regex
        '(\\{[ ]?("age"[ ]?:[ ]?(-?(0|[1-9][0-9]{0,14})))?[ ]?\\})'
    """

    regex: str
    kind: str = field(default="the regular expression", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.regex, str):
            raise SurgeryError(
                f"ResponseFormat: expected a regular expression, a string. Received "
                f"{shown(self.regex)}. Use `ResponseFormat.choice` or `.json_schema` for others."
            )
        try:
            self.regex.encode()
        except UnicodeEncodeError as error:
            raise SurgeryError(
                "ResponseFormat: expected characters that UTF-8 has. Received half of a surrogate "
                f"pair ({error}). Leave it out."
            ) from error

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "ResponseFormat":
        """Return the format of one of some texts.

        Args:
            texts: of at least one character each.

        Raises:
            SurgeryError: they are none.
        """
        listed = [] if isinstance(texts, str) or not isinstance(texts, Sequence) else list(texts)
        if not listed or not all(isinstance(text, str) and text for text in listed):
            raise SurgeryError(
                "ResponseFormat.choice: expected a list of texts, none of them empty. Received "
                f"{shown(texts)}. Pass `[' yes', ' no']`, say."
            )
        return cls._of("choices of", any_of(map(escape, listed)))

    @classmethod
    def json_schema(cls, schema: Any) -> "ResponseFormat":
        """Return the format of JSON that fits a schema.

        The text has at most one space where JSON may have some, and the properties of an object in
        the order of the schema, without others. A number has 15 digits at most, and as many after
        the point; one with bounds 15 in all, and no exponent. Where a schema leaves open what a
        value is, it has three levels of arrays and objects at most, and so has a part of a schema
        that refers to itself. A `pattern` is read as JavaScript and Python both read it; the text
        has those characters as escapes, such as quotation marks, that the pattern names.

        Args:
            schema: a JSON Schema as a dict or as JSON, or a class of Pydantic. Types, `properties`,
                `required`, `additionalProperties`, `items`, `minItems`, `maxItems`, `minLength`,
                `maxLength`, `pattern`, `minimum` and its kin, `enum`, `const`, `anyOf`, references,
                and the formats `date`, `time`, `date-time`, `duration`, `email`, `hostname`,
                `ipv4`, `ipv6` and `uuid` are kept; `oneOf` where a property tells its objects
                apart, which then is always written.

        Raises:
            SurgeryError: it has other keywords, such as `multipleOf` or `not`, or is no schema.
        """
        if hasattr(schema, "model_json_schema"):
            try:
                schema = schema.model_json_schema()
            except Exception as error:  # of Pydantic, which is not imported here
                raise SurgeryError(
                    "ResponseFormat.json_schema: expected a class that has a JSON Schema. Received "
                    f"{shown(schema)}: {str(error)[:200]}. Pass the schema as a dict."
                ) from error
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise SurgeryError(
                    f"ResponseFormat.json_schema: expected JSON. Received {shown(schema)}, which "
                    f"is none: {error}. Pass a schema."
                ) from error
        if not isinstance(schema, Mapping):
            raise SurgeryError(
                "ResponseFormat.json_schema: expected a JSON Schema, a dict. Received "
                f"{shown(schema)}. Pass `{{'type': 'object', 'properties': ...}}`, say."
            )
        return cls._of("a JSON Schema as", regex_of_schema(schema))

    @classmethod
    def json_object(cls) -> "ResponseFormat":
        """Return the format of a JSON object, with three levels of arrays and objects at most."""
        return cls._of("any JSON object as", regex_of_objects())

    @classmethod
    def _of(cls, kind: str, regex: str) -> "ResponseFormat":
        made = cls(regex)
        object.__setattr__(made, "kind", kind)
        return made
