"""Model presets (`presets.py`, without torch) and how they are built (`build.py`)."""
