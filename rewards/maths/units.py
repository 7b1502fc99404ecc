"""Units of measurement behind a number: which words are one, and which units are the same."""

from __future__ import annotations

import re
from collections import Counter

_SPELLINGS = """
mm millimeter millimeters millimetre millimetres | cm centimeter centimeters centimetre centimetres
dm decimeter decimeters decimetre decimetres | m meter meters metre metres
km kilometer kilometers kilometre kilometres | in inch inches | ft foot feet | yd yds yard yards | mi mile miles
mg milligram milligrams | g gm gram grams | kg kilogram kilograms | lb lbs pound pounds | oz ounce ounces
ton tons tonne tonnes | ml mL milliliter milliliters millilitre millilitres | L l liter liters litre litres
gal gallon gallons | qt quart quarts | pt pint pints | acre acres | ha hectare hectares | cc
ms millisecond milliseconds | s sec secs second seconds | min mins minute minutes | h hr hrs hour hours
day days | wk week weeks | mo month months | yr yrs year years
dollar dollars USD usd buck bucks | cent cents | euro euros EUR eur | GBP quid | yen JPY | Rs rupee rupees INR
degree degrees deg | rad radian radians | N newton newtons | J joule joules | W watt watts | V volt volts
Hz hertz | Pa pascal pascals | ohm ohms | mol mole moles | bit bits | byte bytes | am a.m | pm p.m
north | south | east | west | left | right | up | down
"""
_UNITS = {name: names[0] for line in re.split(r"[|\n]", _SPELLINGS) if (names := line.split()) for name in names}
_RATES = {"mph": ("mi", "h"), "kph": ("km", "h"), "kmph": ("km", "h"), "kmh": ("km", "h"), "fps": ("ft", "s")}
_POWERS = {"square": 2, "squared": 2, "sq": 2, "cubic": 3, "cubed": 3, "cu": 3}
SCALES = {
    "dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
    "hundreds": 100, "thousands": 10**3, "millions": 10**6, "billions": 10**9, "trillions": 10**12,
}  # fmt: skip
"""Words that multiply the number before them."""
SUFFIXES = {"k": 10**3, "K": 10**3, "M": 10**6, "mn": 10**6, "bn": 10**9, "B": 10**9}
"""Letters right behind a number that multiply it, where they are no symbol."""
_NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty sixty seventy "
    "eighty ninety half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh sevenths "
    "eighth eighths ninth ninths tenth tenths hundredth hundredths thousandth thousandths millionth millionths "
    "twice thrice double triple point score"
)
_SENTENCE_WORDS = (
    "and or not no none nor is are was be if then when where for base mod modulo plus minus times over divided root "
    "squareroot factorial choose to from but by negative sin cos tan log ln exp lim max min gcd lcm"
)
# Behind these a number is not what it was, or there is a sentence.
_NO_UNIT = frozenset(f"{_NUMBER_WORDS} {_SENTENCE_WORDS}".split())
_VOWEL = re.compile(r"[aeiouy]", re.IGNORECASE)
_WORD = re.compile(r"(?P<word>[A-Za-z]+(?:\.[A-Za-z]+)*)\.?(?P<power>\^-?[0-9]|[23](?![0-9]))?|(?P<slash>/)|(?P<degree>°)")

Unit = frozenset[tuple[str, int]]
"""Measures and the powers they are in; empty where things are only counted: `5 apples`."""


def is_letter(words: str) -> bool:
    """Whether a unit is one letter only, and might be a symbol."""
    return len(words.strip(" .")) == 1 and words.strip(" .").isalpha()


def read_unit(words: str, *, is_text: bool) -> Unit | None:
    """The unit that words behind a number say; None where they may say something else.

    Powers are written `^2`, degrees `°`. `is_text` is for words that are marked as such: other nouns are only taken
    for what is counted where they are, or look like words.
    """
    powers: Counter[str] = Counter()
    sign, power = 1, 1
    tokens = list(_WORD.finditer(words))
    if not tokens or _WORD.sub("", words).strip(" *-,'()"):
        return None
    last = ""
    for index, token in enumerate(tokens):
        word = token["word"] or ""
        if token["slash"] or word in ("per", "an", "a"):
            sign = -1
            continue
        if word in ("C", "F") and last == "degree":
            powers["degree"] -= 1
            powers[f"degree {word}"] += 1
            continue
        if word in _POWERS:
            if word.endswith("d") and last:
                powers[last] *= _POWERS[word]
            elif index + 1 < len(tokens):
                power = _POWERS[word]
            else:
                return None
            continue
        exponent = int((token["power"] or "1").lstrip("^"))
        names = ("degree",) if token["degree"] else _RATES.get(word) or _RATES.get(word.lower()) or _known(word)
        if word == "in" and index + 1 < len(tokens) and not token["power"]:
            names = ()
        if names:
            for name, direction in zip(names, (1, -1), strict=False):
                powers[name] += sign * direction * power * exponent
            last = names[0]
        elif word.lower() in _NO_UNIT or word.lower() in SCALES or not (is_text or _is_noun(word)) or token["power"]:
            return None
        power = 1
    return frozenset((name, power) for name, power in powers.items() if power)


def _known(word: str) -> tuple[str, ...]:
    name = _UNITS.get(word) or (_UNITS.get(word.lower()) if len(word) > 1 else None)
    return (name,) if name else ()


def _is_noun(word: str) -> bool:
    return len(word) > 2 and _VOWEL.search(word) is not None
