"""From tokens to the syntax tree, by recursive descent.

    listing   relation, relation, ...            relation  member = member < ...
    member    union [unit] | words               union     sum \\cup sum ...
    sum       product + product - ...            product   power * power / power power ...
    power     postfix ^ exponent                 postfix   atom ! % degree

Products need no sign between their factors, a number before a fraction is a mixed number, and
brackets may hold one thing (then they only group) or several (a point or an interval).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction

from verl.utils.reward_score.math_grader.lexer import (
    APPROXIMATELY,
    Token,
    based_number,
    canonical,
    number,
)
from verl.utils.reward_score.math_grader.nodes import (
    MAX_DEPTH,
    Call,
    Constant,
    Degree,
    Either,
    Group,
    Inverse,
    Listing,
    Malformed,
    Matrix,
    MinusPlus,
    Negate,
    Node,
    Number,
    Percent,
    PlusMinus,
    Power,
    Product,
    Quantity,
    Relation,
    SetOf,
    Sum,
    Symbol,
    TooLarge,
    Union,
    Unsupported,
    Words,
)

RELATIONS = ("=", "<", ">", "<=", ">=", "!=", "~=", "in")
_SIGNS = {"-": Negate, "pm": PlusMinus, "mp": MinusPlus}
_BEGIN_FACTOR = frozenset(
    ["number", "based", "symbol", "constant", "function", "frac", "sqrt", "binom"]
    + ["(", "[", "{", "|", "floor(", "ceil(", "matrix"]
)
_CLOSINGS = (")", "]", "[")
_PART_OF_UNIT = ("word", "symbol", "constant", "number", "^", "/", "*", "{", "}")
_ARC = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_END = Token("", "the end")
TEN = Number(Fraction(10))


def parse(tokens: list[Token]) -> Node:
    parser = _Parser(tokens)
    node = parser.listing()
    if parser.peek():
        raise Malformed(f"{parser.token.text!r} is out of place")
    return node


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = [*tokens, _END, _END, _END]  # as far as anything looks ahead
        self._position = 0
        self._depth = 0
        self._closings: list[tuple[str, ...]] = [()]
        self._atoms: dict[str, Callable[[], Node]] = {
            "number": self._number,
            "based": lambda: based_number(self._take().text),
            "symbol": self._symbol,
            "constant": lambda: Constant(self._take().text),
            "function": self._function,
            "frac": self._fraction,
            "sqrt": self._root,
            "binom": self._binomial,
            "(": self._brackets,
            "[": self._brackets,
            "]": self._brackets,
            "{": self._braces,
            "\\{": self._set,
            "|": lambda: self._enclosed("abs", "|"),
            "floor(": lambda: self._enclosed("floor", "floor)"),
            "ceil(": lambda: self._enclosed("ceil", "ceil)"),
            "matrix": self._matrix,
            "empty": self._empty_set,
        }

    # ---- reading tokens

    @property
    def token(self) -> Token:
        return self._tokens[self._position]

    def peek(self, ahead: int = 0) -> str:
        return self._tokens[self._position + ahead].kind

    def _take(self, *kinds: str) -> Token:
        token = self.token
        if kinds and token.kind not in kinds:
            raise Malformed(f"{token.text!r} stands where {' or '.join(kinds)} should")
        self._position += 1
        return token

    def _accept(self, kind: str) -> bool:
        if self._tokens[self._position].kind != kind:
            return False
        self._position += 1
        return True

    @contextmanager
    def _inside(self, *closings: str) -> Iterator[None]:
        """One level deeper; `closings` end what is read there."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise TooLarge(f"brackets or exponents are nested more than {MAX_DEPTH} deep")
        self._closings.append(closings)
        yield
        self._closings.pop()
        self._depth -= 1

    # ---- forms of answers

    def listing(self) -> Node:
        items = [self._relation()]
        separators: set[str] = set()
        while self.peek() == ",":
            while self.peek() == ",":  # "1, 2, and 3"
                separators.add(self._take().text.strip(" ,").casefold())
            items.append(self._relation())
        if len(items) == 1:
            return items[0]
        return Listing(tuple(items)) if "and" in separators else Either(tuple(items))

    def _relation(self) -> Node:
        members: list[Node] = []
        operators: list[str] = []
        is_rounded = self.peek() == "word" and self.token.text in APPROXIMATELY
        if is_rounded or self.peek() == "~=":
            self._take()
            members.append(Words(""))
            operators.append("~=")
        members.append(self._member())
        while self.peek() in RELATIONS:
            operators.append(self._take().kind)
            members.append(self._member())
        return Relation(tuple(members), tuple(operators)) if operators else members[0]

    def _member(self) -> Node:
        if self.peek() == "word":
            return Words(self._phrase(("word", "symbol", "constant", "number", "'", "-")))
        node = self._union()
        if self._accept(":"):
            node = Product((node, Inverse(self._union())))
            if self.peek() == ":":
                raise Unsupported("a ratio of more than two numbers")
        if self.peek() != "word":
            return node
        unit = canonical(self._phrase(_PART_OF_UNIT))
        if unit in ("percent", "degree"):
            return Percent(node) if unit == "percent" else Degree(node)
        return Quantity(node, unit) if unit else node

    def _phrase(self, kinds: tuple[str, ...]) -> str:
        """Words up to the next comma, relation or closing bracket."""
        texts = []
        stops = ("", ",", *RELATIONS, *self._closings[-1])
        while self.peek() not in stops:
            if self.peek() not in kinds:
                raise Unsupported(f"words mixed with {self.token.text!r}")
            texts.append(self._take().text)
        return " ".join(texts)

    def _union(self) -> Node:
        pieces = [self._sum()]
        while self._accept("cup"):
            pieces.append(self._sum())
        return pieces[0] if len(pieces) == 1 else Union(tuple(pieces))

    # ---- arithmetic

    def _sum(self) -> Node:
        terms = [self._signed(self._product)]
        while self.peek() in ("+", *_SIGNS):
            terms.append(self._signed(self._product))
        return terms[0] if len(terms) == 1 else Sum(tuple(terms))

    def _signed(self, read: Callable[[], Node]) -> Node:
        signs = []
        while self.peek() in ("+", *_SIGNS):
            signs.append(self._take().kind)
        if len(signs) > 3:
            raise Malformed("more than three signs in a row")
        node = read()
        for sign in reversed(signs):
            node = node if sign == "+" else _SIGNS[sign](node)
        return node

    def _product(self) -> Node:
        factors = [self._power()]
        while True:
            if self._accept("*"):
                factors.append(self._signed(self._power))
            elif self._accept("/"):
                factors.append(Inverse(self._signed(self._power)))
            elif self._begins_factor():
                if self.peek() == "number" and self._tokens[self._position - 1].kind == "number":
                    raise Malformed("two numbers side by side")
                factors.append(self._power())
            else:
                return factors[0] if len(factors) == 1 else Product(tuple(factors))

    def _begins_factor(self) -> bool:
        """Whether a factor follows without a sign; the [ of ]1, 2[ has nothing behind it."""
        if self.peek() == "[" and self.peek(1) in ("", "cup", ","):
            return False
        return self.peek() in _BEGIN_FACTOR and self.peek() not in self._closings[-1]

    def _power(self) -> Node:
        node = self._postfix(self._atom())
        if self._accept("^"):
            is_braced = [self.peek(ahead) for ahead in range(3)] == ["{", "degree", "}"]
            if is_braced or self.peek() == "degree":
                self._position += 3 if is_braced else 1
                return Degree(node)
            node = self._postfix(Power(node, self._exponent()))
        return node

    def _exponent(self) -> Node:
        with self._inside(*self._closings[-1]):
            node = self._signed(self._atom)
            return Power(node, self._exponent()) if self._accept("^") else node

    def _postfix(self, node: Node) -> Node:
        if self._accept("!"):
            if self.peek() == "!":
                raise Unsupported("a double factorial")
            node = Call("factorial", (node,))
        if self._accept("%"):
            node = Percent(node)
        return Degree(node) if self._accept("degree") else node

    # ---- atoms

    def _atom(self) -> Node:
        read = self._atoms.get(self.peek())
        if read is None:
            raise Malformed(f"{self.token.text!r} is out of place")
        return read()

    def _number(self) -> Node:
        node = number(self._take("number").text)
        if node.value.denominator != 1 or node.decimals:
            return node
        ahead = [self.peek(offset) for offset in range(3)]
        if ahead == ["number", "/", "number"] and self.token.follows_space:
            over = number(self._take().text)
            self._take("/")
            return Sum((node, Product((over, Inverse(number(self._take().text))))))
        if ahead[0] == "frac":
            fraction = self._fraction()
            return (Sum if _is_proper(fraction) else Product)((node, fraction))
        return node

    def _symbol(self) -> Node:
        name = self._take().text
        if self._accept("_"):
            name += "_" + self._index()
        while self._accept("'"):
            name += "'"
        return Symbol(name)

    def _index(self) -> str:
        if not self._accept("{"):
            return self._take("number", "symbol", "constant", "word").text
        texts = []
        while not self._accept("}"):
            texts.append(self._take("number", "symbol", "constant", "word", ",", "+", "-").text)
        return "".join(texts)

    def _function(self) -> Node:
        name = self._take().text
        with self._inside(*self._closings[-1]):
            index = self._argument() if self._accept("_") else None
            power = self._exponent() if self._accept("^") else None
            argument = self._function_argument()
        if index is not None and name != "log":
            raise Unsupported(f"{name} with an index")
        if name in ("log", "lg"):
            base = TEN if name == "lg" else index
            call = Call("log", (argument,) if base is None else (base, argument))
        elif power == Negate(number("1")) and name in _ARC:
            return Call(_ARC[name], (argument,))
        else:
            call = Call(name, (argument,))
        return call if power is None else Power(call, power)

    def _function_argument(self) -> Node:
        """sin(x) y is a product; sin 2x takes all factors up to the next sign or function."""
        if self.peek() in ("(", "["):
            return self._brackets()
        if self.peek() in ("-", "+"):
            return self._signed(self._function_argument)
        factors = [self._power()]
        while self._begins_factor() and self.peek() != "function":
            factors.append(self._power())
        return factors[0] if len(factors) == 1 else Product(tuple(factors))

    def _fraction(self) -> Node:
        self._take("frac")
        return Product((self._argument(), Inverse(self._argument())))

    def _root(self) -> Node:
        self._take("sqrt")
        index: Node = Number(Fraction(2))
        if self._accept("["):
            with self._inside("]"):
                index = self._sum()
                self._take("]")
        is_literal = self.peek() == "number"
        return Call("root", (index, self._number() if is_literal else self._argument()))

    def _binomial(self) -> Node:
        self._take("binom")
        return Call("binomial", (self._argument(), self._argument()))

    def _argument(self) -> Node:
        """What a command applies to: a group, or the next single thing, of 12 only the 1."""
        if self.peek() == "{":
            return self._braces()
        if self.peek() == "number" and self.token.text.isdecimal():
            text = self.token.text
            if len(text) == 1:
                self._position += 1
            else:
                self._tokens[self._position] = Token("number", text[1:])
            return number(text[0])
        if self.peek() not in ("symbol", "constant", "frac", "sqrt", "("):
            raise Malformed(f"{self.token.text!r} cannot be the argument of a command")
        with self._inside(*self._closings[-1]):
            return self._atom()

    # ---- brackets

    def _brackets(self) -> Node:
        opening = self._take().text
        opening = {"langle": "(", "lparen": "(", "lbrack": "["}.get(opening, opening)
        with self._inside(")", "]"):
            inner = self.listing()
            closing = self._take(*_CLOSINGS).kind
        if not isinstance(inner, Listing):
            if (opening, closing) not in (("(", ")"), ("[", "]")):
                raise Malformed(f"brackets {opening} {closing} around one thing")
            return inner
        return Group(
            "(" if opening == "]" else opening, inner.items, ")" if closing == "[" else closing
        )

    def _braces(self) -> Node:
        self._take("{")
        with self._inside("}"):
            inner = self.listing()
            self._take("}")
        return SetOf(inner.items) if isinstance(inner, Listing) else inner

    def _set(self) -> Node:
        self._take("\\{")
        if self._accept("\\}"):
            return SetOf(())
        with self._inside("\\}"):
            inner = self.listing()
            if self.peek() in ("|", ":"):
                raise Unsupported("a set defined by a condition")
            self._take("\\}")
        return SetOf(inner.items if isinstance(inner, Listing) else (inner,))

    def _empty_set(self) -> Node:
        self._take()
        return SetOf(())

    def _enclosed(self, function: str, closing: str) -> Node:
        self._take()
        with self._inside(closing):
            inner = self._sum()
            self._take(closing)
        return Call(function, (inner,))

    def _matrix(self) -> Node:
        self._take()
        rows: list[tuple[Node, ...]] = []
        with self._inside("end"):
            while self.peek() != "end":
                cells = [self._sum()]
                while self._accept("&"):
                    cells.append(self._sum())
                rows.append(tuple(cells))
                if not self._accept("newline"):
                    break
            self._take("end")
        if len({len(row) for row in rows}) != 1:
            raise Malformed("a matrix whose rows have different lengths")
        return Matrix(tuple(rows))


def _is_proper(node: Node) -> bool:
    """Whether it is a fraction of two literals between 0 and 1, as in a mixed number."""
    match node:
        case Product((Number(value=over), Inverse(Number(value=under)))):
            return 0 < over < under and over.denominator == under.denominator == 1
        case _:
            return False
