"""The loader: training batches of a view or a mixture. Start at `loader.py`."""

from penstock.loader.loader import Loader
from penstock.loader.options import Options

__all__ = ["Loader", "Options"]
