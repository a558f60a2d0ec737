"""Frozen dataclasses as JSON, both ways. The fields of a class, with their types and limits, are
the one declaration; what they do not say is in a Form.

Reading is strict: no type is coerced (but an integer stands for a float), no key is unknown, none
is missing that has no default, no number is infinite. pydantic_core does it, without pydantic's
models: errors are pydantic_core.ValidationError, with the path of every fault. A ValueError of a
class is a fault at the path of its record.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic_core import PydanticCustomError, SchemaValidator, ValidationError
from pydantic_core.core_schema import (
    CoreConfig,
    CoreSchema,
    bool_schema,
    definition_reference_schema,
    definitions_schema,
    dict_schema,
    float_schema,
    int_schema,
    literal_schema,
    no_info_after_validator_function,
    nullable_schema,
    str_schema,
    tuple_schema,
    typed_dict_field,
    typed_dict_schema,
    union_schema,
    with_info_after_validator_function,
)

from meshfold.errors import ClusterSpecError
from meshfold.ir.limits import Limits

CONFIG = CoreConfig(strict=True, allow_inf_nan=False)
"""Of every record."""

_PLAIN: Mapping[Any, Callable[[], CoreSchema]] = {
    str: str_schema,
    int: int_schema,
    float: float_schema,
    bool: bool_schema,
}


@dataclasses.dataclass(frozen=True)
class Special:
    """A type that JSON holds in another way than its fields would be."""

    schema: CoreSchema
    """What is read, with a function that turns it into the value."""
    write: Callable[[Any], Any]


def text(
    read: Callable[..., Any],
    write: Callable[[Any], str],
    *,
    pattern: str | None = None,
    description: str = "",
    context: bool = False,
) -> Special:
    """A type that is one string. read: raises ValueError; with `context`, it takes the context of
    the validation behind the string."""
    metadata = {"description": description}
    line = str_schema(pattern=pattern, metadata=metadata)
    if not context:
        return Special(no_info_after_validator_function(read, line), write)
    schema = with_info_after_validator_function(lambda found, info: read(found, info.context), line)
    return Special(schema, write)


@dataclasses.dataclass(frozen=True)
class Form:
    """How JSON holds a class, where that is not its fields one by one."""

    derived: tuple[str, ...] = ()
    """Properties that are written in front, for people, and must follow from the rest if read."""
    suffix: str = ""
    """What keys have behind the names of fields and properties."""
    special: Mapping[str, Special] = dataclasses.field(default_factory=dict)
    """Fields whose type is held in another way here."""
    only: str = ""
    """The field whose value stands for the record."""
    shown: Any = None
    """A TypedDict of further keys, which `show` makes of a record."""
    hidden: tuple[str, ...] = ()
    """Fields without a key, which `hide` makes of the keys of `shown` and of other fields."""
    show: Callable[[Any], dict[str, Any]] = lambda _: {}
    hide: Callable[[dict[str, Any]], dict[str, Any]] = lambda _: {}


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of the JSON object that holds a record."""

    hint: Any
    is_required: bool
    special: Special | None = None


