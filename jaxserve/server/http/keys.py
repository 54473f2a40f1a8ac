"""Where the server's keys come from: an option, a file, or the environment, which other users' `ps` does not show. One each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jaxserve.config import ServerArgs, check_key

ENVIRONMENT = {"api_key": "JAXSERVE_API_KEY", "admin_api_key": "JAXSERVE_ADMIN_API_KEY"}


def with_keys(args: ServerArgs, environment: Mapping[str, str]) -> ServerArgs:
    """The options with their keys in place. Raises ValueError with a sentence."""
    for name, variable in ENVIRONMENT.items():
        path: str | None = getattr(args, f"{name}_file")
        flag = "--" + name.replace("_", "-")
        sources = {
            flag: getattr(args, name),
            f"{flag}-file": path,
            f"the environment's {variable}": environment.get(variable),
        }
        given = [source for source, value in sources.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} each give a key; only one of them may.")
        key = environment.get(variable) if path is None else _read_key(path, f"{flag}-file")
        if key is not None:
            check_key(key, given[0])
            args = args.replace(**{name: key, f"{name}_file": None})
    return args


def _read_key(path: str, flag: str) -> str:
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise ValueError(f"{flag} {path!r} cannot be read: {reason}.") from None
