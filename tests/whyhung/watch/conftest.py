import pytest

from whyhung.watch import Progress


@pytest.fixture
def counters(tmp_path):
    made = Progress(tmp_path / "progress.bin")
    yield made
    made.close()
