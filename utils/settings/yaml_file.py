"""Reads YAML files of the user: recipes, and `--host_config FILE`, folders by host name, as in

node1:     {data_dir: /local/pictures, cache_dir: /local/cache}
"gpu*":    {data_dir: /scratch/pictures}
"*":       {data_dir: data}
"""

import fnmatch
import re
from collections.abc import Collection, Mapping
from pathlib import Path

import yaml

from ..errors import UserError
from ..files import reason

# Of YAML 1.1 these alone are numbers here: not 010, which is octal there, nor 10:00, which is 600.
# Everything else is a text, which the setting reads as its flag does.
NUMBERS = {
    "int": re.compile(r"[-+]?(0|[1-9][0-9]*)$"),
    "float": re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+][0-9]+)?$|[-+]?\.(inf|nan)$"),
}
# The settings that may depend on the host: where files are. All others decide what is trained.
PLACES = ("data_dir", "cache_dir", "output", "train_file", "test_file", "val_file", "labels")
MERGE = "tag:yaml.org,2002:merge"  # the key <<, whose mappings YAML adds to the one that it is in


class Loader(yaml.SafeLoader):
    """YAML's safe types without dates; a key that is given twice is an error."""

    def construct_mapping(self, node, deep=False):
        names = []
        for key, _ in node.value:
            if key.tag == MERGE:
                continue
            name = self.construct_object(key, deep=True)
            if name in names:
                problem = f"{name} is there twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            names.append(name)
        return super().construct_mapping(node, deep)


Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag.rpartition(":")[2] not in ("timestamp", *NUMBERS)
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for name, pattern in NUMBERS.items():
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{name}", pattern, list("-+.0123456789"))


def read_yaml_file(path: Path, flag: str, loader: type[yaml.SafeLoader] = Loader) -> object:
    """What is in the file.

    Args:
        flag: that names it, for messages.
        loader: makes values of what is there.

    Raises:
        UserError: it cannot be read, or is not YAML.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), loader)
    except OSError as error:
        raise UserError(f"{flag} {path}: {reason(error)}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # Unicode's is a ValueError
        problem = " ".join(str(error).split())
        raise UserError(f"{flag} {path} is not valid YAML: {problem}") from None


def places_of(path: Path, host: str, known: Collection[str]) -> dict:
    """The settings of this host, not converted: of its full name, of its name up to the first dot,
    or of the first pattern that fits.

    Args:
        known: settings of the entry.

    Raises:
        UserError: the file cannot be read or says something else, none fits, or a setting may not
            depend on the host.
    """
    hosts, short = read_yaml_file(path, "--host_config"), host.partition(".")[0]
    if not isinstance(hosts, Mapping) or not all(isinstance(v, Mapping) for v in hosts.values()):
        raise UserError(
            f"--host_config {path}: for each host a name and its folders are needed, as in "
            "node1: {data_dir: /local/pictures}"
        )
    hosts = {str(name): dict(places) for name, places in hosts.items()}
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
