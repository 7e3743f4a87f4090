"""Tests; a package, since a dependency of the SageMaker SDK installs a package of the same name."""
