"""Importers of folders of pictures, with or without annotations: one file per form."""
