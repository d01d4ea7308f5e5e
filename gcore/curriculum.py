"""Public names for curricula; the code is in `gcore.data.curriculum`."""

from gcore.data.curriculum import Curriculum, CurriculumError, CurriculumView, Key, SourceStatistics

__all__ = ["Curriculum", "CurriculumError", "CurriculumView", "Key", "SourceStatistics"]
