"""For all tests: no example of a property is judged by how long it took, because machines are shared."""

from hypothesis import settings

settings.register_profile("gcore", deadline=None)
settings.load_profile("gcore")
