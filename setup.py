"""Packages, nsa/autoload under a second name too, and the notebooks, as workbook/notebooks.

All else stands in pyproject.toml.
"""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

NAMES = "nsa", "whyhung", "workbook"


class WithNotebooks(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:  # else they are read where they lie
            for source, target in self.notebooks().items():
                self.mkpath(str(Path(target).parent))
                self.copy_file(source, target)

    def notebooks(self) -> dict[str, str]:
        found = [*Path("notebooks").glob("*.ipynb"), *Path("notebooks/params").glob("*.yaml")]
        return {str(file): str(Path(self.build_lib, "workbook", file)) for file in sorted(found)}

    def get_outputs(self, include_bytecode=1):
        return [*super().get_outputs(include_bytecode), *self.notebooks().values()]


setup(
    packages=[
        *find_packages(include=[f"{name}{end}" for name in NAMES for end in ("", ".*")]),
        "nsa_autoload",
    ],
    package_dir={"nsa_autoload": "nsa/autoload"},
    cmdclass={"build_py": WithNotebooks},
)
