"""Texts that ask a grader for too much: time, memory, or a turn at the interpreter."""

import random

N = 10**6


def expensive() -> dict[str, str]:
    """By name: answers whose plain evaluation would take seconds, gigabytes, or the stack."""
    deep = 10**5
    return {
        "power tower": "9^{9^{9^{9^9}}}",
        "tower of ones": "^".join(["1"] * 300),
        "tower of nines": "^".join(["9"] * 200),
        "power tower in plain text": "9**9**9**9",
        "huge power": "2^{10^{18}}",
        "huge negative power": "2^{-10^{18}}",
        "power of a fraction": r"(\frac{99999}{99998})^{99999999}",
        "nested factorials": "((9!)!)!",
        "huge factorial": "(10^9)!",
        "many factorials": "+".join(["799!"] * 150),
        "huge binomial": r"\binom{10^9}{5\cdot10^8}",
        "largest binomials": "+".join([r"\binom{1599}{800}"] * 60),
        "million digits": "9" * N,
        "million decimals": "0." + "3" * N,
        "longest literal": "9" * 1999,
        "product of long literals": r"\cdot".join(["9" * 180] * 10),
        "huge exponent": "1e99999",
        "million brackets": "(" * N,
        "deep brackets": "(" * deep + "1" + ")" * deep,
        "deep braces": "{" * deep + "1" + "}" * deep,
        "deepest brackets read": "(" * 24 + "1" + ")" * 24,
        "deep fractions": r"\frac{1}{" * deep + "1" + "}" * deep,
        "deep roots": r"\sqrt{" * 300 + "2" + "}" * 300,
        "deepest roots read": r"\sqrt{" * 20 + "2" + "}" * 20,
        "deep sines": r"\sin" * 400 + " 1",
        "deepest sines read": r"\sin" * 20 + " 1",
        "deep exponentials": "e^{" * 300 + "1" + "}" * 300,
        "signs": "-" * N + "1",
        "some signs": "-" * 1500 + "1",
        "primes": "x" + "'" * 1500,
        "long sum": "+".join(["1"] * (N // 2)),
        "long sum of pi": r"+\pi" * (N // 4),
        "longest sum read": "+".join([r"\pi"] * 250),
        "longest sum of roots": "+".join([rf"\sqrt{{{k}}}" for k in range(150, 270)]),
        "longest sum of sines": "+".join([rf"\sin {k}" for k in range(100, 300)]),
        "longest sum of logs": "+".join([rf"\log {k}" for k in range(100, 300)]),
        "longest product": "".join(f"(x+{k})" for k in range(100)),
        "power of a sum": "(a+b+c+d+f)^{5000}",
        "powers of many symbols": "".join(f"{c}^{{999}}" for c in "abcdfghjklmnopqrstuvwxyz"),
        "fractional powers": "+".join(f"x^{{{k}/97}}" for k in range(1, 120)),
        "tower of x": "x^{x^{x^{x^{x^x}}}}",
        "large set": "\\{" + ",".join(map(str, range(N // 10))) + "\\}",
        "largest set of roots": "\\{" + ",".join(rf"\sqrt{{{k}}}" for k in range(150, 270)) + "\\}",
        "largest list of symbols": ",".join("abcdfghjklmnopqrstuvwxyz" * 12),
        "large matrix": r"\begin{pmatrix}" + r"1&2\\" * (N // 10) + r"\end{pmatrix}",
        "largest matrix read": r"\begin{pmatrix}" + r"\pi&2\\" * 100 + r"1&2\end{pmatrix}",
        "angle": r"\sin(10^{10^{6}})",
        "angle in range": r"\sin(10^{12}-1)",
        "near zero": r"\frac{1}{\sin\pi}",
        "tangent at its pole": r"\tan\frac{\pi}{2}",
        "root of high order": r"\sqrt[999999999]{2}",
        "root of a long number": r"\sqrt[3]{" + "7" * 900 + "}",
        "complex power": "(1+i)^{10^9}",
        "complex tower": "i^{i^{i}}",
        "plus minus": r"\pm 1" * 100,
        "many signs to choose": "1" + r"\pm 1" * 150,
        "commas": "," * N,
        "digit groups": "1" + ",111" * 450 + ",11",
        "spaced digits": "1 " * 900,
        "spaces": " " * N + "x",
        "tabs between": "1" + "\t" * N + "1",
        "text commands": r"\text{" * (N // 6),
        "few text commands": r"\text{" * 300,
        "backslashes": "\\" * N,
        "bars": "|" * 1500,
        "carets": "x^" * 900,
        "underscores": "x_" * 900,
        "hexadecimal": "F" * 1900 + "_",
        "unicode": "𝟙" * N,
        "surrogate": "\ud800" * 1000,
        "nul": "\0" * 1000,
        "letters": "a" * 1900,
        "words": "word " * 380,
        "relations": "x=" * 500 + "1",
        "unions": r"\cup".join(["(1,2)"] * 80),
        "intervals": ",".join(["(1,2)"] * 110),
    }


def injections() -> list[str]:
    """Two hundred texts that would run something if they were ever evaluated or formatted.

    Each writes to the file named by MARK if it is executed; `{mark}` stands for that name.
    """
    effects = [
        "open('{mark}','w').write('x')",
        "__import__('os').system('touch {mark}')",
        "__import__('pathlib').Path('{mark}').touch()",
        "__import__('subprocess').call(['touch','{mark}'])",
        "exec(\"open('{mark}','w')\")",
        "eval(\"open('{mark}','w')\")",
        "getattr(__builtins__,'open')('{mark}','w')",
        "().__class__.__base__.__subclasses__()[0] or open('{mark}','w')",
        "[f for f in [open] if f('{mark}','w')]",
        "breakpoint() or open('{mark}','w')",
    ]
    frames = [
        "{0}",
        "\\boxed{{{0}}}",
        "1+{0}",
        "(lambda: {0})()",
        "[x := {0}]",
        'f"{{{0}}}"',
        "{{'a': {0}}}",
        "5 if {0} else 6",
        "\\text{{{0}}}",
        "\\frac{{{0}}}{{2}}",
        "\\sqrt{{{0}}}",
        "{0};{0}",
        "#{0}\n{0}",
        "x=5,y={0}",
        "print({0})",
        "$(touch {{mark}})`touch {{mark}}`{0}",
        "0 or {0}",
        "{0} == 5",
        "𝓮𝓿𝓪𝓵({0})",
        "!!python/object/apply:os.system ['touch {{mark}}'] {0}",
    ]
    texts = [frame.format(effect) for frame in frames for effect in effects]
    random.Random(0).shuffle(texts)
    return texts
