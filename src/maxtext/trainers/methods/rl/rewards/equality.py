"""Mathematical answers: different spellings become one, and a process compares answers.

Answers are texts of people and models: `5 million`, `1,000 dollars`, `2 1/3`, `\\dfrac12`. This
module imports neither JAX nor other rooms, so that the process starts quickly.
"""

import re
from multiprocessing.connection import Connection

TEXT = r"\\(?:text|mathrm|textbf|mathbf|mbox)"
REPLACEMENTS = (
    (r"^\*\*(.*)\*\*$", r"\1"),
    (r"\\[dt]frac", r"\\frac"),
    (r"\\left|\\right|\\[!,;:]|\\displaystyle", ""),
    (rf"({TEXT}\{{[^{{}}]*)\}}\^\{{?(\d)\}}?", r"\1^\2}"),  # \text{cm}^2 is \text{cm^2}
    (rf"{TEXT}\{{([^{{}}]*)\}}", r" \1 "),
    (r"^\\\((.*)\\\)$|^\\\[(.*)\\\]$", r"\1\2"),
    (r"^\$\$([^$]*)\$\$$|(?<!\\)\$([^$]+)(?<!\\)\$", r"\1\2"),
    (r"\\\$|[$€£](?=\s*[\d.])", ""),
    (r"\\%", "%"),
    (r"(?<=\d)\s*[x×]\s*(?=10\^)", r" \\times "),
    (r"\\circ\b|\^\{?\\circ\}?|°", " degrees"),
)
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
NUMBER = r"[+-]?\d+(?:\.\d+)?"
UNIT_WORD = (
    "m/s|km/h|mm|cm|km|kg|mg|lb|lbs|oz|ft|mph|kmh|mi|hr|hrs|min|mins|sec|secs|usd|inch|inches|foot|"
    "feet|mile|miles|yard|yards|acre|acres|meter|meters|metre|metres|liter|liters|litre|"
    "litres|gram|grams|kilogram|kilograms|kilometer|kilometers|kilometre|kilometres|"
    "centimeter|centimeters|centimetre|centimetres|pound|pounds|ounce|ounces|gallon|gallons|"
    "second|seconds|minute|minutes|hour|hours|day|days|week|weeks|month|months|year|years|"
    "dollar|dollars|cent|cents|euro|euros|degree|degrees|unit|units|square|cubic|per|people|"
    "points|times|ways|cup|cups"
)
UNITS = rf"(?:(?:{UNIT_WORD})(?:\^\{{?\d\}}?)?[\s/.]*)+"


def normalize(text: str) -> str:
    """The text without units, currency signs, thousands separators and layout commands of LaTeX;
    mixed numbers as sums, and "5 million" as a product."""
    text = text.strip().rstrip(".")
    for pattern, replacement in REPLACEMENTS:
        text = re.sub(pattern, replacement, text)
    text = " ".join(text.split())
    if re.fullmatch(r"[+-]?\d{1,3}(?: \d{3})+(?:\.\d+)?", text):
        text = text.replace(" ", "")
    if not text.startswith(("(", "[", "{", "\\{")):  # commas separate the elements of those
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    if scaled := re.fullmatch(rf"({NUMBER}) ({'|'.join(SCALES)})s?(?: {UNITS})?", text, re.I):
        return f"{scaled[1]} \\cdot 10^{{{SCALES[scaled[2].lower()]}}}"
    if measured := re.fullmatch(rf"(.*\d\}}*)\s*{UNITS}", text, re.I):
        text = measured[1]
    fraction = r"(?:(\d+)/(\d+)|\\frac\{(\d+)\}\{(\d+)\})"
    if mixed := re.fullmatch(rf"(-?)(\d+) ?{fraction}", text):
        sign, whole, *parts = mixed.groups()
        numerator, denominator = filter(None, parts)
        # "21/3" is a fraction: only a space or \frac makes a mixed number.
        if " " in text or "\\frac" in text:
            return f"{sign}({whole}+\\frac{{{numerator}}}{{{denominator}}})"
    return text


def work(descriptor: int) -> None:
    """Answers each (right, other) with whether they are equal, until the socket closes."""
    from math_verify import parse, verify  # sympy takes a second to import

    connection = Connection(descriptor)
    while True:
        try:
            texts = connection.recv()
        except EOFError:
            return
        try:
            right, other = (parse(f"\\boxed{{{text}}}") for text in texts)
            connection.send(bool(verify(right, other)))
        except Exception:  # of sympy, which may raise anything: the answer cannot be read
            connection.send(False)
