"""Test what a branch knows of a sample: a sample that never lived on a branch was not deleted there. Copied commits link fragments in part."""

import itertools

import penstock as ps
import pytest


def numbers(ds):
    """Return the values of column `n` by row id."""
    batch = ds.take(range(len(ds)), columns=["n", "_row_id"])
    return dict(zip(batch["_row_id"].tolist(), batch["n"].tolist(), strict=True))


def update(ds, row_ids, values):
    with ds.transaction() as tx:
        tx.update({"n": values}, row_ids=row_ids)


def delete(ds, row_ids):
    with ds.transaction() as tx:
        tx.delete(row_ids=row_ids)


def hidden(ds):
    """Return the numbers of deleted samples, and of those that never lived on the branch."""
    counts = ds.structure()
    return counts["deleted_samples"], counts["absent_samples"]


def corrected(root):
    """Return a branch `release` without samples, `main` with ten, and the commit that corrected one of them."""
    main = ps.create(root, {"n": "int32"})
    release = main.create_branch("release")
    added = main.append({"n": range(10)})
    with main.transaction("correct") as tx:
        tx.update({"n": [33]}, row_ids=[3])
    return main, release, added, tx.receipt


def test_a_merge_brings_samples_beside_a_copied_one(root):
    main, release, _, fix = corrected(root)
    assert release.cherry_pick(fix.snapshot, on_conflict="theirs").row_ids.tolist() == [3] and numbers(release) == {3: 33}
    assert hidden(release) == (0, 9)
    for use in (lambda: release.take(row_ids=[4]), lambda: delete(release, [4]), lambda: update(release, [4], [1])):
        with pytest.raises(ps.NotFoundError, match="no such sample exists"):
            use()
    receipt = release.merge("main")
    assert sorted(receipt.row_ids.tolist()) == [0, 1, 2, 4, 5, 6, 7, 8, 9] and numbers(release) == numbers(main) != {}
    assert len(main.merge("release").row_ids) == 0 and len(main) == 10
    assert not main.verify()["problems"] and not release.verify()["problems"]


def test_a_merge_of_a_copied_sample_deletes_nothing(root):
    main, release, _, fix = corrected(root)
    release.cherry_pick(fix.snapshot, on_conflict="theirs")
    release.append({"n": [100]})
    before = numbers(main)
    new = main.merge("release").row_ids.tolist()
    assert numbers(main) == before | {new[0]: 100} and not main.verify()["problems"]


@pytest.mark.parametrize("order", list(itertools.permutations(["append", "correct", "again"])), ids="-".join)
def test_copies_in_any_order_end_alike(root, order):
    main, release, added, fix = corrected(root)
    commits = {"append": added.snapshot, "correct": fix.snapshot, "again": fix.snapshot}
    policy = {"append": "ours", "correct": "theirs", "again": "theirs"}
    for what in order:
        release.cherry_pick(commits[what], on_conflict=policy[what])
    assert numbers(release) == numbers(main) and hidden(release) == (0, 0)
    assert len(release.merge("main").row_ids) == 0 and len(main.merge("release").row_ids) == 0
    assert len(main) == 10 and not main.verify()["problems"]


def test_a_sample_that_lived_on_a_branch_and_was_deleted_stays_deleted(root):
    main, release, added, fix = corrected(root)
    release.cherry_pick(fix.snapshot, on_conflict="theirs")
    release.cherry_pick(added.snapshot, on_conflict="ours")
    delete(release, [3, 7])
    release.merge("main", on_conflict="ours")
    assert sorted(numbers(release)) == [0, 1, 2, 4, 5, 6, 8, 9]
    main.merge("release")
    assert sorted(numbers(main)) == [0, 1, 2, 4, 5, 6, 8, 9] and not main.verify()["problems"]


def test_a_deletion_reaches_a_branch_that_copied_the_sample(root):
    main, release, added, _ = corrected(root)
    release.cherry_pick(added.snapshot)
    delete(main, [7])
    update(release, [8], [-8])
    delete(main, [8])
    with pytest.raises(ps.ConflictError, match="one side deleted and the other one changed in column `n`") as caught:
        release.merge("main", on_conflict="fail")
    assert 8 in caught.value.row_ids and 7 not in caught.value.row_ids
    release.merge("main", on_conflict="ours")
    assert sorted(numbers(release)) == [0, 1, 2, 3, 4, 5, 6, 8, 9] and numbers(release)[8] == -8
    assert main.merge("release").row_ids.tolist() == [8] and not main.verify()["problems"]


