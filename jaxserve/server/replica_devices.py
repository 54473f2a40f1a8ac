from collections.abc import Mapping

from jaxserve.config import ServerArgs


def replica_environment(args: ServerArgs, rank: int, environment: Mapping[str, str]) -> dict[str, str]:
    return {}
