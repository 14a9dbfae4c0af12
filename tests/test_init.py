"""The package's own names."""

from importlib.metadata import version

import pytest

import fedseal


def test_every_name_that_dir_shows_exists() -> None:
    names = dir(fedseal)
    assert {"train", "load", "export", "evaluate", "UserError", "__version__"} <= set(names)
    assert all(getattr(fedseal, name) is not None for name in names)
    assert fedseal.__version__ == version("fedseal")
    with pytest.raises(AttributeError, match="module 'fedseal' has no attribute 'exprot'"):
        _ = fedseal.exprot
