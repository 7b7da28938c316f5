"""Trainings and swarms on disk: kept, resumed, saved, described."""
