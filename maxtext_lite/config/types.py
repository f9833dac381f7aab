"""The types of the keys' values. Each refuses a wrong value with its rule, without the key's name."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from fractions import Fraction
from typing import Annotated, Any, Literal, TypeVar, cast, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from maxtext_lite.config.bucket import bucket_scheme
from maxtext_lite.config.errors import Refusal, WrongType, did_you_mean, number_text, value_text
from maxtext_lite.config.registry import installed_names, names

_LARGEST_EXACT = 10**12
MOST_STAGES = 1_000  # of a batch schedule, each a stage of the plan
_LARGEST_COUNT = 2**31 - 1  # the range of jax's and optax's counters
_RATIO = re.compile(r"([+-]?[0-9]+)/([0-9]+)\Z")

_RUN_SCHEMES = ("gs",)  # of buckets where run directories can be
_URL = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*):(/.*)", re.DOTALL)
_LOGIN = re.compile(r"\w+://[^/]*:[^/]*@")


def _text(*, empty_allowed: bool, also: str = "") -> Callable[[object], object]:
    def check(value: object) -> object:
        if not isinstance(value, str):
            raise WrongType("is not text.")
        if not empty_allowed and not value.strip():
            raise WrongType("must not be empty.")
        if not value.translate(dict.fromkeys(map(ord, also))).isprintable():
            raise WrongType("has a character that cannot be printed.")
        return value

    return check


def _path(*, empty_allowed: bool, schemes: Sequence[str] = ()) -> Callable[[object], object]:
    """A path of a local file, of several by wildcards, or in a bucket of these schemes.

    gs:/bucket, to which pathlib changes gs://bucket, is refused; a local directory with this name is ./gs:/bucket.
    """
    check_text = _text(empty_allowed=empty_allowed)

    def check(value: object) -> object:
        text = str(check_text(value))
        found = _URL.match(text)
        if found and not (bucket_scheme(text) in schemes and found[2][2:].strip("/")):
            known = "".join(f" and {scheme}://" for scheme in schemes)
            nearest = [found[2].removeprefix("//")] if found[1].lower() == "file" else []
            raise WrongType(f"is a URL ({found[1]}:), and only local paths{known} are read and written.", nearest)
        if _LOGIN.match(text):
            raise WrongType("has a name or password, which belong in the environment.")
        return value

    return check


def path_problem(text: str, *, of_run: bool = False) -> str | None:
    """Why a text is not a path, or with `of_run` not a run directory's; None if it is one."""
    try:
        _path(empty_allowed=True, schemes=_RUN_SCHEMES if of_run else ())(text)
    except WrongType as wrong:
        return str(wrong)
    return None


def _flag(value: object) -> object:
    if not isinstance(value, bool):
        raise WrongType("is not true or false.", (True, False))
    return value


def _auto_or_flag(value: object) -> object:
    if isinstance(value, bool) or value == "auto":
        return value
    raise WrongType("is not auto, true or false.", ("auto", True, False))


def _packing(value: object) -> object:
    if isinstance(value, bool) or value == "best_fit":
        return value
    if value in ("concat", "none"):
        return value == "concat"
    raise WrongType("is not concat (true), none (false) or best_fit.", (True, False))


def _or(special: int) -> WrapValidator:
    """Accepts a number that has a meaning of its own beside those that the type allows."""

    def check(value: object, of_type: ValidatorFunctionWrapHandler) -> object:
        return value if type(value) is int and value == special else of_type(value)

    return WrapValidator(check)


