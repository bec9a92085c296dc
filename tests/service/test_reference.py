"""The page about the service says what the catalogue has."""

from tools.reference import PAGE, page_with_tables


def test_the_page_has_every_operation_and_every_error() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page_with_tables(page) == page, "run python -m tools.reference"
