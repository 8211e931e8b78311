"""What tests ask of the handle of a dataset: what some work cost, and the newest snapshot."""


def spent(ds, work):
    """Run `work` and return the change in each counter, omitting unchanged counters."""
    before = ds.stats()
    work()
    return {name: value - before[name] for name, value in ds.stats().items() if value != before[name]}


def newest(ds, samples):
    """Refresh until the dataset has at least `samples` samples, because a stale listing may yield an old snapshot."""
    for _ in range(20):
        if len(ds.refresh()) >= samples:
            break
    return ds