def exact(value: object) -> Fraction:
    """The rational number that `value` spells: 0.29 is 29/100, and the text "1/3" is a third.

    Raises:
      WrongType: not a finite number; the message lacks the key's name.
    """
    if isinstance(value, str):
        ratio = _RATIO.match(value)
        if ratio is None:
            raise WrongType(f"is text, not a number{_by_quotes(value)}.")
        try:
            return Fraction(int(ratio[1]), int(ratio[2]))
        except ZeroDivisionError:
            raise WrongType("is divided by 0.") from None
        except ValueError:
            raise WrongType("has more digits than Python reads.") from None
    if isinstance(value, bool) or not isinstance(value, int | float | Fraction):
        raise WrongType("is not a number.")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise WrongType("is not a finite number.")
        return Fraction(repr(value))  # the shortest decimal that reads as this float, which is what the user wrote
    return Fraction(value)


def _by_quotes(text: str) -> str:
    try:
        float(text)
    except ValueError:
        return ""
    return ": the quotes make it text"


_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kMB])\Z")
_THOUSANDS = {"k": 10**3, "M": 10**6, "B": 10**9}


_NO_GROUPS: list[dict[str, Any]] = [{"learning_rate_groups": {}}]


class _Groups(dict[str, float]):
    """A mapping that nobody changes, with a hash."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


def _rate_groups(value: object) -> _Groups:
    if not isinstance(value, dict):
        raise WrongType("is not a mapping, as {embedding: 0.1}.", _NO_GROUPS)
    groups = _Groups()
    for name, number in cast("dict[object, object]", value).items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < math.inf:
            raise WrongType(
                f"has {value_text(number)} for {value_text(name, 40)}, not a number of at least 0.", _NO_GROUPS
            )
        groups[str(name)] = float(number)
    return groups


def _amount(value: object) -> int:
    """The whole number that is stated, perhaps in thousands, millions or billions: 15.1k is 15,100."""
    found = _AMOUNT.match(value) if isinstance(value, str) else None
    number = exact(value) if found is None else Fraction(found[1]) * _THOUSANDS[found[2]]
    if number.denominator != 1:
        raise WrongType("is not a whole number.", _integers_near(number, 0, _LARGEST_EXACT))
    return int(number)


def _batch_schedule(value: object) -> object:
    """Stages of [threshold, examples] as a tuple; thresholds rise from 0."""
    if not isinstance(value, list | tuple):
        raise WrongType("is not a list of stages [threshold, examples], as [[0, 64], [15100, 128]].", [[[0, 64]]])
    stages: list[tuple[int, int]] = []
    for entry in cast("list[object]", value):
        pair = cast("Sequence[object]", entry)
        if not isinstance(entry, list | tuple) or len(pair) != 2:
            raise WrongType(f"has {value_text(pair, 40)}, which is not a stage [threshold, examples].", [[[0, 64]]])
        try:
            threshold, examples = map(_amount, pair)
        except WrongType as wrong:
            raise WrongType(f"has a stage {value_text(pair, 40)} with a number that {wrong}", [[[0, 64]]]) from None
        if not 1 <= examples <= _LARGEST_COUNT:
            raise WrongType(f"has a stage of {examples} examples: 1 to {_LARGEST_COUNT} are legal.", [[[0, 1]]])
        stages.append((threshold, examples))
    if not stages:
        return ()
    (_, first), *others = sorted(dict(stages).items())
    rising = [(0, first), *others]
    if stages[0][0] != 0:
        raise WrongType(f"begins at {stages[0][0]}: the first threshold is 0.", [list(map(list, rising))])
    if rising != stages:
        raise WrongType("has thresholds that do not rise.", [list(map(list, rising))])
    if len(stages) > MOST_STAGES:
        raise WrongType(f"has {len(stages):,} stages; a run has at most {MOST_STAGES:,}.")
    return tuple(stages)


def _positive(special: int | None = None, meaning: str = "") -> BeforeValidator:
    """An exact rational above 0, or `special`, which means something else."""
    rule = "must be above 0" + ("" if special is None else f", or {special} ({meaning})")

    def check(value: object) -> object:
        number = exact(value)
        if number <= 0 and number != special:
            raise WrongType(f"{rule}.", [Fraction(1)])
        if number > _LARGEST_EXACT:
            raise WrongType(f"must be at most {_LARGEST_EXACT}.", [_LARGEST_EXACT])
        return number

    return BeforeValidator(check)


def _steps(least: int, whole: str, special: int | None = None) -> BeforeValidator:
    """An integer of at least `least`, a number between 0 and 1, which is that part of `whole`, or `special`."""
    or_special = "" if special is None else f", {special}"
    rule = f"must be an integer of at least {least}{or_special}, or a number between 0 and 1: that part of {whole}"

    def check(stated: object) -> object:
        number = exact(stated)
        if 0 < number < 1 or (isinstance(stated, int) and (least <= number <= _LARGEST_COUNT or number == special)):
            return number if number.denominator > 1 else int(number)
        raise WrongType(f"{rule}.", _integers_near(number, least, _LARGEST_COUNT))

    return BeforeValidator(check)


def _integers_near(number: float | Fraction, least: int, most: int) -> list[int]:
    """The integers below and above a number, between `least` and `most`."""
    below = min(max(math.floor(number), least), most)
    above = min(max(math.ceil(number), least), most)
    return [below] if below == above else [below, above]


def _serialized(value: int | Fraction) -> int | float | str:
    """The number in a form that reads back exactly: 16, 0.29, or text such as "1/3" if no float is exact."""
    number = int(value) if value.denominator == 1 else float(value)
    return number if exact(number) == value else number_text(value)


_exactly = PlainSerializer(_serialized)

_DATA_SCHEMES = ("gs", "s3")
data_path_text = _path(empty_allowed=True, schemes=_DATA_SCHEMES)
"""Returns a path of data unchanged, "" included; raises WrongType for anything else."""


def stated_text(value: object) -> str:
    """Returns printable text unchanged, "" included; raises WrongType for anything else."""
    return str(_text(empty_allowed=True)(value))


Text = Annotated[str, BeforeValidator(stated_text)]
"""Any printable text, "" included."""
Name = Annotated[str, BeforeValidator(_text(empty_allowed=False))]
"""Printable text that is not empty."""
Lines = Annotated[str, BeforeValidator(_text(empty_allowed=False, also="\n\t"))]
"""Text that is not empty: printable characters, line breaks and tabs."""
PathText = Annotated[str, BeforeValidator(_path(empty_allowed=True))]
"""A path, each part of at most 255 bytes; "" included."""
DataPath = Annotated[str, BeforeValidator(data_path_text)]
"""A path, local or in a bucket, or ""."""
DataPathName = Annotated[str, BeforeValidator(_path(empty_allowed=False, schemes=_DATA_SCHEMES))]
"""A path that is not empty, local or in a bucket."""
RunsPath = Annotated[str, BeforeValidator(_path(empty_allowed=False, schemes=_RUN_SCHEMES))]
"""A path that is not empty, for run directories: local or gs://."""
ParametersPath = Annotated[str, BeforeValidator(_path(empty_allowed=True, schemes=_RUN_SCHEMES))]
"""A path, local or gs://, or ""."""
PathName = Annotated[str, BeforeValidator(_path(empty_allowed=False))]
"""A path that is not empty."""
Flag = Annotated[bool, BeforeValidator(_flag)]
"""true or false; 0, 1, yes and no are not."""


