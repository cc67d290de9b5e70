"""Reads YAML files of the user."""

from pathlib import Path

import yaml

from utils.errors import UserError
from utils.files import reason


def read_yaml_file(path: Path, flag: str) -> object:
    """What is in the file.

    Args:
        flag: that names it, for messages.

    Raises:
        UserError: it cannot be read, or is not YAML.
    """
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{flag} {path}: {reason(error)}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split())
        raise UserError(f"{flag} {path} is not valid YAML: {problem}") from None
