"""A calculator for whole numbers, fractions and decimals: exact, and bounded in size and time."""

import ast
import operator
from fractions import Fraction

MAX_CHARACTERS = 200
MAX_DEPTH = 40
MAX_BITS = 2000  # of a numerator or denominator
MAX_DECIMALS = 10  # of a result that is no whole number

_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class CalculatorError(ValueError):
    """An expression that is not evaluated."""


def calculate(expression: str) -> str:
    """The value of an expression of numbers, + - * / // % ^ ** and parentheses.

    Exact inside; a value that is no whole number is shown with at most ten decimals.

    Raises:
        CalculatorError: the expression is something else, divides by zero, or is too large.
    """
    text = expression.strip().replace("^", "**").replace(",", "").replace("×", "*").replace("÷", "/")
    if not text or len(text) > MAX_CHARACTERS or "_" in text:
        raise CalculatorError(f"an expression has 1 to {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CalculatorError("not an expression") from error
    return _shown(_value(tree.body, text, 0))


def _value(node: ast.expr, text: str, depth: int) -> Fraction:
    if depth > MAX_DEPTH:
        raise CalculatorError("nested too deeply")
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _literal(ast.get_source_segment(text, node) or "")
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, text, depth + 1)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, text, depth + 1)
        case ast.BinOp(left=left, op=op, right=right):
            sides = _value(left, text, depth + 1), _value(right, text, depth + 1)
            return _bounded(_power(*sides) if isinstance(op, ast.Pow) else _combined(op, *sides))
    raise CalculatorError("only numbers, + - * / // % ^ and parentheses")


def _literal(digits: str) -> Fraction:
    if not digits.replace(".", "", 1).isdecimal():  # hexadecimal, exponents, complex numbers
        raise CalculatorError(f"{digits!r} is not a plain number")
    return _bounded(Fraction(digits))


def _combined(op: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    if type(op) not in _BINARY:
        raise CalculatorError("only + - * / // % ^")
    try:
        return Fraction(_BINARY[type(op)](left, right))
    except ZeroDivisionError:
        raise CalculatorError("division by zero") from None


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise CalculatorError("exponents are whole numbers")
    if base == 0 and exponent < 0:
        raise CalculatorError("division by zero")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size > 1 and size * abs(exponent) > MAX_BITS:
        raise CalculatorError("the power is too large")
    if size <= 1:  # -1, 0, 1
        exponent = Fraction(abs(exponent) % 2) if base == -1 else min(abs(exponent), Fraction(1))
    return Fraction(base ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise CalculatorError("the number is too large")
    return value


def _shown(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    scaled = round(abs(value) * 10**MAX_DECIMALS)
    whole, decimals = divmod(scaled, 10**MAX_DECIMALS)
    sign = "-" if value < 0 and scaled else ""
    return f"{sign}{whole}.{decimals:0{MAX_DECIMALS}d}".rstrip("0").rstrip(".")
