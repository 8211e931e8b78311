"""Text and JSON: conversions to values."""
