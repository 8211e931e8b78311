"""Options, dtypes and shapes as other libraries write them are refused with what to write here."""

import datetime

import penstock as ps
import pyarrow as pa
import pytest
import torch


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("num_workers", "write threads=N"),
        ("drop_last", 'write last_batch="drop"'),
        ("pin_memory", "pin_memory()"),
        ("collate_fn", "T.PerBatch"),
        ("sampler", "ds.select"),
        ("prefetch_factor", "memory_bytes="),
        ("persistent_workers", "leave it out"),
        ("generator", "write seed="),
        ("transforms", "write transform="),
        ("epochs", "loader.stream"),
        ("batchsize", "write batch_size="),
        ("suffle", "write shuffle="),
        ("nonsense", "options: batch_size"),
    ],
)
def test_an_option_of_another_loader_names_ours(option, hint):
    ds = ps.create(f"memory://option-{option}", {"n": "int32"})
    for source in (ds, ps.mix({"a": (ds, 1)}, epoch_samples=1)):
        with pytest.raises(ps.InvalidInputError, match=f"no option `{option}`") as caught:
            source.loader(batch_size=2, **{option: 1})
        assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("dtype", "hint"),
    [
        ("string", "ps.Text()"),
        (str, "ps.Text()"),
        (pa.string(), "ps.Text()"),
        (bytes, "ps.Bytes()"),
        (dict, "ps.Json()"),
        ("object", "ps.Json()"),
        ("image", "ps.Image()"),
        ("category", "ps.Category()"),
        (list, "ps.Tensor("),
        (datetime.datetime, '"timestamp"'),
        ("bbox", "ps.Boxes("),
        ("foo", "valid dtypes: bool"),
        (None, "valid dtypes: bool"),
        (3, "valid dtypes: bool"),
    ],
    ids=str,
)
def test_a_dtype_of_another_library_names_ours(dtype, hint):
    with pytest.raises(ps.InvalidInputError, match="unknown dtype") as caught:
        ps.create("memory://dtype-refused", {"a": dtype})
    assert hint in caught.value.hint


def test_dtypes_of_torch_and_arrow_and_shapes():
    assert (
        ps.Tensor((3,), torch.bfloat16).dtype == "bfloat16"
        and ps.Scalar(pa.uint16()).dtype == "uint16"
        and ps.Scalar(float).dtype == "float64"
    )
    for shape, hint in ((3, r"write ps.Tensor((3,), …)"), ("float32", 'write ps.Tensor((768,), "float32")'), (None, "ps.Tensor((768,)")):
        with pytest.raises(ps.InvalidInputError, match="expected a tuple") as caught:
            ps.Tensor(shape, "float32")
        assert hint in caught.value.hint
    with pytest.raises(ps.InvalidInputError) as caught:
        ps.Label("cat")
    assert 'ps.Label(["cat", "dog"])' in caught.value.hint