class Records:
    """Reads, writes and describes records of the classes below one. specials: types that are held
    in another way wherever they are; forms: of classes."""

    def __init__(self, specials: Mapping[Any, Special], forms: Mapping[type, Form]) -> None:
        self.specials, self.forms = specials, forms
        self._definitions: dict[type, CoreSchema] = {}
        self._hints: dict[type, dict[str, Any]] = {}

    def validator(self, cls: type) -> SchemaValidator:
        """Reads a record from what json.loads gives."""
        return SchemaValidator(self.core_schema(cls))

    def core_schema(self, cls: type) -> CoreSchema:
        """What the validator of a class reads."""
        schema = self._schema(cls)
        return definitions_schema(schema, list(self._definitions.values()))

    def write(self, record: Any) -> dict[str, Any]:
        """What json.dumps takes. Nothing is checked."""
        cls = type(record)
        form, hints = self.form(cls), self.hints(cls)
        document: dict[str, Any] = {
            name + form.suffix: getattr(record, name) for name in form.derived
        }
        for name in field_names(cls):
            if name not in form.hidden:
                value, special = getattr(record, name), form.special.get(name)
                written = special.write(value) if special else self._written(hints[name], value)
                document[name + form.suffix] = written
        if form.shown is not None:
            types = get_type_hints(form.shown)
            shown = form.show(record)
            document |= {name: self._written(types[name], v) for name, v in shown.items()}
        return document

    def classes(self, cls: type) -> list[type]:
        """The classes of all records below one, itself included."""
        self._schema(cls)
        return list(self._definitions)

    def form(self, cls: type) -> Form:
        """How JSON holds a class."""
        return self.forms.get(cls, _AS_IT_IS)

    def hints(self, cls: type) -> dict[str, Any]:
        """Types of fields and properties, by name."""
        if cls not in self._hints:
            found = get_type_hints(cls, include_extras=True)
            for name in self.form(cls).derived:
                found[name] = get_type_hints(getattr(cls, name).fget)["return"]
            self._hints[cls] = found
        return self._hints[cls]

    def keys(self, cls: type) -> dict[str, Key]:
        """The keys of the JSON object that holds a record of a class, in order."""
        form, hints, defaults = self.form(cls), self.hints(cls), _defaults(cls)
        keys = {name + form.suffix: Key(hints[name], True) for name in form.derived}
        for name in field_names(cls):
            if name not in form.hidden:
                key = Key(hints[name], name not in defaults, form.special.get(name))
                keys[name + form.suffix] = key
        if form.shown is not None:
            types = get_type_hints(form.shown, include_extras=True)
            needed = form.shown.__required_keys__
            keys |= {name: Key(_bare(hint), name in needed) for name, hint in types.items()}
        return keys

    def _record(self, cls: type) -> CoreSchema:
        """A reference to the schema of a class, which is made once."""
        if only := self.form(cls).only:
            return no_info_after_validator_function(cls, self._schema(self.hints(cls)[only]))
        if cls not in self._definitions:
            fields = {
                name: typed_dict_field(
                    key.special.schema if key.special else self._schema(key.hint),
                    required=key.is_required,
                )
                for name, key in self.keys(cls).items()
            }
            schema = typed_dict_schema(fields, extra_behavior="forbid", config=CONFIG)
            self._definitions[cls] = no_info_after_validator_function(
                lambda found: self._built(cls, found), schema, ref=cls.__name__
            )
        return definition_reference_schema(cls.__name__)

    def _built(self, cls: type, found: dict[str, Any]) -> Any:
        """The record whose keys are `found`, checked against its derived keys."""
        form = self.form(cls)
        names = (name for name in field_names(cls) if name not in form.hidden)
        values = {n: found[n + form.suffix] for n in names if n + form.suffix in found}
        record = cls(**values, **form.hide(found))
        for name in form.derived:
            check_derived((name + form.suffix,), found[name + form.suffix], getattr(record, name))
        return record

    def _schema(self, hint: Any) -> CoreSchema:
        if hint in self.specials:
            return self.specials[hint].schema
        if hint in _PLAIN:
            return _PLAIN[hint]()
        args = get_args(hint)
        match get_origin(hint):
            case None if is_record(hint):
                return self._record(hint)
            case origin if origin is Annotated:
                limits = next(m for m in args[1:] if isinstance(m, Limits))
                bounds = {"ge": limits.least, "le": limits.most}
                plain: Any = self._schema(args[0])
                return {**plain, **{k: v for k, v in bounds.items() if v is not None}}
            case origin if origin is Literal:
                return literal_schema(list(args))
            case origin if origin is Union or origin is UnionType:
                rest = [self._schema(arg) for arg in args if arg is not NoneType]
                one = rest[0] if len(rest) == 1 else union_schema(list(rest))
                return nullable_schema(one) if NoneType in args else one
            case origin if origin is tuple:
                items = [self._schema(arg) for arg in args if arg is not ...]
                index = 0 if args[-1] is ... else None
                return tuple_schema(items, variadic_item_index=index, strict=False)
            case type() as origin if issubclass(origin, Mapping):
                return dict_schema(*map(self._schema, args))
        raise TypeError(f"no JSON is known for {hint}")

    def _written(self, hint: Any, value: Any) -> Any:
        if hint in self.specials:
            return self.specials[hint].write(value)
        if value is None or hint in _PLAIN:
            return value
        if is_record(hint):
            if only := self.form(hint).only:
                return self._written(self.hints(hint)[only], getattr(value, only))
            return self.write(value if dataclasses.is_dataclass(hint) else hint(*value))
        args = get_args(hint)
        match get_origin(hint):
            case origin if origin is Union or origin is UnionType:
                (first, *others) = [arg for arg in args if arg is not NoneType]
                return value if others else self._written(first, value)
            case origin if origin is tuple:
                types = repeat(args[0]) if args[-1] is ... else args
                return [self._written(of, item) for of, item in zip(types, value, strict=False)]
            case type() as origin if issubclass(origin, Mapping):
                return {key: self._written(args[1], item) for key, item in value.items()}
        return value


