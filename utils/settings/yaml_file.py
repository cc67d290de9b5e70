"""Reads YAML files of the user."""

import re
from pathlib import Path

import yaml

from utils.errors import UserError
from utils.files import reason

# Of YAML 1.1 these alone are numbers here: not 010, which is octal there, nor 10:00, which is 600.
# Everything else is a text, which the setting reads as its flag does.
NUMBERS = {
    "int": re.compile(r"[-+]?(0|[1-9][0-9]*)$"),
    "float": re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+][0-9]+)?$|[-+]?\.(inf|nan)$"),
}

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


def read_yaml_file(path: Path, flag: str) -> object:
    """What is in the file.

    Args:
        flag: that names it, for messages.

    Raises:
        UserError: it cannot be read, or is not YAML.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise UserError(f"{flag} {path}: {reason(error)}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # Unicode's is a ValueError
        problem = " ".join(str(error).split())
        raise UserError(f"{flag} {path} is not valid YAML: {problem}") from None
