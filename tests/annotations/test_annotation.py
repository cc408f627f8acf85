"""The table of classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pathoseg.annotations.annotation import ClassTable
from pathoseg.errors import PathosegError

TABLE = ClassTable(("tumour", "stroma"), ((255, 0, 0), (0, 255, 0)))


def test_background_is_index_0() -> None:
    assert len(TABLE) == 3
    assert TABLE.index("tumour") == 1
    assert TABLE.indices(["stroma"], Path("a.xml")) == {"stroma": 2}


def test_a_class_that_is_not_in_the_table_is_refused_by_name_and_file() -> None:
    with pytest.raises(PathosegError, match=r'a\.xml.*"necrosis".*"tumour", "stroma"') as refused:
        TABLE.indices(["stroma", "necrosis"], Path("a.xml"))
    assert "classes" in refused.value.hint
