"""Verbs that list, name, compare and combine versions."""
