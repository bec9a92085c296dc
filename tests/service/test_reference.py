"""The page about the service says what the catalogue has."""

from pathlib import Path

from holdfast.service.operations import CATALOGUE
from holdfast.service.reference import errors_table, operations_table

PAGE = Path(__file__).parents[2] / "docs" / "service.md"


def test_the_page_has_every_operation_and_every_error() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert operations_table(CATALOGUE) in page, "write it anew: python -m holdfast.service.reference"
    assert errors_table() in page, "write it anew: python -m holdfast.service.reference"
