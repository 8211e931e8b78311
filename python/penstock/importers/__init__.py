"""Importers: stream files, folders or iterables into one commit, in bounded memory.

Each format has a file with `open_source(source, options)`, which returns a `OpenedSource`: a schema and chunks of rows. `opening` chooses it, and `run` does the rest.

>>> import penstock as ps, pathlib, tempfile
>>> folder = pathlib.Path(tempfile.mkdtemp())
>>> lines = (folder / "rows.csv").write_text("name,age\\nada,36\\nalan,41\\n")
>>> report = ps.importers.import_data(folder / "rows.csv", folder / "dataset")
>>> report.samples, ps.open(folder / "dataset")[1]
(2, {'name': 'alan', 'age': np.int64(41)})
"""

from penstock.importers.opening import FORMATS
from penstock.importers.run import import_data
from penstock.importers.shared.source import Chunk, OpenedSource, Options, Refusal, Report

__all__ = ["FORMATS", "Chunk", "OpenedSource", "Options", "Refusal", "Report", "import_data"]
