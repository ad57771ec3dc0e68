"""The packages of the wheel: the checkout's root, and every folder of the three rooms with code in it."""

from setuptools import find_packages, setup

rooms = find_packages(include=("models*", "exporters*", "serve*"))
setup(packages=["halfeven", *(f"halfeven.{name}" for name in rooms)])
