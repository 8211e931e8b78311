"""Options of a verb from a file in TOML. What is given on the command line wins."""

from __future__ import annotations

import difflib
import pathlib
import tomllib
from typing import Any

import typer

from penstock.cli.terminal import at


def read(ctx: typer.Context, path: str) -> str:
    """Take options from a file: the names of the verb's options without dashes in front, and a table `option` for options of the store.

    For `callback=` of an option that is eager. Raises: BadParameter if the file cannot be read, or names an unknown option.
    """
    if not path or ctx.resilient_parsing:
        return path
    try:
        found: dict[str, Any] = tomllib.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise typer.BadParameter(f"cannot read `{path}`: {error}") from None
    stored = found.pop("option", {})
    if not isinstance(stored, dict):
        raise typer.BadParameter(f"`option` in `{path}` is not a table; write [option], then a line for each option of the store")
    names = {flag.lstrip("-"): param.name for param in ctx.command.params for flag in param.opts if flag.startswith("--")}
    for unsuitable in ("config", "check", "help"):
        names.pop(unsuitable, None)
    repeated = {param.name for param in ctx.command.params if param.multiple}
    values: dict[str | None, Any] = {}
    for key, value in found.items():
        name = key.replace("_", "-")
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(sorted(names))}"
            raise typer.BadParameter(f"`{path}` has an unknown key `{key}`; {hint}")
        if names[name] in values:
            raise typer.BadParameter(f"`{path}` names `{name}` twice, with a dash and with an underscore")
        if isinstance(value, dict):
            raise typer.BadParameter(f"`{key}` in `{path}` is a table; write {name} = …")
        values[names[name]] = [value] if names[name] in repeated and isinstance(value, str) else value
    ctx.default_map = {**(ctx.default_map or {}), **{str(name): value for name, value in values.items()}}
    at.storage_options.update({name: str(value) for name, value in stored.items() if name not in at.storage_options})
    return path