def test_a_copy_of_values_of_a_deleted_sample_makes_no_commit(root):
    main = ps.create(root, {"n": "int32"})
    exp = main.create_branch("exp")
    main.append({"n": [0]})
    fixes = main.create_branch("fixes")
    update(fixes, [0], [1])
    delete(main, [0])
    copy = exp.cherry_pick(fixes.snapshot, on_conflict="theirs").snapshot
    before = main.snapshot
    assert main.cherry_pick(copy).snapshot == before and numbers(main) == {}
    # `main` deleted another value, so the merge may not decide alone.
    with pytest.raises(ps.ConflictError, match="one side deleted and the other one changed"):
        exp.merge("main")
    assert numbers(exp) == {0: 1}


@pytest.mark.parametrize("others", [0, 1])
def test_a_copy_of_values_that_the_branch_has_makes_no_commit(root, others):
    main = ps.create(root, {"n": "int32", "m": "int32"})
    main.append({"n": range(3000), "m": range(3000)})
    exp = main.create_branch("exp")
    for ds in (main, exp):
        update(ds, range(3000), [-row for row in range(3000)])
    for _ in range(others):
        with main.transaction() as tx:
            tx.update({"m": [7]}, row_ids=[5])
    before = main.snapshot
    assert main.cherry_pick(exp.snapshot).snapshot == before
    # One value of many is another one.
    update(exp, range(2900, 3000), [-row if row != 2999 else 5 for row in range(2900, 3000)])
    main.cherry_pick(exp.snapshot)
    assert numbers(main)[2999] == 5 and not main.verify()["problems"]


def test_a_copied_deletion_deletes_only_what_lived_here(root):
    main, release, added, fix = corrected(root)
    delete(main, [3, 4])
    deletion = main.snapshot
    release.cherry_pick(fix.snapshot, on_conflict="theirs")
    release.cherry_pick(deletion)
    assert numbers(release) == {}
    release.cherry_pick(added.snapshot)
    assert sorted(numbers(release)) == [0, 1, 2, 4, 5, 6, 7, 8, 9], "sample 3 was deleted here, and sample 4 elsewhere"
    release.merge("main")
    assert sorted(numbers(release)) == [0, 1, 2, 5, 6, 7, 8, 9] and not release.verify()["problems"]


@pytest.mark.parametrize("policy", ["fail", "ours", "theirs"])
def test_values_before_a_deletion_are_known_after_it_was_merged(root, policy):
    main = ps.create(root, {"n": "int32"})
    exp, other = main.create_branch("exp"), main.create_branch("other")
    commits = [main.append({"n": [0, 1, 2]}).snapshot]
    for rows in ([0, 1, 2], [1]):
        with main.transaction() as tx:
            tx.update({"n": [10 * row for row in rows]}, row_ids=rows)
        commits.append(tx.receipt.snapshot)
    for commit in commits:
        other.cherry_pick(commit, on_conflict="theirs")
    delete(main, [0])
    # `exp` copies one sample, and learns from `main` that another one was deleted.
    exp.cherry_pick(commits[-1], on_conflict="theirs")
    exp.merge("main", on_conflict="theirs")
    # Nobody has changed sample 0 since, so the deletion reaches `other` whatever the policy is.
    other.merge("exp", on_conflict=policy)
    assert numbers(other) == {1: 10, 2: 20} and not other.verify()["problems"]


def test_a_deletion_is_known_after_it_was_merged(root):
    """The third branch has a copy of a sample, and the second one learns of its deletion without having had it."""
    main, second, added, _ = corrected(root)
    third = main.create_branch("third", second)
    third.cherry_pick(added.snapshot)
    delete(main, [0, 1])
    second.merge("main")
    third.merge(second, on_conflict="theirs")
    assert sorted(numbers(third)) == list(range(2, 10)) and not third.verify()["problems"]


def test_criss_cross_merges_after_copies_lose_nothing(root):
    main, release, _, fix = corrected(root)
    release.cherry_pick(fix.snapshot, on_conflict="theirs")
    release.append({"n": [50]})
    one, two = main.snapshot, release.snapshot
    main.merge(two)
    release.merge(one)
    assert numbers(main) == numbers(release) and len(main) == 11
    main.append({"n": [51]})
    release.merge("main")
    assert numbers(main) == numbers(release) and len(main) == 12 and not release.verify()["problems"]


