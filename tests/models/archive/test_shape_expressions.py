"""Shape expressions: what torch writes is arithmetic, and neither code nor an endless number is."""

import pytest
import sympy
from halfeven.models.archive.shape_expressions import is_arithmetic, is_symbol


@pytest.mark.parametrize(
    "text",
    [
        "Symbol('s77', integer=True, positive=True)",
        "Add(Mul(Integer(2), Symbol('s0', integer=True, positive=True)), Integer(-1))",
        "FloorDiv(Add(Symbol('s0', integer=True), Integer(-1)), Integer(2))",
        "Pow(Symbol('s0', positive=True), Integer(2))",
        "Mul(Pow(Add(FloorDiv(Symbol('s1'), Integer(2)), Integer(1)), Integer(2)), Rational(1, 2))",
        "StrictLessThan(Symbol('s0'), Integer(9223372036854775807))",
        "Float('0.5', precision=53)",
        "2*s0 + 1", "s0*s1//2", "Max(1, u0)", "s0 >= 2", "-s0", "true", "int_oo", "TruncToInt(IntTrueDiv(s0, 3))",
    ],
)  # fmt: skip
def test_what_torch_writes_is_arithmetic(text: str) -> None:
    assert is_arithmetic(text)


@pytest.mark.parametrize(
    "text",
    [
        "eval('1')", "s0.func", "s0[0]", "[s0]", "(s0, s1)", "lambda: 0", "s0 if s1 else s2", "f's0'", "'s0'",
        "Symbol('s0', cls=preview)", "Symbol('s0', 1)", "Symbol(s0)", "Symbol('x')", "Float('inf')", "Integer('1')",
        "Float('1', dps=9999999)", "Float('1', precision=9999999999)", "Float('1e999999')", "Max(*s0)", "Max(**s0)",
        "(Max)(s0)(s1)", "Max.__call__(s0)", "sympify(s0)", "__import__", "s0; s1", "s0\n+ s1", "s0 # s1", "s0 := 1",
        "\uff45val(s0)", "s0 ^ s1", "s0!", "s0 is s1", "s0 and s1", "await s0", "1j", "b's0'", "None", "...",
        "s" * 5000, "Max(" * 900 + ")" * 900, "-" * 4000 + "s0",
    ],
)  # fmt: skip
def test_what_is_more_than_arithmetic_is_refused(text: str) -> None:
    assert not is_arithmetic(text)


@pytest.mark.parametrize(
    "text",
    [
        "9**9**9**9", "Pow(Integer(9), Pow(Integer(9), Integer(99)))", "Pow(Integer(10), Integer(1000000000))",
        "Pow(Pow(Pow(Pow(9, 16), 16), 16), 16)", "Pow(10, 9*9*9*9*9*9)", "LShift(1, 1000000000000)",
        "PowByNatural(10, 1000000)", "10**(10**10)", "1" * 100, "Pow(2, Integer(Integer(99)))", "Pow(2, -99)",
    ],
)  # fmt: skip
def test_an_endless_number_is_refused(text: str) -> None:
    """Each of these numbers would hold the process that loads it, for ever or with all its memory."""
    assert not is_arithmetic(text)


def test_the_largest_number_that_is_admitted_is_small() -> None:
    tower = "Pow(Pow(Pow(99999999999999999999, 16), 16), 16)"
    assert is_arithmetic(tower)
    value = sympy.sympify(tower)
    assert isinstance(value, sympy.Integer) and value.p.bit_length() < 400_000


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("s0", True),
        ("u12", True),
        ("zuf3", True),
        ("u9999999", False),
        ("s", False),
        ("eval", False),
        ("S0", False),
    ],
)
def test_a_symbol_is_letters_and_a_number_that_can_be_counted_to(name: str, known: bool) -> None:
    """torch counts up to the number of an unbacked symbol (``u…``), one by one."""
    assert is_symbol(name) is known