_AS_IT_IS = Form()


def is_record(hint: Any) -> bool:
    """Whether JSON holds a type as an object with a key for each field: dataclasses, and named
    tuples."""
    return dataclasses.is_dataclass(hint) or hasattr(hint, "_fields")


def field_names(cls: Any) -> list[str]:
    """The fields that a record is made of."""
    if dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls) if field.init]
    return list(cls._fields)


def check_derived(path: tuple[str | int, ...], found: object, right: object) -> None:
    """Refuses a figure that contradicts those it follows from."""
    if found != right:
        what = f"the file says {found!r}, the rest gives {right!r}; edit both or plan again"
        raise fault(path, what, found)


def fault(path: tuple[str | int, ...], what: str, found: object) -> ValidationError:
    """What a validator raises, for a fault that is found outside of it."""
    error = PydanticCustomError("contradiction", "{what}", {"what": what})
    return ValidationError.from_exception_data(
        "record", [{"type": error, "loc": path, "input": found}]
    )


def _defaults(cls: Any) -> set[str]:
    """Names of fields that may be left out."""
    if not dataclasses.is_dataclass(cls):
        return set(cls._field_defaults)
    missing = dataclasses.MISSING
    return {
        field.name
        for field in dataclasses.fields(cls)
        if field.default is not missing or field.default_factory is not missing
    }


def _bare(hint: Any) -> Any:
    """The type inside NotRequired."""
    return get_args(hint)[0] if get_origin(hint) is NotRequired else hint


def first_fault(error: ValidationError) -> str:
    """The first fault of a validation in one line: path, what was expected, what was found."""
    first, *others = error.errors(include_url=False)
    path, what = _json_path(first["loc"]), first["msg"]
    more = f" (and {len(others)} more)" if others else ""
    if first["type"] == "contradiction":
        return f"{path}: {what}{more}"
    if first["type"] == "value_error":
        cause = first["ctx"]["error"]
        is_path = isinstance(cause, ClusterSpecError)  # its message starts with one
        return f"{path}.{cause}".removeprefix("top level.") if is_path else f"{path}: {cause}{more}"
    known = {"missing": "missing field", "extra_forbidden": "unknown field"}
    if first["type"] in known:
        return f"{path}: {known[first['type']]}{more}"
    text = json.dumps(first["input"], default=str)
    found = text if len(text) <= 40 else text[:37] + "..."
    return f"{path}: {what[:1].lower()}{what[1:]}, found {found}{more}"


def _json_path(location: Sequence[str | int]) -> str:
    path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in location)
    return path.removeprefix(".") or "top level"
