"""Penstock, with its default settings: takes, scans and epochs of samples as they are stored, locally and from object storage."""

from __future__ import annotations

from typing import Any

import drawn
import numpy as np
import penstock as ps


def _create(path: str, schema: dict[str, Any], values: Any) -> Any:
    return lambda: len(ps.create(path, schema).append(values()).row_ids)


def samples_write(o: Any) -> Any:
    schema = {"image": ps.Tensor((32, 32, 3), "uint8"), "label": "int64"}
    return _create(
        f"{o.place}/penstock", schema, lambda: {"image": np.load(f"{o.place}/images.npy"), "label": np.load(f"{o.place}/labels.npy")}
    )


def samples(o: Any) -> Any:
    """Shuffled takes. With `fresh`, each turn opens the dataset anew, and verifies every checksum."""
    ps.configure(threads=o.threads)
    kept = ps.open(f"{o.place}/penstock")

    def turn() -> Any:
        ds = ps.open(f"{o.place}/penstock") if o.fresh else kept
        return drawn.takes(o, len(ds), ds.take)

    return turn


def jpegs_write(o: Any) -> Any:
    return _create(f"{o.place}/penstock", {"image": ps.Image()}, lambda: {"image": drawn.photographs(o)})


def jpegs(o: Any) -> Any:
    ps.configure(threads=o.threads)
    kept = ps.open(f"{o.place}/penstock")

    def turn() -> Any:
        ds = ps.open(f"{o.place}/penstock") if o.fresh else kept
        return drawn.takes(o, len(ds), lambda rows: ds.take(rows, decode=False)["image"])

    return turn


def ingest(o: Any) -> Any:
    ps.configure(threads=o.threads)
    return jpegs_write(o)


def text_write(o: Any) -> Any:
    def rows() -> dict[str, Any]:
        texts, labels = drawn.texts(o)
        return {"label": labels, "text": texts}

    return _create(f"{o.place}/penstock", {"label": "int64", "text": ps.Text()}, rows)


def text(o: Any) -> Any:
    ps.configure(threads=o.threads)
    ds = ps.open(f"{o.place}/penstock")
    return lambda: (ds.take(rows) for rows in drawn.random_rows(o, len(ds)))


def text_loader(o: Any) -> Any:
    """The same rows as a shuffled epoch of a view."""
    ds = ps.open(f"{o.place}/penstock")

    def turn() -> Any:
        view = ds.select(np.concatenate(drawn.random_rows(o, len(ds))))
        return view.loader(batch_size=o.batch, shuffle=True, threads=o.threads).stream(1)

    return turn


def remote_images_write(o: Any) -> Any:
    return _create(f"s3://{o.bucket}/penstock", {"image": ps.Image()}, lambda: {"image": drawn.photographs(o)})


def _opened(o: Any, name: str) -> Any:
    """Open a dataset, and take its last samples, so that connections are open."""
    ds = ps.open(f"s3://{o.bucket}/{name}")
    ds.take(np.arange(len(ds) - 64, len(ds)), decode=False)
    return ds


def remote_takes(o: Any) -> Any:
    """The block cache could hold all images: each turn wants a new process."""
    ds = _opened(o, "penstock")
    return lambda: (ds.take(rows, decode=False)["image"] for rows in drawn.shuffled(o, len(ds)))


def remote_scan(o: Any) -> Any:
    ds = _opened(o, "penstock")
    return lambda: ([np.frombuffer(batch.column(0).buffers()[2], np.uint8)] for batch in ds.scan(batch_size=o.batch))


def remote_epoch(o: Any) -> Any:
    ds = _opened(o, "penstock")

    def turn() -> Any:
        with ds.loader(batch_size=o.batch, shuffle=True, decode=False) as loader:
            yield from (batch["image"] for batch in loader.stream(1))

    return turn


def remote_rows_write(o: Any) -> Any:
    columns = drawn.three_columns(o.rows)
    return _create(f"s3://{o.bucket}/penstock-rows", {"a": "int64", "b": "float32", "text": ps.Text()}, lambda: columns)


def remote_rows(o: Any) -> Any:
    """The block cache could hold all rows: each turn wants a new process."""
    ds = _opened(o, "penstock-rows")
    return lambda: (ds.take(rows) for rows in drawn.random_rows(o, len(ds)))


def first_sample_write(o: Any) -> Any:
    """1,000,000 samples in 1,000 commits."""

    def turn() -> int:
        ds = ps.create(f"{o.place}/penstock", {"x": "int64"})
        for start in range(0, o.rows, 1000):
            ds.append({"x": np.arange(start, start + 1000)})
        return o.rows

    return turn


def first_sample(o: Any) -> Any:
    """Open, and take 100 samples."""
    positions = np.arange(0, o.rows, o.rows // 100)
    return lambda: len(ps.open(f"{o.place}/penstock").take(positions)["x"])


def commits(o: Any) -> Any:
    """One durable commit of one row at a time, in a new dataset each turn."""

    def turn() -> int:
        for number in range(o.commits):
            datasets[-1].append({"x": [number]})
        datasets.append(ps.create(f"{o.place}/penstock-{len(datasets)}", {"x": "int64"}))
        return int(o.commits)

    datasets = [ps.create(f"{o.place}/penstock-0", {"x": "int64"})]
    return turn


def append_rows(o: Any) -> Any:
    """Append one table from Arrow, NumPy or lists. The columns of the schema are those of the table."""
    kinds = {"number": "int64", "vector": ps.Tensor((16,), "float32"), "text": ps.Text(), "word": ps.Category(), "float": "float64"}
    columns = drawn.table_of(o)
    return lambda: len(ps.create(f"{o.place}/penstock", {name: kinds[name] for name in columns}).append(columns).row_ids)


def import_rows(o: Any) -> Any:
    from penstock.importers import import_data

    return lambda: import_data(o.source, f"{o.place}/penstock").samples


def embeddings(o: Any) -> Any:
    """One transaction; with `each`, its journal makes each batch durable."""
    rows = drawn.embedding_rows(o)
    ds = ps.create(f"{o.place}/penstock", {"e": ps.Tensor((rows.shape[1],), "float32")})
    with ds.transaction() as tx:
        for begin in range(0, len(rows), 1 << 15):
            tx.append({"e": rows[begin : begin + (1 << 15)]})
    transaction = ds.transaction(journal=f"{o.place}/journal" if o.each else None)

    def change(ids: Any) -> Any:
        unique, back = np.unique(ids, return_inverse=True)
        values = transaction.take(unique)["e"]
        values -= drawn.STEP
        transaction.update({"e": values}, row_ids=unique)
        return values[back]

    return drawn.changes(o, change, transaction.commit)
