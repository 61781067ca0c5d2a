"""The commands, words, characters and units that answers are written with. Tables only."""

FUNCTION_NAMES = frozenset(
    {"sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan"}
    | {"sinh", "cosh", "tanh", "ln", "log", "lg", "exp"}
)

CONSTANTS = {
    "pi": "pi",
    "e": "e",
    "i": "i",
    "infty": "infinity",
    "infinity": "infinity",
    "oo": "infinity",
}

GREEK = frozenset(
    {"alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta",
     "iota", "kappa", "lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "upsilon", "phi", "varphi",
     "chi", "psi", "omega", "Gamma", "Delta", "Theta", "Lambda", "Xi", "Sigma", "Phi", "Psi",
     "Omega", "ell", "angle", "triangle"}
)  # fmt: skip

OPERATORS = {
    "frac": "frac", "dfrac": "frac", "tfrac": "frac", "cfrac": "frac",
    "sqrt": "sqrt", "binom": "binom", "dbinom": "binom", "tbinom": "binom",
    "times": "*", "cdot": "*", "ast": "*", "div": "/", "pm": "pm", "mp": "mp",
    "lt": "<", "gt": ">", "le": "<=", "leq": "<=", "leqslant": "<=",
    "ge": ">=", "geq": ">=", "geqslant": ">=", "ne": "!=", "neq": "!=",
    "approx": "~=", "simeq": "~=", "in": "in", "cup": "cup", "circ": "degree", "degree": "degree",
    "lfloor": "floor(", "rfloor": "floor)", "lceil": "ceil(", "rceil": "ceil)",
    "lvert": "|", "rvert": "|", "vert": "|", "lbrace": "\\{", "rbrace": "\\}",
    "lbrack": "[", "rbrack": "]", "langle": "(", "rangle": ")", "lparen": "(", "rparen": ")",
    "emptyset": "empty", "varnothing": "empty", "prime": "'", "colon": ":",
    "{": "\\{", "}": "\\}", "%": "%", "\\": "newline",
}  # fmt: skip
"""What a command means to the parser."""

CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ",
        "∙": "\\cdot ", "∗": "*", "÷": "/", "∕": "/", "√": "\\sqrt ", "π": "\\pi ",
        "∞": "\\infty ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "≈": "\\approx ",
        "±": "\\pm ", "∓": "\\mp ", "∪": "\\cup ", "∈": "\\in ", "∅": "\\emptyset ",
        "°": "^\\circ ", "′": "'", "²": "^2", "³": "^3", "½": "\\frac{1}{2}",
        "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "⅓": "\\frac{1}{3}", "⅔": "\\frac{2}{3}",
        "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ", "γ": "\\gamma ", "λ": "\\lambda ",
        "，": ",", "（": "(", "）": ")", "％": "%", "：": ":", "；": ";", "。": ".",
        "€": "\\$", "£": "\\$", "\u00a0": " ", "\u2009": " ", "\u200b": "",
    }
)  # fmt: skip

NUMBER_WORDS = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "eleven": 11, "twelve": 12, "sixteen": 16,
}  # fmt: skip
"""How a base may be spelled."""

PLAIN_WORDS = frozenset(
    {"yes", "no", "not", "odd", "all", "none", "one", "the", "is", "are", "for", "any", "if", "per"}
)
"""Words that would otherwise be read as products of their letters."""

APPROXIMATELY = frozenset({"about", "approximately", "approx", "roughly", "around"})
SEPARATORS = frozenset({"and", "or", ", and", ",and", "and,", ", or", "or,"})

NO_SOLUTION = frozenset(
    {"no solution", "no solutions", "no real solution", "no real solutions", "empty set"}
)
ALL_REALS = frozenset({"all real numbers", "all reals", "any real number"})

_UNIT_NAMES = """
cm centimeter centimetre
mm millimeter millimetre
m meter metre
km kilometer kilometre
in inch inche
ft foot feet
yd yard
mi mile
kg kilogram
g gram gm
mg milligram
lb pound lbs
oz ounce
ton tonne
s second sec
min minute
h hour hr
day
week
month
year yr
l liter litre L
ml milliliter millilitre mL
gal gallon
dollar USD usd buck
cent
mph
rad radian
K kelvin
Hz hertz
N newton
J joule
W watt
V volt
"""
UNITS = {
    spelling: spellings[0]
    for spellings in map(str.split, _UNIT_NAMES.strip().splitlines())
    for spelling in spellings
}
"""From every spelling (singular) to the unit. Units that differ here are different."""

EMPTY_UNITS = frozenset({"unit", "u", "number", ""})
"""Say nothing: 5 units are 5."""

UNIT_WORDS = frozenset(
    form for spelling in UNITS if len(spelling) > 1 for form in (spelling, spelling + "s")
)
"""Units that are recognised in plain text; a single letter is a variable there."""
