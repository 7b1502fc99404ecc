"""Units of measurement after a number: recognition, scale words, and comparison."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

_SPELLINGS = """
mm millimeter millimeters millimetre millimetres | cm centimeter centimeters centimetre centimetres
dm decimeter decimeters decimetre decimetres | m meter meters metre metres
km kilometer kilometers kilometre kilometres | in inch inches | ft foot feet | yd yds yard yards | mi mile miles
mg milligram milligrams | g gm gram grams | kg kilogram kilograms | lb lbs pound pounds GBP quid | oz ounce ounces
ton tons tonne tonnes | ml mL milliliter milliliters millilitre millilitres | L l liter liters litre litres
gal gallon gallons | qt quart quarts | pt pint pints | acre acres | ha hectare hectares | cc
ms millisecond milliseconds | s sec secs second seconds | min mins minute minutes | h hr hrs hour hours
day days | wk week weeks | mo month months | yr yrs year years
dollar dollars USD usd buck bucks | cent cents | euro euros EUR eur | yen JPY | Rs rupee rupees INR
degree degrees deg | rad radian radians | N newton newtons | J joule joules | W watt watts | V volt volts
kN | kJ | kW kilowatt kilowatts | kWh | kHz | MHz | GHz | kPa | A amp amps ampere amperes | mA
Hz hertz | Pa pascal pascals | ohm ohms | mol mole moles | bit bits | byte bytes | kB | MB | GB | TB | am a.m | pm p.m
north | south | east | west | left | right | up | down | clockwise | counterclockwise anticlockwise
increase | decrease | more | fewer less | ahead | behind | profit gain | loss | AD CE | BC BCE
"""
_UNITS = {name: names[0] for line in re.split(r"[|\n]", _SPELLINGS) if (names := line.split()) for name in names}
_RATES = {"mph": ("mi", "h"), "kph": ("km", "h"), "kmph": ("km", "h"), "kmh": ("km", "h"), "fps": ("ft", "s")}
_POWERS = {"square": 2, "squared": 2, "sq": 2, "cubic": 3, "cubed": 3, "cu": 3}
_POWERS_OF_TEN = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "lakh": 5, "crore": 7}
SCALES = {f"{word}{s}": 10**power for word, power in _POWERS_OF_TEN.items() for s in ("", "s")} | {
    "dozen": 12,
    "gross": 144,
}
"""Words that multiply the number before them."""
SUFFIXES = {"k": 10**3, "K": 10**3, "M": 10**6, "mn": 10**6, "bn": 10**9, "B": 10**9}
"""Letters directly after a number that multiply it, unless they are symbols."""
_NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty sixty seventy "
    "eighty ninety half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh sevenths "
    "eighth eighths ninth ninths tenth tenths hundredth hundredths thousandth thousandths millionth millionths "
    "twice thrice double triple point score mil mill grand"
)
_SENTENCE_WORDS = (
    "and or not no none nor is are was be if then when where for base mod modulo plus minus over divided root "
    "squareroot factorial choose to from but by negative below under than short "
    "sin cos tan log ln exp lim max min gcd lcm"
)
# These words change the number, or belong to a sentence.
_NO_UNIT = frozenset(f"{_NUMBER_WORDS} {_SENTENCE_WORDS}".split())
_VOWEL = re.compile(r"[aeiouy]", re.IGNORECASE)
_LETTER = re.compile(r"[ .]*[A-Za-z](?:\^[0-9])?[ .]*")
_WORD = re.compile(
    r"(?P<word>[A-Za-z]+(?:[.'][A-Za-z]+)*)\.?(?P<power>\^-?[0-9]|[23](?![0-9]))?|(?P<slash>/)|(?P<degree>°)"
)

Unit = frozenset[tuple[str, int]]
"""Measures and their powers; empty for countable things: `5 apples`."""

_DEGREES: Unit = frozenset({("degree", 1)})


def is_letter(words: str) -> bool:
    """Return whether a unit is a single letter, as in `5m` and `4m^2`, and might be a symbol."""
    return _LETTER.fullmatch(words) is not None


def read_unit(words: str, *, is_text: bool) -> Unit | None:
    """Return the unit that the words after a number state; None if they may mean something else.

    Powers are written `^2`, degrees `°`. `is_text` is for words in a text group. Otherwise an unknown word is accepted
    as a noun for what is counted only if it looks like one.
    """
    tokens = list(_WORD.finditer(words))
    if not tokens or _WORD.sub("", words).strip(" *-,'()"):
        return None
    unit = _Reading()
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token["slash"] or token["word"] in ("per", "an", "a"):
            unit.sign = -1
        elif not unit.take(token, following, is_text=is_text):
            return None
    return frozenset((name, power) for name, power in unit.powers.items() if power and name != "unit")


def are_different(one: Unit, other: Unit) -> bool:
    """Return whether both units are stated and differ. `5 degrees` may be any kind of degrees."""
    if _DEGREES in (one, other) and one and other:
        return not all(name.startswith("degree") for name, _ in one | other)
    return bool(one and other) and one != other


@dataclass(slots=True)
class _Reading:
    """State of the parser for a unit."""

    powers: Counter[str] = field(default_factory=Counter)
    sign: int = 1
    power: int = 1
    last: str = ""

    def take(self, token: re.Match[str], following: re.Match[str] | None, *, is_text: bool) -> bool:
        """Consume the next word; returns False if it does not belong to a unit."""
        word = token["word"] or ""
        if word in _POWERS:
            return self._take_power(word, is_last=following is None)
        if word in ("C", "F") and self.last == "degree":
            self.powers["degree"] -= 1
            names: tuple[str, ...] = (f"degree {word}",)
        elif word == "in" and following is not None and not token["power"]:
            names = ()
        else:
            names = ("degree",) if token["degree"] else _known(word)
        exponent = int((token["power"] or "1").lstrip("^")) * self.power
        for name, direction in zip(names, (1, -1), strict=False):
            self.powers[name] += self.sign * direction * exponent
        self.last, self.power = names[0] if names else self.last, 1
        return bool(names) or not (token["power"] or _may_change_the_number(word, is_text=is_text))

    def _take_power(self, word: str, *, is_last: bool) -> bool:
        """Consume `square` before a unit, or `squared` after it."""
        if word.endswith("d") and self.last:
            self.powers[self.last] *= _POWERS[word]
            return True
        self.power = _POWERS[word]
        return not is_last


def _known(word: str) -> tuple[str, ...]:
    """Return the measures that a word names; the unit is the first one per the second."""
    if word in ("unit", "units"):
        return ("unit",)
    name = _UNITS.get(word) or (_UNITS.get(word.lower()) if len(word) > 1 else None)
    return _RATES.get(word.lower(), (name,) if name else ())


def _may_change_the_number(word: str, *, is_text: bool) -> bool:
    """Return whether a word may be something other than a noun for what is counted."""
    is_noun = len(word) > 1 if is_text else len(word) > 2 and _VOWEL.search(word) is not None
    return word.lower() in _NO_UNIT or word.lower() in SCALES or not is_noun
