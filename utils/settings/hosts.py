"""`--host_config FILE`: folders by the name of the host, as in

node1:     {data_dir: /local/pictures, cache_dir: /local/cache}
"gpu*":    {data_dir: /scratch/pictures}
"*":       {data_dir: data}
"""

import fnmatch
from collections.abc import Collection, Mapping
from pathlib import Path

from utils.errors import UserError

# The settings that may depend on the host: where files are. All others decide what is trained.
PLACES = ("data_dir", "cache_dir", "output", "train_file", "test_file", "val_file")


def read_hosts(path: Path) -> dict[str, dict]:
    """{host name or pattern: {setting: value}}.

    Raises:
        UserError: the file cannot be read, or says something else.
    """
    from utils.settings.yaml_file import read_yaml_file

    content = read_yaml_file(path, "--host_config")
    if not isinstance(content, Mapping) or not all(
        isinstance(places, Mapping) for places in content.values()
    ):
        raise UserError(
            f"--host_config {path}: for each host a name and its folders are needed, as in "
            "node1: {data_dir: /local/pictures}"
        )
    return {str(host): dict(places) for host, places in content.items()}


def places_of(path: Path, host: str, known: Collection[str]) -> dict:
    """The settings of this host, not converted: of its full name, of its name up to the first dot,
    or of the first pattern that fits.

    Args:
        known: settings of the entry.

    Raises:
        UserError: none fits, or a setting may not depend on the host.
    """
    hosts, short = read_hosts(path), host.partition(".")[0]
    fits = [name for name in (host, short) if name in hosts]
    fits += [name for name in hosts if any(fnmatch.fnmatchcase(h, name) for h in (host, short))]
    if not fits:
        raise UserError(
            f'--host_config {path}: nothing there fits this host, {host}; a last entry "*" is for '
            "all others"
        )
    places = hosts[fits[0]]
    for name in places:
        if name not in PLACES or name not in known:
            possible = ", ".join(place for place in PLACES if place in known)
            raise UserError(
                f"--host_config {path}: {name} cannot depend on the host; {possible} can"
            )
    return places
