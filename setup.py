"""The packages of the wheel: the checkout's root, and every folder of the three rooms with code in it."""

from setuptools import find_packages, setup

rooms = find_packages(include=("models*", "exporters*", "serve*"))
# The name keeps this file out of the wheel, whose root is its folder: a build front end calls itself the script.
setup(script_name="setup.py", packages=["halfeven", *(f"halfeven.{name}" for name in rooms)])
