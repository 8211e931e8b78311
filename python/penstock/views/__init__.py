"""Views: what users read a dataset through."""
