"""The tag of the wheel; pyproject.toml has all else."""

from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel


class Wheel(bdist_wheel):
    """For every platform where the extension could not be built: torch trains there."""

    def run(self) -> None:
        """Build the extension first, because the tag depends on it."""
        self.run_command("build_ext")
        if not all(Path(file).exists() for file in self.get_finalized_command("build_ext").get_outputs()):
            self.distribution.ext_modules, self.root_is_pure = None, True
        super().run()


setup(cmdclass={"bdist_wheel": Wheel})
