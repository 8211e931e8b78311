"""The columns of a source that are imported, and their names in the dataset."""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.errors import InvalidInputError

LONGEST_NAME_BYTES = 255


@dataclasses.dataclass(frozen=True)
class Naming:
    """The choice of a user: only some `columns`, none of those in `drop`, and other names, `rename`. All of these are the source's names,
    except the new ones.
    """

    columns: Sequence[str] = ()
    drop: Sequence[str] = ()
    rename: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def leaves_out(self, name: str) -> bool:
        """Return whether a column of the source is not imported."""
        return name in self.drop or bool(self.columns and name not in self.columns)

    def names_of(self, found: Sequence[str], source: object, all_found: bool = True) -> dict[str, str]:
        """Return the columns to import, each with its name in the dataset. Unless `all_found`, later rows may have columns to drop.

        Raises: InvalidInputError for a column that the source lacks, and for two columns of one name.
        """
        for option, given in (("columns", self.columns), ("drop", self.drop), ("rename", self.rename)):
            if missing := [name for name in given if name not in found and (all_found or option != "drop")]:
                raise InvalidInputError(
                    f"cannot import `{source}`: {option} names `{missing[0]}`, which is not one of its columns",
                    hint=f"columns: {', '.join(f'`{name}`' for name in found)}",
                )
        chosen = list(dict.fromkeys(self.columns or [name for name in found if name not in self.drop]))
        chosen = [name for name in chosen if name not in self.drop]
        if not chosen:
            raise InvalidInputError(f"cannot import `{source}`: none of its {len(found)} columns is left")
        names = {name: self.rename.get(name, name) for name in chosen}
        taken = {name for source_name, name in names.items() if source_name in self.rename or is_usable(name)}
        for place, name in enumerate(found):
            if name in names and name not in self.rename and not is_usable(name):
                names[name] = usable(name, place, taken)
                taken.add(names[name])
        both = {new: old for old, new in names.items()}
        if len(both) < len(names):
            one = next(old for old, new in names.items() if both[new] != old)
            raise InvalidInputError(
                f"cannot import `{source}`: its columns `{one}` and `{both[names[one]]}` get the same name, `{names[one]}`"
            )
        return names

    def source_names(self, given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
        """Return something by the names of the source that is given by those of the dataset."""
        back = {new: old for old, new in names.items()}
        return {back.get(name, name): value for name, value in given.items() if name in back or name not in names}


def check_distinct(names: Sequence[str], source: object) -> None:
    """Refuse a table with two columns of one name. Raises: InvalidInputError (invalid-schema)."""
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        places = " and ".join(str(place) for place, name in enumerate(names, 1) if name == twice)
        raise InvalidInputError(
            f"cannot import `{source}`: its columns {places} have the same name, `{twice}`",
            code="invalid-schema",
            hint="give them different names in the source",
        )


def is_usable(name: str) -> bool:
    """Return whether a dataset may have a column of this name."""
    return usable(name, 0, ()) == name


def usable(name: str, place: int, taken: Iterable[str]) -> str:
    """Return a name that a dataset accepts, for a column of a source that has another one. `taken` are the names of other columns.

    >>> usable("", 0, ()), usable("_id", 1, ["id"]), usable("__index_level_0__", 2, ()), usable("a\\nb", 3, ())
    ('column_0', 'id_2', 'index_level_0', 'a b')
    """
    plain = "".join(" " if unicodedata.category(letter) == "Cc" else letter for letter in name).encode("utf-8", "replace").decode()
    plain = plain.strip("_") if plain.startswith("_") else plain
    plain = plain.encode()[:LONGEST_NAME_BYTES].decode("utf-8", "ignore") or f"column_{place}"
    made, number = plain, 2
    while made in taken:
        made, number = f"{plain.encode()[: LONGEST_NAME_BYTES - 8].decode('utf-8', 'ignore')}_{number}", number + 1
    return made
