"""What is measured to be slow is listed: a test alone, or a function with all its tests."""

from tools.slow_tests import slow_tests


def test_a_test_that_computes_or_waits_for_long_is_listed() -> None:
    lines = ["0.210\t0.220\ta.py::computes", "0.010\t1.100\ta.py::waits", "0.190\t0.900\ta.py::neither"]
    assert slow_tests(lines) == ["a.py::computes", "a.py::waits"]


def test_a_function_is_listed_if_most_of_its_tests_are_slow_and_else_those_alone() -> None:
    lines = ["1.0\t1.0\ta.py::most[0]", "1.0\t1.0\ta.py::most[1]", "0.0\t0.0\ta.py::most[2]"]
    lines += ["1.0\t1.0\ta.py::few[\t[0]", "0.0\t0.0\ta.py::few[1]", "0.0\t0.0\ta.py::few[2]"]
    assert slow_tests(lines) == ["a.py::few[\t[0]", "a.py::most"]
