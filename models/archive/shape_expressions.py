"""Shape expressions of an archive: arithmetic over sizes, and nothing else that ``sympy.sympify`` would evaluate.

``sympify`` runs its text as Python code, with all of sympy and Python's builtins in reach. So the text is parsed here
first, and each part of it must be one that torch writes (sympy's ``srepr``, or plain arithmetic). Powers are bounded as
well: a short text with nested powers can be a number of any length.
"""

import ast
import re

MAX_CHARACTERS = 4096
MAX_EXPONENT = 16
MAX_POWERS_INSIDE = 3  # of one another
_LARGEST = 10**20
_MAX_PRECISION = 1000  # bits of a Float
_SYMBOL = re.compile(r"[a-z]+\d{1,6}")
_FLOAT = re.compile(r"[+-]?\d{1,40}(\.\d{0,60})?(e[+-]?\d{1,3})?")
_POWERS = {"Pow", "PowByNatural", "FloatPow", "LShift", "RShift"}
_FUNCTIONS = _POWERS | {
    "Max", "Min", "Mod", "PythonMod", "FloorDiv", "CleanDiv", "CeilDiv", "CeilToInt", "FloorToInt",
    "TruncToInt", "TruncToFloat", "IntTrueDiv", "FloatTrueDiv", "ToFloat", "RoundToInt", "RoundDecimal",
    "ModularIndexing", "Where", "Identity", "IsNonOverlappingAndDenseIndicator", "Eq", "Ne", "Lt", "Le", "Gt",
    "Ge", "Not", "And", "Or", "Equality", "Unequality", "GreaterThan", "LessThan", "StrictGreaterThan",
    "StrictLessThan", "Add", "Mul", "Abs", "Float", "Integer", "Rational", "Symbol", "floor", "ceiling",
    "OpaqueUnaryFn_sqrt",
}  # fmt: skip
_CONSTANTS = {"true", "false", "True", "False", "oo", "int_oo"}
_ASSUMPTIONS = {"integer", "positive", "negative", "nonnegative", "real", "evaluate"}
_OPERATORS = (
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.BitAnd, ast.BitOr, ast.Invert,
    ast.UAdd, ast.USub, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE,
)  # fmt: skip


def is_symbol(name: str) -> bool:
    """True if it is the name of a size, as torch gives them: letters and a number (``s0``, ``u12``)."""
    return _SYMBOL.fullmatch(name) is not None


def is_arithmetic(expression: str) -> bool:
    """True if evaluating it can do nothing but compute a number or a truth of bounded size."""
    if (
        len(expression) > MAX_CHARACTERS
        or not (expression.isascii() and expression.isprintable())
        or "#" in expression
    ):
        return False
    try:
        return _allowed(ast.parse(expression, mode="eval").body, 0)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _allowed(part: ast.AST, powers: int) -> bool:
    """``powers``: how many powers this part stands within."""
    if isinstance(part, ast.Constant):
        return _is_number(part)
    if isinstance(part, ast.Name):
        return part.id in _CONSTANTS or is_symbol(part.id)
    if isinstance(part, ast.UnaryOp):
        return isinstance(part.op, _OPERATORS) and _allowed(part.operand, powers)
    if isinstance(part, ast.BinOp):
        if isinstance(part.op, ast.Pow):
            return _is_power([part.left, part.right], powers)
        return isinstance(part.op, _OPERATORS) and all(_allowed(p, powers) for p in (part.left, part.right))
    if isinstance(part, ast.Compare):
        sides = [part.left, *part.comparators]
        return all(isinstance(op, _OPERATORS) for op in part.ops) and all(_allowed(p, powers) for p in sides)
    return isinstance(part, ast.Call) and _is_call(part, powers)


def _is_call(call: ast.Call, powers: int) -> bool:
    if not isinstance(call.func, ast.Name) or call.func.id not in _FUNCTIONS:
        return False
    name = call.func.id
    if not all(_is_assumption(name, keyword) for keyword in call.keywords):
        return False
    if name in ("Symbol", "Float") and call.args and _is_text(call.args[0]):
        text = ast.literal_eval(call.args[0])
        pattern = _SYMBOL if name == "Symbol" else _FLOAT
        return len(call.args) == 1 and pattern.fullmatch(text) is not None
    if name == "Symbol":
        return False
    return _is_power(call.args, powers) if name in _POWERS else all(_allowed(p, powers) for p in call.args)


def _is_assumption(function: str, keyword: ast.keyword) -> bool:
    if not isinstance(keyword.value, ast.Constant):
        return False
    value = keyword.value.value
    if function == "Float" and keyword.arg == "precision":
        return type(value) is int and 0 < value <= _MAX_PRECISION
    return keyword.arg in _ASSUMPTIONS and type(value) is bool


def _is_power(sides: list[ast.expr], powers: int) -> bool:
    """A base and an exponent: a small number, or the size itself."""
    if len(sides) != 2 or powers >= MAX_POWERS_INSIDE:
        return False
    base, exponent = sides
    return _is_exponent(exponent) and _allowed(base, powers + 1)


def _is_exponent(part: ast.AST) -> bool:
    if isinstance(part, ast.UnaryOp):
        return isinstance(part.op, ast.USub) and _is_exponent(part.operand)
    if isinstance(part, ast.Constant):
        return _is_number(part) and abs(part.value) <= MAX_EXPONENT  # type: ignore[arg-type, operator]
    if isinstance(part, ast.Name):
        return is_symbol(part.id)
    if not isinstance(part, ast.Call) or not isinstance(part.func, ast.Name):
        return False
    if part.func.id in ("Integer", "Rational", "Float"):
        return not part.keywords and all(_is_exponent(one) for one in part.args)
    return part.func.id == "Symbol" and _is_call(part, 0)


def _is_number(part: ast.Constant) -> bool:
    return type(part.value) in (int, float) and abs(part.value) <= _LARGEST  # type: ignore[arg-type, operator]


def _is_text(part: ast.AST) -> bool:
    return isinstance(part, ast.Constant) and type(part.value) is str
