"""The loader: training batches from a view or a mixture. Start reading at `loader.py`."""

from penstock.loader.loader import Loader
from penstock.loader.options import LoaderOptions, unknown_option

__all__ = ["Loader", "LoaderOptions", "unknown_option"]
