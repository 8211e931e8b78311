"""What to write instead of names that datasets of other libraries have."""

from __future__ import annotations

INSTEAD = {
    "map": "add a function to transform=[…] of the loader, or store the result: ds.backfill(column, function, columns=[…])",
    "shuffle": "shuffle when you load: ds.loader(batch_size=…, shuffle=True); or choose some: ds.sample(100, seed=0)",
    "train_test_split": 'write ds.split({"train": 0.8, "test": 0.2}, seed=0)',
    "random_split": 'write ds.split({"train": 0.8, "test": 0.2}, seed=0)',
    "features": "write ds.schema",
    "column_names": "write ds.columns",
    "dtypes": "write ds.schema",
    "num_rows": "write len(ds)",
    "shape": "write len(ds), and ds[column].shape",
    "set_format": 'write ds.loader(batch_size=…, output="torch"), or ds.to_torch([…])',
    "with_format": 'write ds.loader(batch_size=…, output="torch"), or ds.to_torch([…])',
    "set_transform": "write ds.loader(batch_size=…, transform=[…])",
    "with_transform": "write ds.loader(batch_size=…, transform=[…])",
    "to_csv": "write ds.to_pandas([…]).to_csv(path)",
    "to_table": "write ds.to_arrow([…])",
    "to_batches": "write ds.scan([…])",
    "to_dict": "write ds.take(range(len(ds)))",
    "tail": "write ds.select(slice(-5, None))",
    "iloc": "write ds[[0, 1]], or ds.select([0, 1]) for a view",
    "loc": "write ds.select(mask)",
    "query": 'write ds.filter("year > 1999"), or SQL over ds.to_arrow_dataset()',
    "where": 'write ds.filter("year > 1999"), or SQL over ds.to_arrow_dataset()',
    "sql": "write duckdb.sql(…) over ds.to_arrow_dataset()",
    "unique": "write set(ds.vocabulary(column)), or numpy.unique(ds[column][:])",
    "rename_column": "write it in a transaction: tx.rename_column(old, new)",
    "add_classes": "write it in a transaction: tx.add_classes(column, names)",
    "rename_class": "write it in a transaction: tx.rename_class(column, old, new)",
    "remove_columns": "choose columns, ds[[…]], or drop them in a transaction: tx.drop_column(name)",
    "add_column": "write it in a transaction: tx.add_column(name, type)",
    "update": "write ds.update({column: values}, row_ids=…), or on=column",
    "delete": "write it in a transaction: tx.delete(row_ids=…)",
    "checkout": "write ps.open(uri, snapshot=…), tag=… or branch=…",
    "commit": "write with ds.transaction(message) as tx: …",
    "version": "write ds.snapshot",
    "versions": "write ds.log()",
    "concatenate": "write ps.concat([one, other])",
    "add": "write ds.append({column: values})",
    "insert": "write ds.append({column: values})",
    "sample": "choose in each view first: ps.concat([one.sample(50), other.sample(50)])",
    "save": "nothing: append and transactions store data immediately",
    "close": "nothing: a dataset holds no lock; del ds frees its memory",
    "flush": "nothing: append and transactions store data immediately",
}


def missing(owner: object, name: str, instead: str | None = None) -> AttributeError:
    """Return the error for an attribute that does not exist, with what to write instead."""
    instead = instead or INSTEAD.get(name)
    return AttributeError(f"a {type(owner).__name__} has no `{name}`" + (f": {instead}" if instead else ""), name=name, obj=owner)
