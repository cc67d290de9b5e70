"""Builds the package `fewhours` from the folders and scripts of a checkout, see pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ABSOLUTE = re.compile(r"^(\s*)from (utils|tuning)\b", re.MULTILINE)


class BuildPackage(build_py):
    """Adds the entry scripts. What is the module `utils` or `tuning` in a checkout is
    `fewhours.utils` or `fewhours.tuning` in the package."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # fewhours/__init__.py finds the checkout
            return
        package = Path(self.build_lib, "fewhours")
        self.mkpath(str(package / "entries"))
        for script in Path().glob("*_test.py"):
            self.copy_file(str(script), str(package / "entries"), preserve_mode=False)
        for path in package.glob("tuning/*"):
            if path.suffix == ".sh" or path.stem.endswith("_tuning"):  # of a checkout
                path.unlink()
        for path in package.rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            path.write_text(ABSOLUTE.sub(r"\1from fewhours.\2", text), encoding="utf-8")


FOLDERS = ["utils", *(f"utils.{name}" for name in find_packages("utils")), "tuning"]
setup(
    packages=["fewhours", "fewhours.recipes", *(f"fewhours.{name}" for name in FOLDERS)],
    package_dir={
        "fewhours": "fewhours",
        "fewhours.recipes": "recipes",
        "fewhours.utils": "utils",
        "fewhours.tuning": "tuning",
    },
    package_data={
        "fewhours": ["py.typed"],
        "fewhours.recipes": ["*.yaml"],
        "fewhours.tuning": ["*_space.yaml"],
        "fewhours.utils.launch": ["help.txt"],
        "fewhours.utils.reporting": ["templates/*.html"],
    },
    cmdclass={"build_py": BuildPackage},
)