def test_what_a_branch_knows_outlives_roots_and_branches(root):
    main, release, _, fix = corrected(root)
    release.cherry_pick(fix.snapshot, on_conflict="theirs")
    old = release.snapshot
    for number in range(70):  # Enough commits for roots.
        release.append({"n": [number]})
    delete(release, [3])
    later = main.create_branch("later", release.snapshot)
    early = main.create_branch("early", old)
    for branch, count in ((later, 79), (early, 10)):
        branch.merge("main", on_conflict="ours")
        assert len(branch) == count and (3 in numbers(branch)) == (branch is early)
        assert not branch.verify()["problems"]
    release.reset(old)
    release.merge("main")
    assert numbers(release) == numbers(main), "a reset returns what the branch knows, too"


def test_copies_made_at_once_link_a_fragment_once(root):
    main, release, _, fix = corrected(root)
    with main.transaction("another") as tx:
        tx.update({"n": [44]}, row_ids=[4])
    other = ps.open(root, branch="release")
    release.cherry_pick(fix.snapshot, on_conflict="theirs")
    other.cherry_pick(tx.receipt.snapshot, on_conflict="theirs")
    assert numbers(other) == {3: 33, 4: 44} and not other.verify()["problems"]
    assert hidden(other) == (0, 8)


def test_a_conflict_of_a_copy_says_what_the_branch_lacks(root):
    _, release, _, fix = corrected(root)
    with pytest.raises(ps.ConflictError, match="this branch lacks and the commit changed in column `n`") as caught:
        release.cherry_pick(fix.snapshot)
    assert caught.value.row_ids == [3] and caught.value.hint and numbers(release) == {}


def test_a_schema_change_is_copied_once(root):
    main = ps.create(root, {"n": "int16"})
    main.append({"n": [1, 2]})
    branch, commits = main.create_branch("exp"), []
    for change in (
        lambda tx: tx.widen_column("n", "int64"),
        lambda tx: tx.add_column("m", "int32", fill=5),
        lambda tx: tx.rename_column("m", "k"),
        lambda tx: tx.drop_column("k", force=True),
    ):
        with branch.transaction() as tx:
            change(tx)
        commits.append(tx.receipt.snapshot)
        first = main.cherry_pick(commits[-1]).snapshot
        for commit in commits[:1] if len(commits) < 4 else commits[:1] + commits[3:]:
            assert main.cherry_pick(commit).snapshot == first, "the branch has this change already"
    assert list(main.schema) == ["n"] and str(main["n"][:].dtype) == "int64" and not main.verify()["problems"]


def test_a_copy_of_steps_to_a_dtype_that_the_branch_has_makes_no_commit(root):
    main = ps.create(root, {"n": "int16"})
    branch = main.create_branch("exp")
    commits = []
    for wider in ("int32", "int64"):
        with branch.transaction() as tx:
            tx.widen_column("n", wider)
        commits.append(tx.receipt.snapshot)
        if wider == "int32":
            values = branch.append({"n": [2**20]}).snapshot
    with main.transaction() as tx:
        tx.widen_column("n", "int64")
    for commit in commits:
        assert main.cherry_pick(commit).snapshot == tx.receipt.snapshot
    # The copied file has the dtype between both, which `main` has not known so far.
    main.cherry_pick(values)
    assert main["n"][:].tolist() == [2**20] and str(main["n"][:].dtype) == "int64" and not main.verify()["problems"]


def test_a_copy_says_which_column_the_branch_lacks(root):
    main = ps.create(root, {"n": "int16"})
    release = main.create_branch("release")
    with main.transaction() as tx:
        tx.add_column("score", "float32")
    added = main.append({"n": [1], "score": [0.5]}).snapshot
    with pytest.raises(ps.ConflictError, match="added 1 values of column `score`, which this branch lacks") as caught:
        release.cherry_pick(added)
    assert "copy the commit that added the column first" in caught.value.hint and caught.value.column == "score"
    release.cherry_pick(main.log()[1].snapshot)
    release.cherry_pick(added)
    assert release["score"][:].tolist() == [0.5]
