"""The newest version of a model, by its name, of the store that a test file makes."""

from collections.abc import Callable

import pytest
from halfeven.models.store.store import Store, Version


@pytest.fixture
def version(store: Store) -> Callable[[str], Version]:
    def called(name: str) -> Version:
        found = store.newest(name)
        assert found is not None
        return found

    return called
