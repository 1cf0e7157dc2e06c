import pytest


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    """A folder of maps for one test alone; it does not exist yet."""
    folder = tmp_path / "maps"
    monkeypatch.setenv("HF_ENSEMBLE_CACHE", str(folder))
    return folder