def _no_choice(value: str, choices: Sequence[str]) -> WrongType:
    """The refusal of a value as a user reads it."""
    near = max(choices, key=lambda choice: SequenceMatcher(None, value.lower(), choice).ratio())
    return WrongType(f"is not one of {', '.join(choices)}.", (near,))


def _registered(kind: str, *also: str) -> BeforeValidator:
    """A name of a kind of the registry, or one of `also`."""

    def check(value: object) -> object:
        if value in also or value in names(kind):
            return value
        raise _no_choice(value_text(value), [*also, *installed_names(kind)])

    return BeforeValidator(check)


SourceName = Annotated[str, _registered("source")]
"""A source of examples, ours or another package's."""
ObjectiveName = Annotated[str, _registered("objective", "auto")]
"""An objective, ours or another package's, or auto."""
KernelName = Annotated[str, _registered("attention", "auto")]
"""An attention kernel, ours or another package's, or auto."""
AutoOrFlag = Annotated[bool | Literal["auto"], BeforeValidator(_auto_or_flag)]
"""True, False, or auto."""
SpecialInText = Literal["plain", "encode", "refuse"]
"""What special tokens that a text spells become."""
Packing = Annotated[bool | str, BeforeValidator(_packing)]
"""True (or concat), False (or none), or best_fit."""
Count = Annotated[int, Field(ge=1, le=_LARGEST_COUNT)]
"""An integer from 1 to 2**31 - 1, the maximum of all counts."""
AtLeastTwo = Annotated[int, Field(ge=2, le=_LARGEST_COUNT)]
"""An integer of at least 2."""
Layers = Annotated[int, Field(ge=1, le=10_000)]
"""A number of layers; the plan lists them."""
LayersOrZero = Annotated[int, Field(ge=0, le=10_000)]
"""A number of layers, or 0."""
CountOrZero = Annotated[int, Field(ge=0, le=_LARGEST_COUNT)]
"""An integer of at least 0."""
AmountOrZero = Annotated[int, BeforeValidator(_amount), Field(ge=0, le=_LARGEST_EXACT)]
"""An integer of at least 0, which may be stated in k, M or B."""
RateGroups = Annotated[Mapping[str, float], PlainValidator(_rate_groups)]
"""Numbers of at least 0 by group of parameters."""
BatchSchedule = Annotated[tuple[tuple[int, int], ...], BeforeValidator(_batch_schedule)]
"""Stages of (threshold, examples) with rising thresholds; empty: none."""
Port = Annotated[int, Field(ge=0, le=65535)]
"""A TCP port, or 0: none."""
HangTimeout = Annotated[int, Field(ge=5, le=86400), _or(0)]
"""From 5 seconds (processes exchange their progress every second) to a day; 0: off."""
CountOrMinusOne = Annotated[int, Field(ge=1, le=_LARGEST_COUNT), _or(-1)]
"""An integer of at least 1, or -1: derived or off."""
StepsOrPartOfRun = Annotated[int | Fraction, _steps(0, "the run"), _exactly]
"""An integer of at least 0, or a number between 0 and 1: that part of the run's steps."""
StepsOrPartOfEpoch = Annotated[int | Fraction, _steps(1, "an epoch"), _exactly]
"""An integer of at least 1, or a number between 0 and 1: that part of an epoch's steps."""
StepsOrPartOfEpochOrMinusOne = Annotated[int | Fraction, _steps(1, "an epoch", -1), _exactly]
"""The same, or -1: off."""
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""An integer of at least 0 and below 2**63."""
DrawSeed = Annotated[int, Field(ge=0, le=2**32 - 1)]
"""A seed of 32 bits."""
SeedOrMinusOne = Annotated[int, Field(ge=-1, le=2**63 - 1)]
"""A seed, or -1: none."""
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A number above 0."""
AtLeastOne = Annotated[float, Field(ge=1, allow_inf_nan=False)]
"""A number of at least 1."""
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A number of at least 0."""
Temperature = NotNegative
"""A divisor of logits, or 0."""
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False, examples=[30])]
"""A time above 0."""
Share = Annotated[float, Field(ge=0, le=1)]
"""A number in [0, 1]."""
ShareBelowOne = Annotated[float, Field(ge=0, lt=1, examples=[0.5])]
"""A number in [0, 1)."""
PositiveShare = Annotated[float, Field(gt=0, le=1, examples=[1])]
"""A number in (0, 1]."""
Decay = Annotated[float, Field(ge=0, lt=1, examples=[0.9])]
"""A number in [0, 1): the decay of a running mean."""
WhichParameters = Literal["trained", "ema"]
"""The parameters of a run that are evaluated or exported: the trained ones, or their moving average."""
BelowHalf = Annotated[float, Field(ge=0, lt=0.5, examples=[0.49])]
"""A number in [0, 0.5)."""
Exact = Annotated[Fraction, _positive(), _exactly]
"""An exact rational above 0."""
ExactOrDerived = Annotated[Fraction, _positive(-1, "derived"), _exactly]
"""An exact rational above 0, or -1: derived."""
ExactOrSame = Annotated[Fraction, _positive(0, "the same as in training"), _exactly]
"""An exact rational above 0, or 0: as in training."""
ExactOrZero = Annotated[Fraction, _positive(0, "not stated"), _exactly]
"""An exact rational above 0, or 0: not stated."""
ExactOrOne = Annotated[Fraction, _positive(-1, "which means 1"), _exactly]
"""An exact rational above 0, or -1, which means 1."""
ExactOrUnlimited = Annotated[Fraction, _positive(-1, "no limit"), _exactly]
"""An exact rational above 0, or -1: no limit."""


class Section(BaseModel):
    """Some of the keys, immutable; functions take the section that they need."""

    # Schemas are built on first use, because only Config is ever used and `plan` should answer at once.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=(), defer_build=True)


Made = TypeVar("Made")


def make(kind: type[Made], values: Mapping[str, object]) -> Made:
    """The pydantic object that a mapping describes: a key's value or an entry of it.

    Raises:
      WrongType: an entry is unknown, missing or of the wrong type.
    """
    known = kind.__annotations__
    for name in values:
        if name not in known:
            raise WrongType(f"has {value_text(name, 40)}, which it does not take.{did_you_mean(str(name), known)}")
    try:
        return kind(**values)
    except ValidationError as error:
        detail = error.errors()[0]
    rule = _rule(detail)
    if not detail["loc"]:
        raise WrongType(f"{rule}.")
    name = detail["loc"][0]
    if detail["type"] == "missing":
        raise WrongType(f"lacks {name}.")
    raise WrongType(f"has {name}={value_text(detail['input'])}, which {rule}.")


def _rule(detail: ErrorDetails) -> str:
    """The words that follow `key=value`, without the full stop."""
    stated = detail["input"]
    if isinstance(stated, str) and detail["type"] in ("int_type", "float_type"):
        return f"is text, not a number{_by_quotes(stated)}"
    return detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be").removesuffix(".")


def wrong_value(kind: type[BaseModel], detail: ErrorDetails, name: str = "") -> Refusal:
    """The refusal of a value that is not of its key's type, by pydantic's error.

    Args:
      kind: has the key.
      name: of the key for the user; "": that in `kind`.
    """
    key = name or ".".join(map(str, detail["loc"]))
    value = value_text(detail["input"])
    field = kind.model_fields[str(detail["loc"][0])]
    wrong = detail.get("ctx", {}).get("error")
    if detail["type"] == "literal_error":
        wrong = _no_choice(value, [str(choice) for choice in get_args(field.annotation) if choice])
    if isinstance(wrong, WrongType):
        return Refusal(key, f"{key}={value} {wrong}", wrong.nearest)
    return Refusal(key, f"{key}={value} {_rule(detail)}.", _nearest(detail, field))


def _nearest(detail: ErrorDetails, field: FieldInfo) -> tuple[object, ...]:
    """The legal numbers next to a wrong one, by pydantic's error."""
    stated = detail["input"]
    bound = detail.get("ctx", {})
    if detail["type"] == "int_type" and isinstance(stated, float) and math.isfinite(stated):
        least = next((each.ge for each in field.metadata if hasattr(each, "ge")), 0)
        most = next((each.le for each in field.metadata if hasattr(each, "le")), _LARGEST_COUNT)
        return tuple(_integers_near(stated, least, most))
    if "ge" in bound:
        return (bound["ge"],)
    if "le" in bound:
        return (bound["le"],)
    return tuple(field.examples or ())
