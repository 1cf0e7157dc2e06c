import pytest


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    """Every test stores its maps in a folder of its own."""
    folder = tmp_path / "maps"
    monkeypatch.setenv("HF_ENSEMBLE_CACHE", str(folder))
    return folder
