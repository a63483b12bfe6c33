"""Options that belong together: a command gets them as one object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints

Command = Callable[..., None]


def option_group(
    argument: str, kind: type[Any], options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Callable[[Command], Command]:
    """Give a command an option for each of these fields of ``kind``, where its keyword ``argument`` stands, which gets
    an object made of them.

    Args:
        kind: a dataclass.
        options: field -> type and ``typer.Option``, in the order of ``--help``.
        defaults: of options whose default is not the field's.
    """
    default_of = {field.name: field.default for field in fields(kind)} | dict(defaults)

    def decorate(command: Command) -> Command:
        hints = get_type_hints(command, include_extras=True)
        parameters: list[Parameter] = []
        for own in signature(command).parameters.values():
            if own.name != argument:
                parameters.append(own.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[own.name]))
                continue
            for name, option in options.items():
                parameter = Parameter(name, Parameter.KEYWORD_ONLY, default=default_of[name], annotation=option)
                parameters.append(parameter)

        @wraps(command)
        def run(**given: Any) -> None:
            made = kind(**{name: given.pop(name) for name in options})
            command(**given, **{argument: made})

        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate
