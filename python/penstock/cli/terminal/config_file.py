"""Options of a verb from a file in TOML. What is given on the command line wins."""

from __future__ import annotations

import difflib
import pathlib
import tomllib
from typing import Any

import typer

from penstock.cli.terminal import at


def _checked(param: Any, value: Any, place: str) -> Any:
    """Return the value of an option. Raises: BadParameter if it has another type."""
    if param.multiple:
        value = value if isinstance(value, list) else [value]
        is_right, kind = all(isinstance(one, str) and one for one in value), 'a non-empty string, or a list of them, such as ["a", "b"]'
    elif param.is_flag:
        is_right, kind = isinstance(value, bool), "true or false"
    elif param.type_descriptor.annotation in (int, float):
        is_right, kind = isinstance(value, int | float) and not isinstance(value, bool), "a number"
    else:
        is_right, kind = isinstance(value, str) and bool(value), 'a non-empty string, such as "a"'
    if not is_right:
        raise typer.BadParameter(f"{place} must be {kind}")
    return value


def read(ctx: typer.Context, path: str) -> str:
    """Take options from a file: the names of the verb's options without dashes in front, and a table `option` for options of the store.

    For `callback=` of an option that is eager. Raises: BadParameter if the file cannot be read, or names an unknown option.
    """
    if not path or ctx.resilient_parsing:
        return path
    try:
        found: dict[str, Any] = tomllib.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise typer.BadParameter(f"cannot read `{path}`: {error}") from None
    stored = found.pop("option", {})
    if not isinstance(stored, dict):
        raise typer.BadParameter(f"`option` in `{path}` is not a table; write [option], then one line per store option")
    for key, value in stored.items():
        if not isinstance(value, str | int | float):
            raise typer.BadParameter(f"`{key}` under [option] in `{path}` must be a string or a number")
    names = {flag.lstrip("-"): param for param in ctx.command.params for flag in param.opts if flag.startswith("--")}
    for unsuitable in ("config", "check", "help"):
        names.pop(unsuitable, None)
    values: dict[str, Any] = {}
    for key, value in found.items():
        name = key.replace("_", "-")
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(sorted(names))}"
            raise typer.BadParameter(f"`{path}` has an unknown key `{key}`; {hint}")
        param = names[name]
        if str(param.name) in values:
            raise typer.BadParameter(f"`{path}` contains `{name}` twice, with a dash and with an underscore")
        values[str(param.name)] = _checked(param, value, f"`{key}` in `{path}`")
    ctx.default_map = {**(ctx.default_map or {}), **values}
    at.storage_options.update({name: str(value) for name, value in stored.items() if name not in at.storage_options})
    return path
